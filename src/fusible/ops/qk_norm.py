"""``QKNorm``."""

from __future__ import annotations

import math
from typing import Self, Unpack

from fusible import nvte
from fusible.errors import check_number
from fusible.ops.attention import check_groups, heads_side_by_side
from fusible.ops.op import Context, Op, OpTypes, check_width
from fusible.ops.sharing import Parts, Process, SharesColumns

__all__ = ["QKNorm"]


class QKNorm(SharesColumns, Op):
    """Of q, k and v side by side, as ``DotProductAttention`` takes them: ``q * rsigma * q_weight`` and ``k * rsigma * k_weight``, head by head, with
    ``rsigma = 1 / sqrt(mean of the head's squares + eps)``; v as it is (Dehghani et al. 2023, arXiv:2302.05442, with the norm of RMSNorm).

    ``x [*, (heads + 2 groups) * width]``; ``q_weight``, ``k_weight`` ``[width]``, to which 1 is added where ``zero_centered_gamma``.
    """

    rows_alone = True
    x_dtype = nvte.DType.BFloat16
    dy_dtype = nvte.DType.BFloat16
    q_weight_dtype: nvte.Type | None = None
    k_weight_dtype: nvte.Type | None = None

    def __init__(
        self,
        q_weight: nvte.Tensor,
        k_weight: nvte.Tensor,
        heads: int,
        *,
        groups: int | None = None,
        eps: float = 1e-6,
        zero_centered_gamma: bool = False,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(**types)
        check_number(eps, "eps of QKNorm", least=0)
        self.q_weight, self.k_weight = q_weight, k_weight
        self.heads, self.groups = heads, heads if groups is None else groups
        check_groups(self.heads, self.groups)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.q_weight, self.k_weight]

    @property
    def head_width(self) -> int:
        return self.q_weight.shape[0]

    def _pieces(self, x: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor, nvte.Tensor]:
        """The heads of q and of k as rows, and v."""
        sizes = [n * self.head_width for n in (self.heads, self.groups, self.groups)]
        q, k, v = nvte.split(x, sizes, dim=len(x.shape) - 1)
        return self._rows(q), self._rows(k), v

    def _rows(self, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.reshape(x, (math.prod(x.shape) // self.head_width, self.head_width))

    def _joined(self, q: nvte.Tensor, k: nvte.Tensor, v: nvte.Tensor, type: nvte.Type) -> nvte.Tensor:
        leading, width = v.shape[:-1], self.head_width
        q, k = nvte.reshape(q, (*leading, self.heads * width)), nvte.reshape(k, (*leading, self.groups * width))
        return nvte.cast_checked(nvte.concatenate([q, k, v], dim=len(leading)), type)

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        q, k, v = self._pieces(nvte.cast_checked(x, self.x_dtype))
        q_weight, k_weight = nvte.cast_checked(self.q_weight, self.q_weight_dtype), nvte.cast_checked(self.k_weight, self.k_weight_dtype)
        q_normal, q_rsigma = nvte.rmsnorm(q, q_weight, self.eps, self.zero_centered_gamma, q.type)
        k_normal, k_rsigma = nvte.rmsnorm(k, k_weight, self.eps, self.zero_centered_gamma, k.type)
        return self._joined(q_normal, k_normal, v, self.y_dtype), self.context(q, k, q_rsigma, k_rsigma, q_weight, k_weight)

    def context(
        self, q: nvte.Tensor, k: nvte.Tensor, q_rsigma: nvte.Tensor, k_rsigma: nvte.Tensor, q_weight: nvte.Tensor, k_weight: nvte.Tensor
    ) -> Context:
        return {"q": q, "k": k, "q_rsigma": q_rsigma, "k_rsigma": k_rsigma, "q_weight": q_weight, "k_weight": k_weight}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dq, dk, dv = self._pieces(nvte.cast_checked(dy, self.dy_dtype))
        dq, dq_weight = nvte.drmsnorm(dq, ctx["q"], ctx["q_rsigma"], ctx["q_weight"], self.zero_centered_gamma, dv.type)
        dk, dk_weight = nvte.drmsnorm(dk, ctx["k"], ctx["k_rsigma"], ctx["k_weight"], self.zero_centered_gamma, dv.type)
        return self._joined(dq, dk, dv, self.dx_dtype), [dq_weight, dk_weight]

    def width(self, width: int | None) -> int | None:
        check_width(self, (self.heads + 2 * self.groups) * self.head_width, width)
        return width

    def parts_of_x(self, y: Parts) -> Parts | None:
        return y if y == heads_side_by_side(self.heads, self.groups, self.head_width) else None

    def share(self, process: Process) -> Self:
        return self.with_(heads=self.heads // process.size, groups=max(self.groups // process.size, 1))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}"
