"""How a backend builds a quantized tensor without knowing its class.

A room that owns quantizers registers, per quantizer class, a function that makes the tensor from its fields. So the same kernels serve
Fusible's classes (registered by ``fusible.quantized``) and NVIDIA's own (registered by ``fusible.compat``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible.errors import DTypeError, check_callable, check_class, expected

__all__ = ["build_quantized", "register_factory"]

_FACTORIES: dict[type, Callable[..., Any]] = {}


def register_factory(quantizer_class: type, factory: Callable[..., Any]) -> None:
    """Build the tensors of ``quantizer_class`` (and its subclasses) by ``factory(quantizer, **fields)``.

    The fields are those of the format (``data``, ``data_transpose``, ``scale_inv``, ``fp8_dtype`` for Float8), beside ``shape`` (logical) and
    ``dtype`` (the nominal, unquantized one).
    """
    check_class(quantizer_class, "quantizer_class of register_factory")
    check_callable(factory, "factory of register_factory")
    _FACTORIES[quantizer_class] = factory


def build_quantized(quantizer: Any, **fields: Any) -> Any:
    """The quantized tensor of ``quantizer``'s class that holds ``fields``."""
    for cls in type(quantizer).__mro__:
        if cls in _FACTORIES:
            return _FACTORIES[cls](quantizer, **fields)
    raise DTypeError(
        expected("a quantizer of a registered class", of="a tex call", got=type(quantizer).__qualname__, do="register it by tex.register_factory")
    )
