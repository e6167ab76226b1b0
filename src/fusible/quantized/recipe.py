"""Recipes: how the pipeline scales and quantizes. Values: two recipes with the same options are the same recipe.

Names and defaults are those of ``transformer_engine.common.recipe``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.quantized.formats import Format

__all__ = ["DelayedScaling", "Float8CurrentScaling", "HighPrecision", "MMParams", "QParams", "Recipe"]


@dataclass(frozen=True)
class MMParams:
    """Options of a matrix product: ``use_split_accumulator`` accumulates in full fp32 (every backend here does anyway)."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of a quantization: scales rounded down to powers of two, and a lower bound of amax."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass(frozen=True, repr=False)
class Recipe:
    """Base of all recipes."""

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return self.delayed() or self.float8_current_scaling()

    def high_precision(self) -> bool:
        return isinstance(self, HighPrecision)

    def __repr__(self) -> str:
        """The class and the options that differ from the defaults."""
        plain = type(self)()
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in changed.items())})"


def _short(value: object) -> str:
    return str(value) if isinstance(value, Enum) else repr(value)


@dataclass(frozen=True, repr=False)
class HighPrecision(Recipe):
    """No quantization: every request is widened to at least ``lowest``.

    ``lowest`` is ``"bfloat16"``, ``"float16"`` or ``"float32"``, or None for the input's own precision.
    """

    lowest: str | None = None

    def __post_init__(self) -> None:
        if self.lowest not in (None, "bfloat16", "float16", "float32"):
            raise ArgumentError(
                expected("bfloat16, float16, float32 or None", of="HighPrecision.lowest", got=repr(self.lowest), do="name one of these")
            )


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor scaling by the largest absolute values of earlier iterations.

    ``scale = fp8_max * 2**-margin / amax`` where ``amax`` is taken over a window of ``amax_history_len`` iterations (``"max"``), is the latest one
    (``"most_recent"``), or what ``amax_compute_algo(amax_history [window, n]) -> [n]`` gives. ``scaling_factor_compute_algo(amax, scale, fp8_max,
    recipe) -> scale`` replaces the formula. A non-finite amax never enters the history.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[[Any, Any, Any, Any], Any] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ArgumentError(
                expected("at least 1", of="DelayedScaling.amax_history_len", got=self.amax_history_len, do="give the window's length")
            )
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ArgumentError(
                expected(
                    "'max', 'most_recent' or a function", of="DelayedScaling.amax_compute_algo", got=repr(self.amax_compute_algo), do="name one"
                )
            )


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor scaling by the tensor's own largest absolute value: ``scale = fp8_max / amax``, stateless."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    def __post_init__(self) -> None:
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, QParams(power_2_scale=self.use_power_2_scales))
