"""Grouped tensors of block-scaled formats, by the oracle: as results of quantizing their members, and as arguments."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.cases.block_quantize import transforming
from fusible.conformance.cases.block_tensors import BLOCKED, WAYS, Copy, copies, stored
from fusible.conformance.cases.gemm import TRANSPOSED, product, shapes_of
from fusible.conformance.eight_bits import HALF_STEP, kept_within
from fusible.conformance.table import Arguments, Output, Sample
from fusible.quantized import GroupedTensorStorage, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.calls.grouped import member_fields
from fusible.tex.formats import MXFP8, NVFP4_OPTIONS, block_format_of

__all__ = [
    "ROWS",
    "bgrad_in_blocks",
    "dequantize_in_blocks",
    "gated_in_blocks",
    "gather_blocks",
    "products_in_blocks",
    "quantize_in_blocks",
    "requantize_in_blocks",
]

_E4M3 = DType.kFloat8E4M3
_COLUMNS = 64
ROWS = (32, 96)
"""Rows of the members of arguments."""

_MADE = (32, 0, 96)
_LEFT = 32
"""Rows of the members of results, and rows behind them that belong to no member."""


@functools.cache
def _x(dtype: torch.dtype) -> Tensor:
    return (torch.randn(sum(_MADE) + _LEFT, _COLUMNS, generator=torch.Generator().manual_seed(17)) * 3).to(dtype)


def _parts(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return list(x[: sum(rows)].split([*rows]))


@functools.cache
def _made(name: str, dtype: torch.dtype, rows: tuple[int, ...]) -> dict[str, list[Copy]]:
    """The copies of each member, by way."""
    quantizer, found = BLOCKED[name](), {way: [] for way in WAYS}
    for part in _parts(_x(dtype), rows):
        for way, copy in copies(part, quantizer):
            found[way].append(copy)
    return found


def _filled(at: str, size: int, pieces: list[tuple[int, tuple[int, ...], Tensor]]) -> Output:
    """The buffer at ``at``, of ``size`` elements. Each piece fills the upper left of a matrix ``shape`` that begins at ``start``; the rest may hold
    anything."""

    def wanted(result: Any, arguments: Arguments) -> Tensor:
        found = Output(at, None).find(result, arguments)
        if not isinstance(found, Tensor) or found.numel() != size:
            return torch.zeros(0)
        whole = found.detach().cpu().clone()
        for start, shape, piece in pieces:
            whole.view(-1)[start : start + math.prod(shape)].view(shape)[tuple(slice(n) for n in piece.shape)] = piece.to(whole.dtype)
        return whole

    return Output(at, wanted)


def made_of(at: str, name: str, dtype: torch.dtype, ways: Sequence[str] = WAYS, rows: tuple[int, ...] = _MADE, total: int = 0) -> list[Output]:
    """The outputs of quantizing the members to the grouped tensor at ``at``, whose buffers have room for ``total`` rows."""
    quantizer, outputs = BLOCKED[name](), []
    form = block_format_of(quantizer)
    for way in WAYS:
        prefix = "" if way == "rowwise" else "columnwise_"
        if way not in ways:
            outputs += [Output(f"{at}.{way}_data", None), Output(f"{at}.{prefix}scale_inv", None)]
            continue
        data, scales, at_data, at_scale = [], [], 0, 0
        made = _made(name, dtype, rows)[way]
        for count, copy in zip(rows, made, strict=True):
            data.append((at_data, tuple(copy.data.shape), copy.data))
            at_data += copy.data.numel()
            whole = form.scale_shape((count, _COLUMNS), way == "columnwise", form.is_tiled(quantizer))
            scales.append((at_scale, whole, copy.scales))
            at_scale += math.prod(whole)
        outputs.append(_filled(f"{at}.{way}_data", total * _COLUMNS // form.packed, data))
        outputs.append(_filled(f"{at}.{prefix}scale_inv", at_scale, scales))
        if isinstance(quantizer, NVFP4Quantizer):
            outputs.append(Output(f"{at}.{prefix}amax", torch.cat([copy.amax for copy in made if copy.amax is not None])))
    return outputs


def _described(rows: Sequence[int]) -> dict[str, Any]:
    return {"num_tensors": len(rows), "first_dims": torch.tensor([*rows])}


def quantize_in_blocks(dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``group_quantize``: every format, a member without rows (not in NVFP4), and rows that belong to no member."""
    for name in ("mxfp8", "block 1x128", "block 128x128", "nvfp4", "nvfp4 by rows"):
        rows = (32, 96) if isinstance(BLOCKED[name](), NVFP4Quantizer) else _MADE
        x = _x(dtype)
        outputs = made_of("result", name, dtype, rows=rows, total=len(x))
        yield Sample(f"in {name}", {"tensor": x.clone(), "quantizer": BLOCKED[name](), **_described(rows)}, tuple(outputs))
    outputs = made_of("result", "mxfp8", dtype, ("columnwise",), total=len(x))
    arguments = {"tensor": x.clone(), "quantizer": BLOCKED["mxfp8"](rowwise=False), **_described(_MADE)}
    yield Sample("in columns of mxfp8", arguments, tuple(outputs))


def bgrad_in_blocks(dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``bgrad_group_quantize``."""
    for name in ("mxfp8", "block 1x128"):
        x = _x(dtype)
        wide = [part.double() for part in _parts(x, _MADE)]
        size = max(part.abs().sum(0).max().item() for part in wide if len(part))
        sums = Output(1, torch.stack([part.sum(0) for part in wide]), dtype, len(x), size)
        outputs = (*made_of("result.0", name, dtype, total=len(x)), sums)
        yield Sample(f"in {name}", {"tensor": x.clone(), "quantizer": BLOCKED[name](), **_described(_MADE)}, outputs)


def gather_blocks(members: Sequence[Any], rows: Sequence[int], dtype: torch.dtype) -> GroupedTensorStorage:
    """Tensors of one block-scaled format as the members of a grouped one."""
    quantizer, fields = members[0]._quantizer, {}
    for field, attribute in member_fields(quantizer).items():
        parts = [getattr(member, attribute) for member in members]
        if parts[0] is not None:
            fields["data" if field == "rowwise_data" else field] = torch.cat([part.reshape(-1) for part in parts])
    options = {name: getattr(quantizer, name) for name in NVFP4_OPTIONS if hasattr(quantizer, name)}
    shape = sum(rows), members[0].shape[-1]
    return GroupedTensorStorage(shape, dtype, quantizer=quantizer, **fields, **_described(rows), **options)


def _taken(name: str, dtype: torch.dtype, ways: tuple[str, ...]) -> tuple[GroupedTensorStorage, dict[str, Tensor]]:
    """A grouped tensor with the copies ``ways``, and the values of each copy, float64 ``[rows, columns]``."""
    found = [stored(name, (n, _COLUMNS), dtype, 3 + i, ways) for i, n in enumerate(ROWS)]
    return gather_blocks([x for x, _ in found], ROWS, dtype), {way: torch.cat([values[way] for _, values in found]) for way in WAYS}


def dequantize_in_blocks(dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``group_dequantize``, which reads the row-wise copy, or else the column-wise one."""
    for name, ways in itertools.product(("mxfp8", "block 1x128", "block 128x128", "nvfp4", "nvfp4 by rows"), (WAYS, ("columnwise",))):
        x, values = _taken(name, torch.bfloat16, ways)
        outputs = (Output("result.rowwise_data", values[ways[0]].reshape(-1), dtype), Output("result.quantizer", None))
        yield Sample(f"{name} {ways}", {"input": x, "otype": dtype}, outputs)


@functools.cache
def _turned(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[tuple[int, ...]]]:
    """The column-wise copy of the row-wise values of ``_taken``, rounded to ``dtype``: data, scales without padding, and the shapes of the padded
    scales, by member."""
    _, values = _taken(name, torch.bfloat16, ("rowwise",))
    quantizer, data, scales, shapes = BLOCKED[name](rowwise=False), [], [], []
    for part in values["rowwise"].to(dtype).split([*ROWS]):
        ((_, copy),) = copies(part, quantizer)
        data.append(copy.data)
        scales.append(copy.scales)
        shapes.append(block_format_of(quantizer).scale_shape(tuple(part.shape), True, False))
    return data, scales, shapes


def requantize_in_blocks(dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``group_requantize_inplace``: the new column-wise copy is made from the values of the row-wise one, in ``otype``."""
    for name, wanted in itertools.product(("mxfp8", "block 1x128"), (False, True)):
        x, values = _taken(name, torch.bfloat16, ("rowwise",))
        outputs = (
            Output("grouped_x.rowwise_data", x.rowwise_data.clone()), Output("grouped_x.scale_inv", x.scale_inv.clone()),
            *_beside("grouped_x", *_turned(name, dtype)), Output(None, values["rowwise"] if wanted else None, dtype),
        )  # fmt: skip
        arguments = {"grouped_x": x, "quantizer": BLOCKED[name](), "otype": dtype, "return_dequantized": wanted, **_described(ROWS)}
        yield Sample(f"{name} {wanted}", arguments, outputs, ("grouped_x",))


def _beside(at: str, data: list[Tensor], scales: list[Tensor], shapes: list[tuple[int, ...]]) -> tuple[Output, Output]:
    """A column-wise copy whose members are contiguous, one after the other."""
    starts, places = ([*accumulate(sizes, initial=0)] for sizes in ((x.numel() for x in data), map(math.prod, shapes)))
    return (
        _filled(f"{at}.columnwise_data", starts[-1], [(start, tuple(x.shape), x) for start, x in zip(starts, data, strict=False)]),
        _filled(f"{at}.columnwise_scale_inv", places[-1], [*zip(places, shapes, scales, strict=False)]),
    )


def gated_in_blocks(generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float]) -> Sample:
    """A sample of a gated activation to MXFP8, with a member without rows and rows that belong to no member."""
    x = (torch.randn(sum(_MADE) + _LEFT, 2 * _COLUMNS, generator=generator) * 2).to(dtype)
    prob = torch.rand(len(x), generator=generator)
    values = f(x.double(), **options) * prob.double()[:, None]
    parts, scales, at = _parts(values, _MADE), [], 0
    for part in parts:
        # The scale of a block is that of its largest value, rounded to the dtype first.
        _, used = oracle.mxfp8(part.to(dtype).float().numpy(), _E4M3, (32, 1))
        whole = MXFP8.scale_shape(tuple(part.shape), True, False)
        scales.append((at, whole, torch.from_numpy(used)))
        at += math.prod(whole)

    def near(result: Any, arguments: Arguments) -> Tensor:
        """The bytes of the result where they are within half a step of the value, first rounded to the dtype; elsewhere the nearest ones."""
        good, start = result.columnwise_data.cpu().clone(), 0
        for part, (_, _, used) in zip(parts, scales, strict=True):
            bits, inverse = good[start : start + part.numel()], 2.0 ** (used.double() - 127).repeat_interleave(32, 0)
            bound = (HALF_STEP[_E4M3] + torch.finfo(dtype).eps) * part.abs() + 2.0**-10 * inverse + 1e-5
            bits.copy_(kept_within(bits, part, inverse, _E4M3, bound).view(-1))
            start += part.numel()
        return good

    outputs = (
        Output("result.columnwise_data.shape", torch.Size([len(x) * _COLUMNS])), Output("result.columnwise_data", near),
        _filled("result.columnwise_scale_inv", at, scales), Output("result.rowwise_data", None),
    )  # fmt: skip
    arguments = {"input_2h": x, "prob": prob, "quantizer": MXFP8Quantizer(_E4M3), **_described(_MADE), **options}
    return Sample("in mxfp8", arguments, outputs)


_N, _K = 32, 64


def _transformed(x: Any, values: dict[str, Tensor]) -> None:
    """Take the column-wise codes of an NVFP4 tensor for those of its Hadamard transform, and change ``values`` to the matrix that they represent."""
    x._quantizer = transforming()
    lines = values["columnwise"].t().reshape(-1, 16) @ x._quantizer.rht_matrix.double().t()
    values["columnwise"] = lines.view(values["columnwise"].t().shape).t()


def products_in_blocks(layout: str, forms: tuple[str, str], dtype: torch.dtype, transformed: bool = False) -> tuple[Any, ...]:
    """``(A, B, products, size, length, B's rows)``, of a product for each member.

    A and B hold both copies. ``products``, float64, are those of the copies whose blocks lie along the reduced dimension; ``size`` is the largest sum
    of absolute products and ``length`` that of the reduction. B's rows are its row-wise values. ``transformed``: column-wise copies are of NVFP4's
    random Hadamard transform, which cancels in the product.
    """
    transa, transb = TRANSPOSED[layout]
    ways = "rowwise" if transa else "columnwise", "columnwise" if transb else "rowwise"
    A, B, products, sizes, rows = [], [], [], [], []
    for i, n in enumerate(ROWS):
        shapes = shapes_of(layout, n, _N, _K)
        (a, wide_a), (b, wide_b) = ((x, dict(wide)) for x, wide in (stored(forms[j], shapes[j], dtype, 2 * i + j) for j in (0, 1)))
        for x, wide in ((a, wide_a), (b, wide_b)) if transformed else ():
            _transformed(x, wide)
        ab, size, length = product(wide_a[ways[0]], transa, wide_b[ways[1]], transb)
        A, B, products, sizes, rows = [*A, a], [*B, b], [*products, ab], [*sizes, (size, length)], [*rows, wide_b["rowwise"]]
    return A, B, products, max(size for size, _ in sizes), max(length for _, length in sizes), rows
