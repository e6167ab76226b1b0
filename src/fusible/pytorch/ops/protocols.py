"""Protocols of operations for the files from which ``op`` is built: they take an operation as an argument, and cannot import its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

__all__ = ["BasicOperationLike", "FusibleOperationLike"]


class FusibleOperationLike(Protocol):
    """Of ``op.FusibleOperation``."""

    fixed_options: ClassVar[frozenset[str]]

    @property
    def fuses(self) -> tuple[bool, bool]: ...

    @property
    def is_fused_op(self) -> bool: ...

    def basic_operations(self) -> Iterator[Any]: ...

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any: ...

    def _fuser(self) -> Any: ...


class BasicOperationLike(FusibleOperationLike, Protocol):
    """Of ``op.BasicOperation``."""

    num_extra_inputs: int
    num_extra_outputs: int
    _bound_op: Any
    _changes: int

    @property
    def _parameters(self) -> Any: ...

    @property
    def _quantizers(self) -> Any: ...

    @property
    def extras(self) -> Any: ...

    @property
    def parameter_names(self) -> tuple[str, ...]: ...

    def make_op(self) -> Any: ...

    def num_quantizers(self, mode: Any) -> int: ...

    def get_quantizer_roles(self, mode: Any) -> Any: ...

    def quantized_names(self, mode: Any) -> tuple[str, ...]: ...
