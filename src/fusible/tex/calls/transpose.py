"""The checks of transposes of packed codes and of their scales, which backends share. Whatever has ``shape`` and ``dtype`` is a tensor here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusible.errors import ShapeError, expected
from fusible.tex.calls.layout import check_equal_lengths
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import TensorLike, check_bytes, check_shape, outer

__all__ = ["TILE", "check_codes", "check_scales", "checked_weights"]

TILE = 16
"""The side of the square that has one scale."""


def check_codes(data: TensorLike, out: TensorLike | None, function: str) -> None:
    """Raise unless ``data [*leading, K / 2]`` are packed codes of an even number of rows, and ``out``, where given, holds their transpose."""
    check_bytes(data, f"input of {function}")
    rows, columns = outer(data.shape), 2 * data.shape[-1]
    if rows % 2:
        raise ShapeError(expected("an even number of rows", of=f"input of {function}", got=rows, do="pad them, as two elements share a byte"))
    if out is not None:
        check_bytes(out, f"out of {function}")
        check_shape(out, (columns, rows // 2), f"out of {function}")


def check_scales(scale: TensorLike, out: TensorLike, down: int, across: int, function: str) -> None:
    """Raise unless both are bytes, of at least ``down`` by ``across`` tiles."""
    names = ("input", "output") if function == "nvfp4_2d_scale_transpose" else ("rowwise_scale_inv_list", "columnwise_scale_inv_list")
    for x, (rows, columns), name in zip((scale, out), ((down, across), (across, down)), names, strict=True):
        check_bytes(x, f"{name} of {function}")
        least = (max(TILE * rows - TILE + 1, 0), columns)
        if len(x.shape) != 2 or x.shape[0] < least[0] or x.shape[1] < least[1]:
            got = list(x.shape)
            raise ShapeError(expected(f"at least {list(least)}", of=f"{name}, scales, of {function}", got=got, do="pad them as NVFP4 does"))


def checked_weights(call: CallArguments) -> Iterator[tuple[Any, Any, Any, Any, int, int]]:
    """Of each weight of a call of ``nvfp4_2d_multi_tensor_transpose``: its data, where that goes, its scales, where these go, and its tiles down and
    across. Raises before the first is given."""
    function = "nvfp4_2d_multi_tensor_transpose"
    buffers = call.rowwise_data_list, call.columnwise_data_list, call.rowwise_scale_inv_list, call.columnwise_scale_inv_list
    check_equal_lengths(function, *buffers, call.M_list, call.K_list)
    weights = [(*each, -(-rows // TILE), -(-columns // TILE)) for *each, rows, columns in zip(*buffers, call.M_list, call.K_list, strict=True)]
    for (data, columnwise, scale, columnwise_scale, down, across), rows, columns in zip(weights, call.M_list, call.K_list, strict=True):
        if (outer(data.shape), 2 * data.shape[-1]) != (rows, columns):
            got = list(data.shape)
            raise ShapeError(expected(f"[{rows}, {columns} / 2]", of=f"rowwise_data_list of {function}", got=got, do="pass the weight's own M and K"))
        check_codes(data, columnwise, function)
        check_scales(scale, columnwise_scale, down, across, function)
    return iter(weights)
