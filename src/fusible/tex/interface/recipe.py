"""What scaling recipes need: amax, and the update of delayed scales."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Finite, FP8DType

__all__ = ["Recipe"]


class Recipe:
    """Amax and scale arithmetic, fp32 throughout."""

    @function("input", input="float", amax="fp32 (1)")
    def compute_amax(self, input: Tensor, amax: Tensor) -> None:
        """Overwrites ``amax`` (fp32 ``[1]``) with ``max |input|``; 0 for an empty tensor, NaN where an element is NaN."""

    @function(
        "amax_reduction_buffer",
        before="*",
        amax_reduction_buffer="fp32 [n]",
        amax_histories="k * fp32 [h n]",
        scales="k * fp32 (n)",
        disjoint="amax_histories scales",
    )
    def fused_amax_and_scale_update_after_reduction(
        self,
        amax_reduction_buffer: Tensor,
        amax_histories: Sequence[Tensor],
        scales: Sequence[Tensor],
        amax_compute_algo: str,
        fp8_dtype: FP8DType,
        margin: Finite,
    ) -> None:
        """The delayed-scaling update, in place in ``amax_histories`` (each ``[H, n_i]``) and ``scales`` (each ``[n_i]``).

        ``amax_reduction_buffer [sum n_i]`` holds the reduced amaxes, in order. Per column, ``last`` is the buffer's value, or ``history[0]`` where
        that is 0. Where ``last != 0`` the history moves up by one, ``last`` enters at the end and slot 0 becomes 0. The amax is the largest of the
        window (``"max"``; 0 where ``last == 0``) or ``last`` (``"most_recent"``); where it is finite and positive, ``scale = fp8_max * 2**-margin /
        amax``, capped at the largest fp32, and otherwise the scale stays. Raises ``ShapeError`` where the sizes do not add up, ``ArgumentError`` for
        another ``amax_compute_algo``. Source: Micikevicius et al. 2022, arXiv:2209.05433.
        """
