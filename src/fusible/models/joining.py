"""Matrices of a checkpoint by which a model multiplies at once, as one: plain ones, and quantized ones where that changes no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusible.models.checkpoints.layouts import with_a_scale_for_each_row
from fusible.quantized import QuantizedTensor
from fusible.tex.formats import FLOAT8, BlockFormat, format_of

__all__ = ["joined_rows"]

_OF_ROWS = ("rowwise_data", "rowwise_scale_inv")


def joined_rows(parts: Sequence[torch.Tensor], *, by_rows: bool = False) -> torch.Tensor | None:
    """``parts``, ``[rows_i, columns]`` each, one on top of the other.

    Quantized ones keep their bytes and scales. None where no tensor of their format has the values of all of them: they are of different formats, or
    each has one scale for all its values, or its blocks would reach into the next. ``by_rows``: FP8 of one scale each becomes one of a scale for each
    row.
    """
    if len(parts) == 1:
        return parts[0]
    if by_rows and all(format_of(part) is FLOAT8 for part in parts):
        parts = [with_a_scale_for_each_row(part) for part in parts]
    if not any(isinstance(part, QuantizedTensor) for part in parts):
        return torch.cat(list(parts))
    form = format_of(parts[0])
    if not isinstance(form, BlockFormat) or any(type(part) is not type(parts[0]) for part in parts):
        return None
    fields = [_fields(part) for part in parts]
    if not all(_alike(fields[0], other) for other in fields[1:]):
        return None
    tiled, shape = form.has_tile_scales(parts[0]), (sum(part.shape[0] for part in parts), parts[0].shape[1])
    if tiled and any(part.shape[0] % form.length for part in parts[:-1]):
        return None
    used = [_used(form, part, each["rowwise_scale_inv"], tiled) for part, each in zip(parts, fields, strict=True)]
    scales = torch.cat(used, int(form.rows_second(False, tiled)))
    lines, blocks = form.scale_shape(shape, False, tiled)
    joined: dict[str, Any] = {
        **fields[0],
        "rowwise_data": torch.cat([each["rowwise_data"] for each in fields]),
        "rowwise_scale_inv": F.pad(scales, (0, blocks - scales.shape[1], 0, lines - scales.shape[0])),
    }
    return type(parts[0])(shape, parts[0].dtype, **joined)


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a quantized tensor, as its constructor takes them beside shape and dtype."""
    return {name: value for name, value in part.get_metadata().items() if name != "fake_dtype"}


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two tensors differ in nothing but the values of their rows; what makes them anew is no matter here."""
    for name in one.keys() - {*_OF_ROWS, "quantizer"}:
        ours, theirs = one[name], other[name]
        same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) else ours is theirs or ours == theirs
        if not same:
            return False
    return all(other[name] is not None for name in _OF_ROWS)


def _used(form: BlockFormat, part: torch.Tensor, scales: torch.Tensor, tiled: bool) -> torch.Tensor:
    lines, blocks = form.used_scales(tuple(part.shape), False, tiled)
    return scales[:lines, :blocks]
