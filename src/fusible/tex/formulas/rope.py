"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any

from fusible.tex.formulas.arrays import ArrayKernels
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.rope import Rope

__all__ = ["RopeFormulas"]


class RopeFormulas(ArrayKernels, Rope):
    """A backend looks up the angles, and says which tokens of packed sequences belong to one."""

    def _rope_angles(self, x: Any, call: Any, function: str) -> tuple[Any, Any]:
        """The angle of every token, broadcastable to ``x``; and for THD, which tokens belong to a sequence."""
        raise NotImplementedError

    def _of_sequences(self, out: Any, inside: Any) -> Any:
        """``out`` where tokens belong to a sequence, 0 elsewhere."""
        raise NotImplementedError

    @by_name
    def fused_rope_forward(self, call: Any) -> Any:
        x, xp = self._plain(call.input), self._arrays
        angles, inside = self._rope_angles(x, call, "fused_rope_forward")
        head = xp.wide(x[..., : angles.shape[-1]])
        rotated = xp.times(self._rope_rotated(head, call.interleaved), xp.sin(angles))
        return self._rope_result(x, xp.plus_product(rotated, head, xp.cos(angles)), inside)

    @by_name
    def fused_rope_backward(self, call: Any) -> Any:
        g, xp = self._plain(call.output_grads), self._arrays
        angles, inside = self._rope_angles(g, call, "fused_rope_backward")
        head = xp.wide(g[..., : angles.shape[-1]])
        rotated = self._rope_rotated(head * xp.sin(angles), call.interleaved)
        return self._rope_result(g, xp.product_minus(rotated, head, xp.cos(angles)), inside)

    def _rope_rotated(self, x: Any, interleaved: bool) -> Any:
        """``R(x)``, a new tensor. R is antisymmetric: its transpose is ``-R``."""
        xp = self._arrays
        if interleaved:
            return xp.reshape(xp.stack([-x[..., 1::2], x[..., ::2]], -1), x.shape)
        half = x.shape[-1] // 2
        return xp.concatenate([-x[..., half:], x[..., :half]], -1)

    def _rope_result(self, x: Any, head: Any, inside: Any) -> Any:
        """``head`` in the place of the first columns of ``x``, and 0 for tokens of nobody."""
        xp, width = self._arrays, head.shape[-1]
        head = xp.cast(head, x.dtype)
        out = head if width == x.shape[-1] else xp.concatenate([head, x[..., width:]], -1)
        return out if inside is None else self._of_sequences(out, inside)
