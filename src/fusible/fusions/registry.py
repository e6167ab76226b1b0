"""Registering fused passes: plain functions whose parameters' types say which sequence of ops they replace."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fusible import nvte
from fusible.errors import DTypeError, check_callable, expected
from fusible.locks import Lock
from fusible.nvte import PassKind
from fusible.ops import Op

__all__ = [
    "Fusion",
    "epoch",
    "register_fusion_backward",
    "register_fusion_forward",
    "register_fusion_inference",
    "registered",
    "unregister_fusion",
]

F = TypeVar("F", bound=Callable[..., Any])

Condition = Callable[[typing.Sequence[Op]], bool]
"""Whether a fusion can take the ops of a plan that its pattern matches; their types are resolved."""


@dataclass(frozen=True)
class Fusion:
    """A fused pass. ``pattern``: for each op of the sequence, the exact types that it may have. ``when``: a further condition on the ops."""

    kind: PassKind
    function: Callable[..., Any]
    pattern: tuple[frozenset[type[Op]], ...]
    when: Condition | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def ours(self) -> bool:
        """Whether it comes with the package."""
        return self.function.__module__.partition(".")[0] == "fusible"

    @property
    def opaque(self) -> bool:
        """Whether it is a caller's own code for one stretch of ops, not registered, which may compute elsewhere than by nvte's functions."""
        return not self.pattern

    def matches(self, ops: typing.Sequence[Op]) -> bool:
        """Whether ``ops``, as many as the pattern is long, are of its exact types, meet its condition, and take side values of different names."""
        if not all(type(op) in allowed for op, allowed in zip(ops, self.pattern, strict=True)):
            return False
        if self.when is not None and not self.when(ops):
            return False
        sides = [name for op in ops for name in (*op.side_inputs, *op.side_outputs)]
        return len(sides) == len(set(sides))

    def __str__(self) -> str:
        return f"{self.name}({' + '.join('|'.join(sorted(t.__name__ for t in allowed)) for allowed in self.pattern)})"


_fusions: dict[PassKind, list[Fusion]] = {"forward": [], "backward": [], "inference": []}
_lock = Lock()
_epoch = 0


def epoch() -> int:
    """A number that grows whenever the registered fusions change; plans are cached by it."""
    return _epoch


def registered(kind: PassKind) -> tuple[Fusion, ...]:
    """The fusions of a pass, longest first; of one length, those from outside the package first; then in the order of registration.

    So a user's fusion of ``Add`` and a new op is chosen where the package's own of ``MMT`` and ``Add`` would take the ``Add``, and a user may replace
    one of the package's.
    """
    with _lock:
        return tuple(sorted(_fusions[kind], key=lambda fusion: (-len(fusion.pattern), fusion.ours)))


def register_fusion_inference(function: F, *, when: Condition | None = None) -> F:
    """Register ``(a: A, b: B, ..., x: nvte.Tensor) -> y`` as the inference of ``A, B, ...``; with ``when``, of those ops for which it is true.

    It takes the place of a function that its module defined by that name before: so do those of forward and backward.

    Side inputs of the ops are keyword-only parameters, or ``**sides`` where an op is told their names, here and in forward; so are the gradients of
    side outputs in backward.
    """
    return _register("inference", function, when)


def register_fusion_forward(function: F, *, when: Condition | None = None) -> F:
    """Register ``(a: A, b: B, ..., x: nvte.Tensor) -> (y, (a_ctx, b_ctx, ...))`` as the forward of ``A, B, ...``; ``when``: as in inference.

    Each context must serve the backward of its op, fused or not.
    """
    return _register("forward", function, when)


def register_fusion_backward(function: F, *, when: Condition | None = None) -> F:
    """Register ``(a: A, b: B, ..., a_ctx: Context, b_ctx: Context, ..., dy: nvte.Tensor) -> (dx, (a_grads, b_grads, ...))``.

    ``when``: as in inference. It must equal the backward of the last op, then of the one before it, up to the first.
    """
    return _register("backward", function, when)


def unregister_fusion(function: Callable[..., Any]) -> None:
    """Forget every fusion made of ``function``."""
    global _epoch
    check_callable(function, "function of unregister_fusion")
    with _lock:
        for fusions in _fusions.values():
            fusions[:] = [fusion for fusion in fusions if fusion.function is not function]
        _epoch += 1


def _register(kind: PassKind, function: F, when: Condition | None) -> F:
    global _epoch
    check_callable(function, f"function of register_fusion_{kind}")
    check_callable(when, f"when of register_fusion_{kind}", optional=True)
    fusion = Fusion(kind, function, _pattern(kind, function), when)
    with _lock:
        known = next((i for i, former in enumerate(_fusions[kind]) if _defined_again(former.function, function)), len(_fusions[kind]))
        _fusions[kind][known : known + 1] = [fusion]
        _epoch += 1
    return function


def _defined_again(former: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Whether the module of ``former`` has defined ``function`` by the same name since, as when a cell of a notebook is run again; functions
    that other functions make are not known by their names."""
    name = getattr(function, "__qualname__", "<")
    named = former.__module__, getattr(former, "__qualname__", "")
    return former is not function and "<" not in name and named == (function.__module__, name)


def _pattern(kind: Literal["forward", "backward", "inference"], function: Callable[..., Any]) -> tuple[frozenset[type[Op]], ...]:
    hints = typing.get_type_hints(function)
    keywords = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in keywords]
    pattern: list[frozenset[type[Op]]] = []
    for name in positional:
        allowed = _op_types(hints.get(name))
        if not allowed:
            break
        pattern.append(allowed)
    rest = [hints.get(name) for name in positional[len(pattern) :]]
    contexts = len(pattern) if kind == "backward" else 0
    if not pattern or len(rest) != contexts + 1 or rest[-1] is not nvte.Tensor:
        raise DTypeError(
            expected(
                f"parameters (op types, {'their contexts, dy' if kind == 'backward' else 'x'}: nvte.Tensor)",
                of=f"the {kind} fusion {function.__name__}",
                got=str(inspect.signature(function)),
                do="annotate each parameter with its type",
            )
        )
    return tuple(pattern)


def _op_types(hint: Any) -> frozenset[type[Op]]:
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if choices and all(isinstance(choice, type) and issubclass(choice, Op) for choice in choices):
        return frozenset(choices)
    return frozenset()
