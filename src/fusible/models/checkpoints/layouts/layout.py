"""How one quantized weight lies among the stored tensors of a checkpoint: which tensors it takes, and how they become a quantized tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from fusible.errors import CheckpointError, expected
from fusible.models.checkpoints.header import Entry
from fusible.tex import DType
from fusible.tex.formats import BlockFormat, Format, format_of

__all__ = ["ELEMENTS", "Parts", "SCALES", "Weight", "WeightLayout", "as_fp32", "is_byte_scale", "narrowed", "padded", "rows_of", "used", "whole_rows"]

Parts = Mapping[str, Entry]
"""The stored tensors of a weight, by what their names have behind the weight's."""

ELEMENTS = {torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}
"""The 8-bit types of elements, and what Fusible calls them."""

SCALES = (torch.float32, torch.bfloat16, torch.float16)
"""The types of scales that are numbers; others are exponents."""

_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True)
class Weight:
    """A quantized weight that was found: its logical name and shape, its layout, and the names of its stored tensors, by what stands behind its own.
    ``note``: what the metadata say of it."""

    name: str
    shape: tuple[int, ...]
    layout: WeightLayout
    stored: Mapping[str, str]
    note: str = ""


class WeightLayout(ABC):
    """A way to store a quantized weight. ``suffixes``: what the names of its tensors have behind the weight's name; that of the elements first."""

    suffixes: tuple[str, ...]
    format: ClassVar[Format | None] = None
    """The number format of its tensors."""

    def find(self, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> Iterator[Weight]:
        """The weights of this layout among stored tensors."""
        last = self.suffixes[-1]  # of scales, whose names are fewer than those of all elements
        for stored in entries:
            if not stored.endswith(last):
                continue
            name = stored.removesuffix(last)
            names = {suffix: f"{name}{suffix}" for suffix in self.suffixes}
            if all(each in entries for each in names.values()):
                shape = self.shape({suffix: entries[each] for suffix, each in names.items()})
                if shape is not None:
                    yield Weight(name, shape, self, names)

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...] | None:
        """The weight's shape; None where the types or the shapes of its tensors are not those of this layout."""

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, note: str) -> Any:
        """The quantized tensor, of the nominal ``dtype``, over the very bytes of its stored elements."""

    def holds(self, tensor: Any) -> bool:
        """Whether ``encode`` takes ``tensor``."""
        return format_of(tensor) is self.format and tensor.get_usages()["rowwise"]

    @abstractmethod
    def encode(self, tensor: Any) -> dict[str, torch.Tensor]:
        """The stored tensors of a quantized tensor, by their suffixes."""

    def note(self, tensor: Any) -> str | None:
        """What the metadata of a file say of a tensor in it."""
        return None


def is_byte_scale(dtype: torch.dtype) -> bool:
    """Whether scales of ``dtype`` are exponents: E8M0, or its bytes."""
    return dtype in _EXPONENTS


def as_fp32(scale: torch.Tensor) -> torch.Tensor:
    """Scales as fp32, exactly: those of bf16 and fp16, and ``2^(byte - 127)`` of E8M0 and of its bytes, NaN for 0xFF. What is fp32 is not copied."""
    return (scale.view(torch.float8_e8m0fnu) if is_byte_scale(scale.dtype) else scale).to(torch.float32)


def narrowed(scale: torch.Tensor, dtype: torch.dtype, of: str) -> torch.Tensor:
    """fp32 scales as ``dtype`` has them. Raises ``CheckpointError`` where it has not exactly these."""
    made = scale.to(torch.float8_e8m0fnu).view(dtype) if is_byte_scale(dtype) else scale.to(dtype)
    if not torch.equal(as_fp32(made).view(torch.int32), scale.view(torch.int32)):
        got, do = "others", "store them as fp32, or quantize with force_pow_2_scales"
        raise CheckpointError(expected(f"scales that {dtype} has exactly", of=of, got=got, do=do))
    return made


def rows_of(shape: tuple[int, ...]) -> int:
    """The product of all dimensions but the last."""
    return torch.Size(shape[:-1]).numel()


def padded(scales: torch.Tensor, form: BlockFormat, shape: tuple[int, ...], tiled: bool = False) -> torch.Tensor:
    """The matrix of a row-wise copy's scales with zeros behind, as ``form`` holds it for a tensor of ``shape``; itself where it needs none."""
    lines, blocks = form.scale_shape(shape, False, tiled)
    if tuple(scales.shape) == (lines, blocks):
        return scales.contiguous()
    return functional.pad(scales, (0, blocks - scales.shape[1], 0, lines - scales.shape[0]))


def used(tensor: Any) -> torch.Tensor:
    """The row-wise scales of a tensor in blocks, without what pads them."""
    form = format_of(tensor)
    assert isinstance(form, BlockFormat)
    lines, blocks = form.used_scales(tuple(tensor.shape), False, form.has_tile_scales(tensor))
    return tensor._rowwise_scale_inv[:lines, :blocks].contiguous()


def whole_rows(shape: tuple[int, ...], form: BlockFormat) -> tuple[int, ...]:
    """``shape``. Raises ``CheckpointError`` where the rows of a weight of it are no whole blocks, without which ``form`` has no tensors."""
    if rows_of(shape) % form.length:
        do = "pad the weight with rows of zeros, or quantize it otherwise"
        raise CheckpointError(expected(f"rows in multiples of {form.length}", of=f"a weight of {form}", got=list(shape), do=do))
    return shape
