"""Checks of what the passes of ops take and return. Without them a mistake in a user's op would show much later: in a kernel, in backward, or as a
missing gradient.

A replayed pass is not checked again: its results were checked when it was recorded."""

# What is looked at here is what code of anybody has returned, of which types say nothing.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.fusions import Fusion
from fusible.nvte import DType, PassKind, Tensor, dtype_name
from fusible.ops import Op

__all__ = ["KeptContext", "check_backward", "check_forward", "check_inference", "check_takes"]


class KeptContext(dict[str, Tensor]):
    """The context of an op as its backward gets it: what forward has not put there is asked for by name, ``ArgumentError`` says of which op."""

    def __init__(self, op: Op, context: Any) -> None:
        super().__init__(context)
        self._op = op

    def __missing__(self, name: str) -> NoReturn:
        of = f"the context that backward of {self._op.title} reads"
        do = "return it in the context, from forward and from each fusion of it"
        raise ArgumentError(expected(f"{name!r}", of=of, got=", ".join(map(repr, self)) or "an empty one", do=do))


def check_takes(fusion: Fusion | None, members: Sequence[Op], kind: PassKind, names: Collection[str]) -> None:
    """Raise ``ArgumentError`` unless a pass of ops takes the side values of these names as keywords."""
    if not names:
        return
    function: Callable[..., Any] = getattr(type(members[0]), kind) if fusion is None else fusion.function
    taken = _keywords(function)
    lacking = [] if taken is None else [name for name in names if name not in taken]
    if lacking:
        of = f"{kind} of {_title(members)}" if fusion is None else f"the fusion {fusion.name}, {kind} of {_title(members)}"
        got = f"{function.__name__}{inspect.signature(function)}"
        raise ArgumentError(expected(f"a keyword {lacking[0]}, or **sides", of=of, got=got, do="add it behind the other parameters"))


@functools.lru_cache(maxsize=1024)
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names that a function takes as keywords; None where it takes any, or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def _title(members: Sequence[Op]) -> str:
    return " + ".join(op.title for op in members)


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, bool | int | float) else f"a {type(value).__name__}"


def _refuse(wanted: str, method: str, members: Sequence[Op], got: Any, do: str) -> NoReturn:
    raise ArgumentError(expected(wanted, of=f"what {method} of {_title(members)} returns", got=_shown(got), do=do))


def _is_of(result: Any, sides: bool) -> bool:
    """Whether a pass returned two things, or three with ``sides``; an op whose sides nobody takes may return a third one, in which nothing is."""
    return isinstance(result, tuple) and (len(result) == 2 + sides or (len(result) == 3 and not result[2]))


def _check_tensor(name: str, value: Any, asked: Any, method: str, members: Sequence[Op]) -> None:
    if value.__class__ is not Tensor and not isinstance(value, Tensor):
        _refuse(f"an nvte.Tensor as {name}", method, members, value, "return what an nvte function gives")
    if value.type is not asked and isinstance(asked, DType) and value.type != asked:
        of = f"{name} that {method} of {_title(members)} returns"
        got = dtype_name(value.type) if isinstance(value.type, DType) else value.type
        raise DTypeError(expected(dtype_name(asked), of=of, got=got, do=f"compute it in self.{name}_dtype"))


def check_forward(members: Sequence[Op], result: Any, *, sides: bool, fused: bool) -> None:
    """Raise ``ArgumentError`` unless ``result`` is ``(y, ctx)``, or ``(y, ctxs)`` of a fused pass, and with ``sides`` a dictionary of side outputs;
    ``DTypeError`` for a y that is not of the type that the op was asked for."""
    if not _is_of(result, sides):
        wanted = f"(y, {'contexts' if fused else 'context'}{', side outputs' if sides else ''})"
        _refuse(wanted, "forward", members, result, "return these as a tuple")
    _check_tensor("y", result[0], members[-1].y_dtype, "forward", members)
    contexts = result[1] if fused else (result[1],)
    if not isinstance(contexts, list | tuple) or len(contexts) != len(members):
        _refuse(f"{len(members)} contexts", "forward", members, contexts, "return one for each op")
    for context in contexts:
        if context.__class__ is not dict:
            _refuse("a dictionary as context", "forward", members, context, "return {} where backward needs nothing")
        for name, value in context.items():
            if name.__class__ is not str or not isinstance(value, Tensor):
                got = value if name.__class__ is str else name
                _refuse("a context of nvte.Tensors by names", "forward", members, got, "keep what is no tensor on the op")
    if sides and not isinstance(result[2], dict):
        _refuse("a dictionary of side outputs", "forward", members, result[2], "return one")


def check_inference(members: Sequence[Op], result: Any) -> None:
    """Raise ``ArgumentError`` unless ``result`` is y, and ``DTypeError`` for one that is not of the type that the op was asked for."""
    _check_tensor("y", result, members[-1].y_dtype, "inference", members)


def check_backward(members: Sequence[Op], result: Any, *, sides: bool, fused: bool, sums: Collection[str] = ()) -> None:
    """Raise ``ArgumentError`` unless ``result`` is ``(dx, grads)``, or ``(dx, grads of each op)`` of a fused pass, and with ``sides`` a dictionary of
    gradients of side inputs; ``ShapeError`` for a gradient of another shape than its parameter's. ``sums``: the parameters' slots to which a pass may
    have added its gradients itself."""
    if not _is_of(result, sides):
        _refuse(f"(dx, gradients{', gradients of side inputs' if sides else ''})", "backward", members, result, "return these as a tuple")
    first = members[0]
    if result[0] is not None:
        _check_tensor("dx", result[0], first.dx_dtype, "backward", members)
    elif first.wants("x"):
        _refuse("an nvte.Tensor as dx", "backward", members, None, "return the gradient of x, which is wanted")
    grads = result[1] if fused else (result[1],)
    if not isinstance(grads, list | tuple) or len(grads) != len(members):
        _refuse(f"the gradients of {len(members)} ops", "backward", members, grads, "return a list for each")
    for op, own in zip(members, grads, strict=True):
        _check_gradients(op, own, members, sums)
    if sides and not isinstance(result[2], dict):
        _refuse("a dictionary of gradients of side inputs", "backward", members, result[2], "return one")


def _check_gradients(op: Op, grads: Any, members: Sequence[Op], sums: Collection[str]) -> None:
    names = op.arg_names
    if not isinstance(grads, list | tuple) or len(grads) != len(names):
        do = f"return one for each of {', '.join(names)}" if names else "return [], as it has no parameters"
        _refuse(f"{len(names)} gradients", "backward", members, grads, do)
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            if not op.delays_wgrad and op.wants(name) and f"{op.position}.{name}" not in sums:
                do = "return it, as it is wanted, or declare delays_wgrad"
                _refuse(f"the gradient of {name}", "backward", members, None, do)
        elif not isinstance(grad, Tensor):
            _refuse(f"an nvte.Tensor as gradient of {name}", "backward", members, grad, "return what an nvte function gives")
        elif tuple(grad.shape) != tuple(getattr(op, name).shape):
            of = f"the gradient of {name} that backward of {_title(members)} returns"
            do = "sum over what was broadcast"
            raise ShapeError(expected(str(list(getattr(op, name).shape)), of=of, got=list(grad.shape), do=do))
