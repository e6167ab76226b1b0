"""Calls that quantize several tensors, or by given amaxes: what they check, and what is the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.formats import NVFP4, scheme_of, usages
from fusible.tex.protocol import QuantizerLike, TensorLike

__all__ = ["check_sections", "known_amaxes", "quantize_each"]


def quantize_each(quantize: Callable[[Any, Any], Any], tensors: Sequence[Any], quantizers: Sequence[Any], function: str) -> list[Any]:
    """``quantize(x, quantizer)`` of each pair; a tensor whose quantizer is None stays as it is."""
    if len(tensors) != len(quantizers):
        of, got = f"quantizer_list of {function}", f"{len(quantizers)} for {len(tensors)}"
        raise ArgumentError(expected("a quantizer for each tensor", of=of, got=got, do="pass None where nothing is to be quantized"))
    return [x if quantizer is None else quantize(x, quantizer) for x, quantizer in zip(tensors, quantizers, strict=True)]


def check_sections(sections: Sequence[int], x: TensorLike, quantizers: Sequence[Any]) -> None:
    """Raise unless ``split_quantize`` can divide ``x`` into ``sections``, with a quantizer for each."""
    if len(sections) != len(quantizers):
        quantize_each(lambda x, _: x, sections, quantizers, "split_quantize")
    rows = x.shape[0] if len(x.shape) else 0
    if sum(sections) > rows or any(section < 0 for section in sections):
        do = "pass sections that add up to no more"
        raise ShapeError(expected(f"sections of {rows} rows", of="split_sections of split_quantize", got=list(sections), do=do))


def known_amaxes(
    x: TensorLike, quantizer: QuantizerLike, rowwise: TensorLike | None, columnwise: TensorLike | None, fp32: Any = torch.float32
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The amaxes of the copies that an NVFP4 ``quantizer`` makes of ``x``, by copy, and the shape that each is held in.

    ``fp32`` is the backend's value of that type. Raises ``DTypeError`` for another quantizer, ``ShapeError`` for an amax that does not fit.
    """
    if scheme_of(quantizer).format is not NVFP4:
        got = type(quantizer).__qualname__
        raise DTypeError(expected("an NVFP4 quantizer", of="quantizer of nvfp4_quantize_with_amax", got=got, do="call quantize"))
    specs, found = NVFP4.buffer_specs(quantizer, x.shape, *usages(quantizer)), {}
    for way, amax in (("rowwise", rowwise), ("columnwise", columnwise)):
        if f"amax_{way}" not in specs:
            continue
        shape = specs[f"amax_{way}"][0]
        if amax is None or math.prod(amax.shape) != shape[0] or amax.dtype is not fp32:
            of, got = f"{way}_amax of nvfp4_quantize_with_amax", "None" if amax is None else f"{amax.dtype} {list(amax.shape)}"
            raise ShapeError(expected(f"fp32 {list(shape)}", of=of, got=got, do="pass the amax of what that copy is made of"))
        found[way] = amax, shape
    return found
