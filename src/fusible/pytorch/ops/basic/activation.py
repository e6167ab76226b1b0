"""The activations of ``tex.activations`` as operations; each is the op of its name. Gated ones take ``[*, 2 H]`` and give ``[*, H]``: the first half
activated, times the second.

``cache_quantized_input``: what backward needs of the input is kept in E4M3, scaled by its own amax: a byte per element, a less exact gradient.
``glu_interleave_size`` n: the halves of the input alternate in blocks of n columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.modules.dictionaries import is_empty
from fusible.pytorch.ops.op import BasicOperation
from fusible.tex.activations import ACTIVATIONS

_INNER = "_clamped._extra_state"
"""The entry that the package's ``ScaledClampedQGeGLU`` has in state dicts for an operation inside it."""


class _Activation(BasicOperation):
    op: ClassVar[Callable[..., Op]]
    hands_on: ClassVar[Sequence[str]]
    """Its options that are the op's."""
    first: ClassVar[Sequence[str]] = ()
    """The arguments that the op takes before them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)
        self.make_op()  # refuses what the op refuses

    def make_op(self) -> Op:
        return self.op(*self.first, **{name: getattr(self, name) for name in self.hands_on})


class _Scaled(_Activation):
    num_extra_inputs = 1
    first = ("scales",)


class _ScaledClampedQGeGLU(_Scaled):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{_INNER}"] = self.get_extra_state()

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        if is_empty(state_dict.get(f"{prefix}{_INNER}")):
            state_dict.pop(f"{prefix}{_INNER}", None)


_SCALED = """``{}(x) * scales`` with the extra input ``scales [rows]``, which has a gradient.

``activation_recompute_in_mlp`` is taken for compatibility: what backward needs is the input in any case."""
_BASES = {"ScaledClampedQGeGLU": _ScaledClampedQGeGLU}
"""By title: the classes that do more than the op of their name."""
_BY_NAME = Parameter.KEYWORD_ONLY
_CACHE = Parameter("cache_quantized_input", _BY_NAME, default=False, annotation="bool")
_RECOMPUTE = Parameter("activation_recompute_in_mlp", _BY_NAME, default=False, annotation="bool")
_BLOCKS = Parameter("glu_interleave_size", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="int | None")


def _made(title: str, base: type[_Activation], doc: str, op: str, parameters: Sequence[Parameter]) -> tuple[str, type[BasicOperation]]:
    """The class of an operation whose constructor has ``parameters``."""
    taken = Signature(parameters)

    def __init__(self: _Activation, *args: Any, **options: Any) -> None:
        try:
            bound = taken.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{title}.__init__(): {error}") from None
        bound.apply_defaults()
        base.__init__(self, **bound.arguments)

    own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = Signature([own, *parameters], return_annotation="None")  # type: ignore[attr-defined]
    hands_on = [p.name for p in parameters if p is not _RECOMPUTE]
    declared = {"__module__": __name__, "__doc__": doc, "__init__": __init__, "op": getattr(ops, op), "hands_on": hands_on}
    return title, type(title, (base,), declared)


def _classes() -> Iterator[tuple[str, type[BasicOperation]]]:
    for row in ACTIVATIONS:
        options = [Parameter(option.name, _BY_NAME, default=option.default, annotation="float") for option in row.options]
        blocks = [_BLOCKS] if row.in_blocks else []
        by_name = [p.replace(kind=_BY_NAME) for p in blocks]
        yield _made(row.nvidias_title, _Activation, row.doc, row.title, [*options, _CACHE, *by_name])
        if row.scaled:
            base, parameters = _BASES.get(row.scaled, _Scaled), [*blocks, *options, _RECOMPUTE]
            yield _made(row.scaled, base, _SCALED.format(row.name), row.scaled, parameters)


_found = dict(_classes())
globals().update(_found)

__all__ = sorted(_found)  # pyright: ignore[reportUnsupportedDunderAll]
