"""Specialized calls: what is left of a call of a backend's method where it recurs on operands that lie alike.

A method checks its arguments, chooses among its kernels and finds out what to make room for. On operands of the same dtypes, shapes, strides and
device all of this comes out the same; who repeats a call, as the replay of a pass does, asks once what it comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from fusible.errors import check_callable
from fusible.tex.interface.declare import DECLARATIONS, CallArguments
from fusible.tex.interface.kernel_calls import KernelCalls

__all__ = ["SpecializedCall", "specialize", "specialized_by"]

F = TypeVar("F", bound=Callable[..., Any])


class SpecializedCall(NamedTuple):
    """What a call of a backend's method comes to: ``compute(*operands)`` gives what the method gives, to the bit, wherever the operands lie as they
    did and the other arguments are what they were.

    ``operands``: arguments of the call, or tensors within its quantized ones. ``compute`` itself keeps none of them, and touches no memory but theirs
    whatever they are: its caller compares how the inputs of a whole pass lie, not each operand. It runs where autograd records nothing.

    ``kernels``: what ``compute`` does as calls of native kernels, where it is no more than that, and the operands that it writes to share their
    memory with no other.
    """

    compute: Callable[..., Any]
    operands: tuple[Any, ...]
    kernels: KernelCalls | None = None


def specialized_by(how: Callable[[Any, CallArguments], SpecializedCall | None]) -> Callable[[F], F]:
    """Attach to a backend's method what its calls come to: ``how(self, call)``, given the arguments of one that has succeeded by the names of the
    declared function, gives it specialized, or None where the method itself is to be called."""
    check_callable(how, "how of specialized_by")

    def attach(method: F) -> F:
        check_callable(method, "what specialized_by decorates")
        method.__specialize__ = how  # type: ignore[attr-defined]
        return method

    return attach


def specialize(method: Callable[..., Any], args: tuple[Any, ...]) -> SpecializedCall | None:
    """What ``method(*args)``, a call of a backend's method that has succeeded, comes to; None where its backend says nothing of it."""
    how = getattr(method, "__specialize__", None)
    if how is None:
        return None
    parameters = DECLARATIONS[method.__name__].signature.parameters
    by_name = dict(zip(parameters, args, strict=False))
    return how(method.__self__, CallArguments(**{name: by_name.get(name, p.default) for name, p in parameters.items()}))  # type: ignore[attr-defined]
