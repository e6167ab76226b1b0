"""The activations, of ``tex.activations``. Gated ones take ``[tokens, 2 H]`` and give ``[tokens, H]``: the first half activated, times the second."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator
from inspect import Parameter
from operator import attrgetter
from typing import Any

from fusible import nvte
from fusible.ops.activation_base import Activation, BlockGate
from fusible.ops.op import Op
from fusible.ops.scaled_activation import ScaledActivation, ScaledGate
from fusible.tex.activations import ACTIVATIONS, Option


def _constructor(base: type[Op], options: tuple[Option, ...]) -> Callable[..., None]:
    """The constructor of ``base`` with ``options`` beside its own parameters."""

    def __init__(self: Op, *args: Any, **keywords: Any) -> None:
        base.__init__(self, *args, **keywords)

    signature = inspect.signature(base.__init__)
    *own, types = signature.parameters.values()
    more = [Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation="float") for option in options]
    __init__.__signature__ = signature.replace(parameters=[*own, *more, types])  # type: ignore[attr-defined]
    return __init__


def _made(title: str, base: type[Op], doc: str, name: str, gradient: str, options: tuple[Option, ...], **declared: Any) -> tuple[str, type[Op]]:
    """The class of an op of two functions."""
    declared |= {"function": staticmethod(getattr(nvte, name)), "gradient": staticmethod(getattr(nvte, gradient))}
    if options:
        numbers: Any = attrgetter(*(option.name for option in options))
        declared |= {"takes": options, "numbers": property(numbers if len(options) > 1 else lambda op: (numbers(op),))}
        declared["__init__"] = _constructor(base, options)
    return title, ABCMeta(title, (base,), {"__module__": __name__, "__doc__": doc, **declared})


def _classes() -> Iterator[tuple[str, type[Op]]]:
    for row in ACTIVATIONS:
        base = BlockGate if row.in_blocks else Activation
        yield _made(row.title, base, row.doc, row.name, row.gradient, row.options, gated=row.gated)
        if row.scaled:
            base, doc = ScaledGate if row.gated else ScaledActivation, f"``{row.name}(x) * s``, of ``{row.title}``."
            yield _made(row.scaled, base, doc, f"scaled_{row.name}", f"scaled_{row.gradient}", row.options)


_found = dict(_classes())
globals().update(_found)

__all__ = sorted(["Activation", *_found])  # pyright: ignore[reportUnsupportedDunderAll]
