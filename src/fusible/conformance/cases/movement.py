"""Records of paddings, transposes and allocations of plain tensors: exact, in several dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.special import plant
from fusible.conformance.table import Arguments, Disagreement, Output, Sample, record

__all__ = ["numbers"]

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
_CPU = torch.device("cpu")
_BELOW = {torch.float32: 1 << 24, torch.float64: 1 << 24, torch.int64: 1 << 40, torch.float16: 1 << 11}


def numbers(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Integers other than 0 that ``dtype`` holds exactly and, where it is wide, no narrower dtype does. Special values may be planted among them."""
    x = torch.randint(1, _BELOW.get(dtype, 100), shape, generator=generator).to(dtype)
    return plant(x) if dtype.is_floating_point else x


_SEGMENTS = (([3, 0, 4, 1], [8, 2, 4, 2]), ([5], [5]), ([1, 2], [1, 16]))
"""Rows and padded rows of segments, some of them empty or without padding."""


def padded(x: Tensor, former: Tensor, rows: list[int], wide: list[int]) -> Tensor:
    """The padded output, row by row. A segment without rows keeps its former values."""
    out, source, start = former.clone(), 0, 0
    for n, m in zip(rows, wide, strict=True):
        for i in range(m if n else 0):
            out[start + i] = x[source + i] if i < n else 0
        source, start = source + n, start + m
    return out


@record("fused_multi_row_padding", dtypes=_DTYPES)
def row_padding(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, wide in _SEGMENTS:
        x, out = numbers(generator, (sum(rows), 517), dtype), numbers(generator, (sum(wide), 517), dtype)
        arguments = {"input": x, "output": out, "input_row_list": rows, "padded_input_row_list": wide}
        yield Sample(f"{rows} to {wide}", arguments, (Output("output", padded(x, out, rows, wide)), Output(None, None)))


@record("fused_multi_row_unpadding", dtypes=_DTYPES)
def row_unpadding(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, wide in _SEGMENTS:
        x, out = numbers(generator, (sum(wide), 517), dtype), numbers(generator, (sum(rows), 517), dtype)
        kept = [sum(wide[:i]) + j for i, n in enumerate(rows) for j in range(n)]
        arguments = {"input": x, "output": out, "input_row_list": wide, "unpadded_input_row_list": rows}
        yield Sample(f"{wide} to {rows}", arguments, (Output("output", torch.stack([x[i] for i in kept])), Output(None, None)))


@record("swap_first_dims", dtypes=_DTYPES)
def swap_first_dims(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((3, 4), (2, 5, 3), (4, 1, 2, 3), (0, 3), (3, 2, 701)):
        x = numbers(generator, shape, dtype)
        swapped = torch.empty(shape[1], shape[0], *shape[2:], dtype=dtype)
        for i in range(shape[0]):
            for j in range(shape[1]):
                swapped[j, i] = x[i, j]
        yield Sample(str(list(shape)), {"tensor": x, "out": None}, (Output(None, swapped), Output("result.is_contiguous", contiguous)))
        out = numbers(generator, tuple(swapped.shape), dtype)
        yield Sample(f"{list(shape)} given", {"tensor": x, "out": out}, (Output("out", swapped), Output(None, swapped)))


def contiguous(result: Any, arguments: Arguments) -> Any:
    """The result's own method, which agrees, if the result is contiguous; else a text, which does not."""
    return result.is_contiguous if result.is_contiguous() else "a contiguous tensor"


def heads_first(x: Tensor, layout: str, width: int) -> Tensor:
    sizes = dict(zip(layout, x.shape, strict=True))
    y = torch.zeros(*(sizes[name] for name in "bhs"), width, dtype=x.dtype)
    for b in range(sizes["b"]):
        for h in range(sizes["h"]):
            for s in range(sizes["s"]):
                y[b, h, s, : sizes["d"]] = x[(s, b, h) if layout == "sbhd" else (b, s, h)]
    return y


@record("multi_tensor_transpose_to_bhsd", dtypes=_DTYPES)
def transpose_to_bhsd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in ("sbhd", "bshd"):
        x, y = (numbers(generator, shape, dtype) for shape in ((5, 2, 3, 140), (2, 5, 1, 8)))
        wanted = heads_first(x, layout, 140), heads_first(y, layout, 8)
        outputs = (Output(0, wanted[0]), Output(1, None), Output(2, wanted[1]))
        yield Sample(layout, {"inputs": [x, None, y], "original_format": layout}, outputs)
        outs = [torch.full_like(wanted[0], 3), None, torch.full((*wanted[1].shape[:3], 16), 3).to(dtype)]
        outputs = (Output("outputs.0", wanted[0]), Output(1, None), Output("outputs.2", heads_first(y, layout, 16)), Output(0, wanted[0]))
        yield Sample(f"{layout} given, one wider", {"inputs": [x, None, y], "original_format": layout, "outputs": outs}, outputs)


@record("multi_tensor_pad_last_dim", dtypes=_DTYPES)
def pad_last_dim(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    inputs = [numbers(generator, shape, dtype) for shape in ((3, 1401), (2, 2, 8), (4, 1), (2, 3, 5))]
    wanted = [torch.zeros(*x.shape[:-1], -(-x.shape[-1] // 4) * 4, dtype=dtype) for x in inputs]
    for x, y in zip(inputs, wanted, strict=True):
        y[..., : x.shape[-1]] = x

    def itself(result: Any, arguments: Arguments) -> Any:
        return result[1] if result[1] is arguments["inputs"][1] else "the tensor that had such a width"

    yield Sample("to 4", {"inputs": inputs, "alignment": 4}, (*(Output(i, y) for i, y in enumerate(wanted)), Output(1, itself)))
    x = numbers(generator, (2, 3), dtype)
    yield Sample("to 16", {"inputs": [x], "alignment": 16}, (Output(0, torch.cat([x, torch.zeros(2, 13, dtype=dtype)], 1)),))


@record("bulk_allocate", dtypes=(torch.float32,))
def bulk_allocate(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    shapes, dtypes = [[3, 5], [2], [], [4, 0], [7]], [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float32]
    for alignments in (None, [1, 64, 8, 8, 32], [1, 512, 4, 8, 1 << 16]):  # alignments that no buffer has by chance

        def aligned_and_disjoint(result: Any, arguments: Arguments, alignments: list[int] = alignments or [16] * 5) -> Any:
            """The result itself, which agrees, if addresses are aligned and no two tensors overlap."""
            places = [getattr(x, "placed_at", x.data_ptr()) for x in result]
            starts = sorted((place, place + x.numel() * x.element_size()) for x, place in zip(result, places, strict=True) if x.numel())
            fits = all(not (x.numel() and place % n) for x, place, n in zip(result, places, alignments, strict=True))
            return result if fits and all(a[1] <= b[0] for a, b in itertools.pairwise(starts)) else "aligned tensors beside each other"

        named = {"alignments": alignments} if alignments else {}
        outputs = [Output(f"result.{i}.shape", torch.Size(shape)) for i, shape in enumerate(shapes)]
        outputs += [Output(f"result.{i}.dtype", wanted) for i, wanted in enumerate(dtypes)]
        arguments = {"shapes": shapes, "dtypes": dtypes, "device": _CPU, **named}
        yield Sample(f"alignments {alignments}", arguments, (*outputs, Output(None, aligned_and_disjoint), Output("result.__len__", length)))


def length(result: Any, arguments: Arguments) -> Any:
    return result.__len__ if len(result) == len(arguments["shapes"]) else "a tensor for each shape"


@record("copy_data_ptrs_to_device", dtypes=(torch.float32,))
def data_pointers(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """The addresses depend on where the backend has the tensors. Only which of them are equal, and their alignment, is known."""
    x, y = numbers(generator, (4,), dtype), numbers(generator, (3, 2), dtype)

    def fits(result: Any, arguments: Arguments) -> Any:
        """The addresses of the given tensors, or on another device two addresses in turn."""
        found, addresses = result.cpu(), torch.tensor([each.data_ptr() for each in arguments["tensors"]])
        if (found - addresses).abs().min() < 1 << 12:
            return addresses
        turns = torch.arange(len(found)) % 2
        good = found.dtype is torch.int64 and not (found % 4).any() and found.min() > 0 and found[0] != found[1]
        if not good or (found != found[turns]).any():
            raise Disagreement("addresses that are not those of two tensors in turn")
        return found

    for count in (3, 4101):
        several = [y if i % 2 else x for i in range(count)]
        outputs = (Output(None, fits), Output("result.shape", torch.Size([count])))
        yield Sample(f"{count}, two in turn", {"tensors": several, "device": _CPU}, outputs)
    yield Sample("none", {"tensors": [], "device": _CPU}, (Output(None, torch.zeros(0, dtype=torch.int64)),))
