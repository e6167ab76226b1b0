"""Checks of a module's input and arguments. Errors name the module."""

from __future__ import annotations

from typing import Any

from fusible.errors import DTypeError, ShapeError, expected
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import size_of
from fusible.lazy.dtypes import FLOATS, check_dtype, dtype
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import pointing

__all__ = ["check_channels", "check_sizes", "check_spatial", "check_trailing", "float_dtype"]


def float_dtype(name: str, of: Any) -> dtype:
    """``of`` itself where it is a float dtype, in which modules compute. Raises ``DTypeError`` otherwise."""
    if check_dtype(of) not in FLOATS:
        raise DTypeError(expected("float32, float16, bfloat16 or float64", of=f"dtype of {name}", got=of, do="pass one of these"))
    return of


def check_sizes(name: str, **sizes: Any) -> None:
    """Raise ``DTypeError`` or ``ShapeError`` unless the arguments of a module are sizes."""
    for argument, size in sizes.items():
        wanted = expected("an int of at least 0", of=f"{argument} of {name}", got=repr(size), do="pass the number of elements")
        if type(size_of(size)) is not int:
            raise pointing(DTypeError(wanted), argument)
        if size < 0:
            raise pointing(ShapeError(wanted), argument)


def check_trailing(name: str, x: Any, sizes: tuple[int, ...], of: dtype) -> None:
    """Raise ``ShapeError`` or ``DTypeError`` unless ``x`` is a tensor ``[..., *sizes]`` of dtype ``of``."""
    _check_dtype(name, x, of)
    trailing = x.trace_tensor.shape[max(x.ndim - len(sizes), 0) :]
    if x.ndim < len(sizes) or not all(holds(n, "==", size, f"the input of {name}") for n, size in zip(trailing, sizes, strict=True)):
        wanted = f"shape [..., {', '.join(map(str, sizes))}]"
        raise ShapeError(expected(wanted, of=f"the input of {name}", got=x.trace_tensor, do="reshape it, or make the module of its sizes"))


def check_channels(name: str, x: Any, channels: int, of: dtype, rank: int | None = None) -> None:
    """Raise ``ShapeError`` or ``DTypeError`` unless ``x`` is a tensor ``[N, channels, ...]`` of dtype ``of``, of ``rank`` dimensions where given."""
    _check_dtype(name, x, of)
    if x.ndim < 2 or (rank is not None and x.ndim != rank) or not holds(x.trace_tensor.shape[1], "==", channels, f"the input of {name}"):
        rest = "..." if rank is None else ", ".join(f"D{d}" for d in range(rank - 2))
        wanted = f"shape [N, {channels}, {rest}]"
        raise ShapeError(expected(wanted, of=f"the input of {name}", got=x.trace_tensor, do="reshape it, or make the module of its sizes"))


def check_spatial(name: str, x: Tensor) -> None:
    """Raise ``ShapeError`` unless ``x`` has a dimension after its channels."""
    if x.ndim < 3:
        raise ShapeError(expected("at least 3 dimensions", of=f"the input of {name}", got=x.trace_tensor, do="add a spatial dimension"))


def _check_dtype(name: str, x: Any, of: dtype) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(expected("a lazy tensor", of=f"the input of {name}", got=type(x).__name__, do="wrap the data in Tensor(data)"))
    if x.dtype is not of:
        raise DTypeError(expected(f"dtype {of}", of=f"the input of {name}", got=x.trace_tensor, do="cast it, or make the module of its dtype"))
