"""SwiGLU and its kin as operations. ``glu_interleave_size`` n: the halves of the input alternate in blocks of n columns."""

from __future__ import annotations

from typing import Any

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.modules.dictionaries import is_empty
from fusible.pytorch.ops.op import BasicOperation

__all__ = ["ClampedSwiGLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU", "ScaledSwiGLU", "SiTUGLU", "SwiGLU"]

_INNER = "_clamped._extra_state"
"""What the package's ``ScaledClampedQGeGLU`` has of an operation inside it."""


class SwiGLU(BasicOperation):
    """``silu(a) * b``."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        self.cache_quantized_input, self.glu_interleave_size = cache_quantized_input, glu_interleave_size
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.SwiGLU(glu_interleave_size=self.glu_interleave_size, cache_quantized_input=self.cache_quantized_input)


class SiTUGLU(BasicOperation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``."""

    def __init__(
        self, *, beta1: float = 4.0, beta2: float = 25.0, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__()
        self.beta1, self.beta2 = beta1, beta2
        self.cache_quantized_input, self.glu_interleave_size = cache_quantized_input, glu_interleave_size
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.SiTUGLU(
            beta1=self.beta1, beta2=self.beta2, glu_interleave_size=self.glu_interleave_size, cache_quantized_input=self.cache_quantized_input
        )


class ClampedSwiGLU(BasicOperation):
    """``c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``."""

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__()
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset
        self.cache_quantized_input, self.glu_interleave_size = cache_quantized_input, glu_interleave_size
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.ClampedSwiGLU(
            limit=self.limit,
            alpha=self.alpha,
            glu_linear_offset=self.glu_linear_offset,
            glu_interleave_size=self.glu_interleave_size,
            cache_quantized_input=self.cache_quantized_input,
        )


class ScaledSwiGLU(BasicOperation):
    """``swiglu(x) * scales`` with the extra input ``scales [rows]``, which has a gradient. ``activation_recompute_in_mlp`` is taken for
    compatibility: what backward needs is the input in any case."""

    num_extra_inputs = 1

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        self._begin(glu_interleave_size, activation_recompute_in_mlp)
        self.make_op()  # refuses what the operation refuses

    def _begin(self, glu_interleave_size: int | None, activation_recompute_in_mlp: bool) -> None:
        """What all scaled gates have; the operation is made when a class has the rest of its options."""
        super().__init__()
        self.glu_interleave_size, self.activation_recompute_in_mlp = glu_interleave_size, activation_recompute_in_mlp

    def make_op(self) -> Op:
        return ops.ScaledSwiGLU("scales", glu_interleave_size=self.glu_interleave_size)


class ScaledSiTUGLU(ScaledSwiGLU):
    """``situglu(x) * scales`` with the extra input ``scales [rows]``."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        self._begin(glu_interleave_size, activation_recompute_in_mlp)
        self.beta1, self.beta2 = beta1, beta2
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.ScaledSiTUGLU("scales", beta1=self.beta1, beta2=self.beta2, glu_interleave_size=self.glu_interleave_size)


class ScaledClampedQGeGLU(ScaledSwiGLU):
    """``clamped_swiglu(x) * scales`` with the extra input ``scales [rows]``."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        self._begin(glu_interleave_size, activation_recompute_in_mlp)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset
        self.make_op()  # refuses what the operation refuses

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{_INNER}"] = self.get_extra_state()

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        if is_empty(state_dict.get(f"{prefix}{_INNER}")):
            state_dict.pop(f"{prefix}{_INNER}", None)

    def make_op(self) -> Op:
        return ops.ScaledClampedQGeGLU(
            "scales",
            limit=self.limit,
            alpha=self.alpha,
            glu_linear_offset=self.glu_linear_offset,
            glu_interleave_size=self.glu_interleave_size,
        )
