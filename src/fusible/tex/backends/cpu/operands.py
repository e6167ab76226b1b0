"""Operands as the kernels read them: tensors of wide floats, and indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.tex.backends.cpu.layouts import PLAIN_CLASSES
from fusible.tex.backends.cpu.quantize import dequantize
from fusible.tex.formats import is_quantized, nominal

__all__ = ["int32", "member_kinds", "plain", "unquantized"]


def plain(x: Any) -> Tensor:
    """``unquantized(x)``, contiguous."""
    return x.contiguous() if type(x) in PLAIN_CLASSES else unquantized(x).contiguous()


def unquantized(x: Any) -> Tensor:
    """``x`` itself, or its value in its nominal dtype where it is quantized."""
    return dequantize(x, nominal(x)) if is_quantized(x) else x


def member_kinds(kind: Any) -> Iterator[tuple[Any, ...]]:
    """The kinds of the tensors in a list of them, however nested, or in a grouped tensor; a single tensor's own."""
    if kind and kind[0] == "grouped":
        _, scheme, device, dtype = kind
        yield (device, dtype) if scheme == "none" else (scheme, device, dtype)
    elif kind and isinstance(kind[0], str):
        yield kind
    else:
        for part in kind:
            if isinstance(part, tuple):
                yield from member_kinds(part)


_INT32 = torch.iinfo(torch.int32)
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


def int32(x: Tensor, name: str) -> Tensor:
    """Indices as contiguous int32. Raises ``ArgumentError`` for one that int32 does not hold, which would wrap to another."""
    if x.dtype is torch.int32:
        return x.contiguous()
    if x.dtype not in _INTEGERS:
        raise DTypeError(expected("int32", of=name, got=x.dtype, do="pass whole numbers"))
    if x.dtype is torch.int64 and x.numel():
        least, largest = (int(bound) for bound in x.aminmax())
        if least < _INT32.min or largest > _INT32.max:
            got = least if least < _INT32.min else largest
            raise ArgumentError(expected("numbers that int32 holds", of=name, got=got, do="check the indices"))
    return x.to(torch.int32).contiguous()
