"""The buffers of a grouped tensor: how empty ones are made, and checks of the tensors that are written to its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.quantized.tensor_operations import FLOATS
from fusible.tex.calls.grouped import GroupLayout, group_arguments, member_fields

__all__ = ["check_sources", "empty_buffers", "empty_member"]


def empty_buffers(quantizer: Any, layout: GroupLayout, dtype: torch.dtype | None, device: torch.device | str) -> dict[str, Any]:
    """New buffers for members of a layout, by argument: as large as all that they consist of by themselves."""
    if quantizer is None:
        return {"data": torch.empty(layout.total, dtype=dtype, device=device)}
    buffers = {}
    found, fields = [empty_member(quantizer, shape, torch.float32, "meta") for shape in layout.shapes], member_fields(quantizer)
    for field, attribute in fields.items():
        of_copy = fields["columnwise_data" if field.startswith("columnwise") else "rowwise_data"]
        parts = [getattr(member, attribute) for member in found if getattr(member, of_copy) is not None]
        if parts:
            count = sum(part.numel() for part in parts)
            buffers[field] = torch.empty(count, dtype=parts[0].dtype, device=device)
    return {"with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm), **group_arguments(buffers, quantizer)}


def empty_member(quantizer: Any, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str) -> Any:
    """A new quantized tensor of ``shape``, on ``device``, with what ``quantizer`` asks for."""
    return tex.create_empty_quantized_tensor(quantizer, list(shape), dtype, device, False)


def check_sources(tensors: Sequence[Any], found: Sequence[Any], own: torch.dtype | None, of: str) -> None:
    """Raise, before the first member of ``found`` is written, ``ArgumentError`` unless there is a tensor for each, ``ShapeError`` or ``DTypeError``
    for one that its member cannot take. ``own``: the members' dtype, where they are not quantized."""
    if len(tensors) != len(found):
        raise ArgumentError(expected(f"{len(found)} tensors", of=f"tensors of {of}", got=len(tensors), do="pass one per member"))
    for place, (tensor, member) in enumerate(zip(tensors, found, strict=True)):
        if tuple(tensor.shape) != tuple(member.shape):
            wanted, got = str(list(member.shape)), list(tensor.shape)
            raise ShapeError(expected(wanted, of=f"tensors[{place}] of {of}", got=got, do="pass a tensor of the member's shape"))
        if isinstance(tensor, torch.Tensor) and (tensor.dtype not in (*FLOATS, own) or tensor.is_meta):
            wanted, got = "fp32, fp16 or bf16 with data", f"{tensor.dtype} on {tensor.device}"
            raise DTypeError(expected(wanted, of=f"tensors[{place}] of {of}", got=got, do="cast it"))
