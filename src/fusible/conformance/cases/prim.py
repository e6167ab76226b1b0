"""Records of the primitives, reductions and optimizer kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record, strided


@record("prim_add")
def add(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    a, b = random(generator, (4, 6), dtype), random(generator, (6,), torch.float32)
    yield Sample("broadcast", {"a": a, "b": b}, (Output(None, a.double() + b.double(), dtype),))
    yield Sample("wide", {"a": a, "b": b, "dtype": 4}, (Output(None, a.double() + b.double(), torch.float32),))
    yield Sample("narrow", {"a": a, "b": b, "dtype": torch.bfloat16}, (Output(None, a.double() + b.double(), torch.bfloat16),))
    c = random(generator, (4, 6), dtype)
    yield Sample("same", {"a": a, "b": c}, (Output(None, a.double() + c.double(), dtype),))
    for shape in ((5, 13, 67), (0, 3)):
        a, b = random(generator, shape, dtype), random(generator, shape, dtype)
        yield Sample(f"{list(shape)}", {"a": a, "b": b}, (Output(None, a.double() + b.double(), dtype),))


@record("prim_scale")
def scale(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x, factor in (
        (random(generator, (4, 6), dtype), 0.3),
        (strided(generator, (3, 5, 281), dtype), -2.5),
        (random(generator, (0, 3), dtype), 3.0),
    ):
        yield Sample(f"{list(x.shape)}", {"x": x, "factor": factor}, (Output(None, x.double() * factor, dtype),))
        yield Sample(f"{list(x.shape)}-fp32", {"x": x, "factor": factor, "dtype": 4}, (Output(None, x.double() * factor, torch.float32),))
    yield Sample("bf16", {"x": x.view(3, 0), "factor": 2.0, "dtype": torch.bfloat16}, (Output(None, x.view(3, 0).double(), torch.bfloat16),))


@record("prim_row_sum")
def row_sum(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x in (
        random(generator, (2, 300, 5), dtype),
        random(generator, (7,), dtype),
        random(generator, (3, 4111), dtype),
        strided(generator, (9, 4, 3), dtype),
        random(generator, (0, 3), dtype),
    ):
        rows = x.double().reshape(-1, x.shape[-1])
        size = rows.abs().sum(0).max().item()
        yield Sample(str(list(x.shape)), {"x": x}, (Output(None, rows.sum(0), dtype, rows.shape[0], size),))
        yield Sample(f"{list(x.shape)}-fp32", {"x": x, "dtype": torch.float32}, (Output(None, rows.sum(0), torch.float32, rows.shape[0], size),))


@record("prim_take_along")
def take_along(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Of several columns, some of them no columns; of one; of none; of no rows."""
    for rows, columns, count in ((5, 7, 3), (64, 33, 1), (4, 1, 3), (130, 33, 32), (3, 4, 0), (0, 3, 2)):
        x = random(generator, (rows, columns), dtype)
        for kind in (torch.int32, torch.int64):
            indices = torch.randint(-2, columns + 2, (rows, count), generator=generator, dtype=kind)
            inside = (indices >= 0) & (indices < columns)
            taken = x.double().gather(1, indices.long().clamp(0, columns - 1)).masked_fill(~inside, 0.0)
            yield Sample(f"{rows} x {columns}, {count} of {kind}", {"x": x, "indices": indices}, (Output(None, taken, dtype, 0),))


@record("prim_put_along")
def put_along(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """To several columns, some of them twice, some no columns; to one; to none; of no rows."""
    for rows, columns, count in ((5, 7, 3), (33, 3, 8), (64, 33, 1), (4, 1, 3), (130, 33, 4), (3, 4, 0), (0, 3, 2)):
        y = random(generator, (rows, count), dtype)
        indices = torch.randint(-1, columns + 1, (rows, count), generator=generator)
        whole, size = torch.zeros(2, rows, columns, dtype=torch.float64)
        for r, k in itertools.product(range(rows), range(count)):
            if 0 <= (c := int(indices[r, k])) < columns:
                whole[r, c] += y[r, k].double()
                size[r, c] += y[r, k].double().abs()
        output = Output(None, whole, dtype, count, size.max().item() if size.numel() else 1.0)
        yield Sample(f"{rows} x {columns}, {count}", {"y": y, "indices": indices, "columns": columns}, (output,))


@record("prim_transpose")
def transpose(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5, 3), (61, 71), (0, 3)):
        x = random(generator, shape, dtype)
        yield Sample(str(list(shape)), {"x": x}, (Output(None, x.double().T, dtype),))


@record("prim_cast")
def cast(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5, 3), (3, 2, 701), (0, 3)):
        x = random(generator, shape, torch.float32)
        yield Sample(str(list(shape)), {"x": x, "dtype": dtype}, (Output(None, x.double(), dtype),))


@record("prim_rope_angles", dtypes=(torch.float32,))
def rope_angles(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for positions, width, base, like in ((300, 6, 10000.0, torch.zeros(1)), (700, 8, 500.0, torch.zeros(0)), (0, 6, 10000.0, torch.zeros(1))):
        frequencies = base ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.cat((frequencies, frequencies))
        arguments = {"positions": positions, "width": width, "base": base, "like": like}
        yield Sample(f"{positions} of {width}", arguments, (Output(None, angles.reshape(positions, 1, 1, width)),))
        factors = [1.0, *(0.1 * i for i in range(1, width // 2))]
        of_factors = angles * torch.tensor(factors * 2, dtype=torch.float64)
        arguments = {**arguments, "factors": factors}
        yield Sample(f"{positions} of {width}, by factors", arguments, (Output(None, of_factors.reshape(positions, 1, 1, width)),))


@record("prim_copy")
def copy(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((4, 6), (12, 366)):
        x = random(generator, shape, dtype)
        yield Sample("as it is", {"x": x}, (Output(None, x.clone()),))


@record("prim_reshape")
def reshape(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for wanted, shape in itertools.product(((3, -1), (2, -1)), ((4, 6), (12, 366))):
        x = random(generator, shape, dtype)
        yield Sample(str([*wanted]), {"x": x, "shape": wanted}, (Output(None, x.reshape(wanted)),))


@record("prim_split")
def split(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, sizes, dim in (((4, 6), [1, 5], 1), ((4, 1501), [1, 1500], 1), ((4, 6), [1, 3, 2], 1), ((7, 703), [6, 1, 0], 0)):
        x = random(generator, shape, dtype)
        parts = [part.contiguous() for part in x.split(sizes, dim)]
        yield Sample(f"{list(shape)} in {sizes}", {"x": x, "sizes": sizes, "dim": dim}, tuple(Output(i, part) for i, part in enumerate(parts)))


@record("prim_permute")
def permute(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, dims in (((3, 4, 2, 5), (0, 2, 1, 3)), ((3, 4, 2), (-1, 0, 1)), ((0, 4, 2), (2, 1, 0)), ((3, 4, 2, 177), (0, 2, 1, 3))):
        x = random(generator, shape, dtype)
        yield Sample(f"{list(shape)}-{dims}", {"x": x, "dims": dims}, (Output(None, x.permute(dims).contiguous()),))


def _divided(x: Tensor, sizes: list[int], padded: list[int], total: int) -> Tensor:
    """``x`` with its groups at the places of groups of other sizes."""
    y, start, place = x.new_zeros(total, x.shape[1]), 0, 0
    for size, room in zip(sizes, padded, strict=True):
        count = min(size, room)
        y[place : place + count] = x[start : start + count]
        start, place = start + size, place + room
    return y


@record("prim_pad_groups")
def pad_groups(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, sizes, padded in (("ragged", [3, 0, 5, 1], [4, 0, 8, 4]), ("whole", [4, 8, 0, 0], [4, 8, 0, 0]), ("empty", [0] * 4, [0] * 4)):
        x, counts = random(generator, (12, 203), dtype), torch.tensor(sizes)
        outputs = (Output(0, _divided(x, sizes, padded, 24)), Output(1, torch.tensor(padded)))
        yield Sample(label, {"x": x, "sizes": counts, "multiple": 4}, outputs)
    x = random(generator, (9, 3), dtype)
    outputs = (Output(0, _divided(x, [3, 6], [8, 8], 24)), Output(1, torch.tensor([8, 8])))
    yield Sample("to 8", {"x": x, "sizes": torch.tensor([3, 6]), "multiple": 8}, outputs)
    x = random(generator, (1, 3), dtype)  # with less rows than groups
    outputs = (Output(0, _divided(x, [1], [4], 4)), Output(1, torch.tensor([4, 0, 0], dtype=torch.int32)))
    yield Sample("one row", {"x": x, "sizes": torch.tensor([1, 0, 0], dtype=torch.int32), "multiple": 4}, outputs)


@record("prim_unpad_groups")
def unpad_groups(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for sizes, padded in (([3, 0, 5, 1], [4, 0, 8, 4]), ([4, 8, 0, 0], [4, 8, 0, 0]), ([0] * 4, [0] * 4)):
        x = random(generator, (24, 403), dtype)
        arguments = {"x": x, "sizes": torch.tensor(sizes), "multiple": 4, "rows": 12}
        yield Sample(str(sizes), arguments, (Output(None, _divided(x, padded, sizes, 12)),))
    x = random(generator, (16, 3), dtype)
    arguments = {"x": x, "sizes": torch.tensor([3, 6]), "multiple": 8, "rows": 9}
    yield Sample("of 8", arguments, (Output(None, _divided(x, [8, 8], [3, 6], 9)),))


@record("prim_concatenate")
def concatenate(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for dim, shape in itertools.product((0, 1), ((2, 3), (37, 41))):
        parts = [random(generator, shape, dtype) for _ in range(3)]
        yield Sample(f"along {dim}", {"tensors": parts, "dim": dim}, (Output(None, torch.cat(parts, dim)),))


@record("prim_full")
def full(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, value, like in (
        ((2, 3), 7, torch.zeros(1)),
        ((67, 71), -2.5, torch.zeros(0)),
        ((1,), math.inf, torch.zeros(1)),
        ((1,), math.nan, torch.zeros(1)),
    ):
        wanted = Output(None, torch.full(shape, float(value)).to(dtype))
        yield Sample(f"{list(shape)} of {value}", {"shape": [*shape], "value": value, "dtype": dtype, "like": like}, (wanted,))
    value = 1e5 + 1.5 if dtype is not torch.float16 else 6e4
    yield Sample("large", {"shape": [2], "value": value, "dtype": dtype, "like": torch.zeros(1)}, (Output(None, torch.full((2,), value).to(dtype)),))


@record("prim_empty")
def empty(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    outputs = (Output("result.shape", torch.Size([2, 3])), Output("result.dtype", dtype))
    for like in (torch.zeros(1), torch.zeros(0)):
        yield Sample(f"[2, 3] like {list(like.shape)}", {"shape": [2, 3], "dtype": dtype, "like": like}, outputs)
