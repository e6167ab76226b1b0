"""The activations of ``tex.activations`` as operations; each is the op of its name. Gated ones take ``[*, 2 H]`` and give ``[*, H]``: the first half
activated, times the second."""

from __future__ import annotations

from typing import Any, ClassVar

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation
from fusible.tex.activations import ACTIVATIONS, ELEMENTWISE


class _Activation(BasicOperation):
    """``cache_quantized_input``: what backward needs of the input is kept in E4M3, scaled by its own amax: a byte per element, a less exact
    gradient."""

    op: ClassVar[type[ops.Activation]]
    cache_quantized_input: bool

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def make_op(self) -> Op:
        return self.op(cache_quantized_input=self.cache_quantized_input)


class _ScaledActivation(BasicOperation):
    """An activation times the extra input ``scales [rows]``, which has a gradient. ``activation_recompute_in_mlp`` is taken for compatibility: what
    backward needs is the input in any case."""

    op: ClassVar[type[Any]]
    num_extra_inputs = 1
    activation_recompute_in_mlp: bool

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def make_op(self) -> Op:
        return self.op("scales")


def _made(title: str, base: type[BasicOperation], doc: str, op: str) -> tuple[str, type[BasicOperation]]:
    return title, type(title, (base,), {"__module__": __name__, "__doc__": doc, "op": getattr(ops, op)})


_plain = [_made(row.nvidias_title, _Activation, row.doc, row.title) for row in ACTIVATIONS if not row.in_blocks]
_scaled = [_made(row.scaled, _ScaledActivation, f"``{row.name}(x) * scales``, of ``{row.title}``.", row.scaled) for row in ELEMENTWISE if row.scaled]
globals().update([*_plain, *_scaled])

__all__ = sorted([*dict(_plain), *dict(_scaled)])  # pyright: ignore[reportUnsupportedDunderAll]
