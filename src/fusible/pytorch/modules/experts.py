"""``MixtureOfExperts``."""

from __future__ import annotations

import torch
from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import make_nvte_tensor
from fusible.pytorch.modules.base import BaseModule, ParameterInitMethod
from fusible.pytorch.modules.initialization import Init
from fusible.pytorch.modules.linear import default_weight_init_method
from fusible.tex.activations import ACTIVATIONS

__all__ = ["MixtureOfExperts"]

_BY_NAME = {row.name: row for row in ACTIVATIONS if not row.options}


class MixtureOfExperts(BaseModule):
    """``y[t] = sum_k p[t, k] * expert_e(x[t])`` over the ``top_k`` experts ``e = e[t, k]`` of each token; ``expert_e`` is ``up_e``, ``activation``
    and ``down_e``.

    The experts of a token are those of the largest logits ``x @ router_weight.T``, and ``p`` is the softmax over these (Shazeer et al. 2017,
    arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088), or, not ``normalized``, theirs of the softmax over all logits. No token is dropped. Takes
    fp32, bf16 and fp16, and no fp64. Parameters: ``router_weight [experts, features]``; ``up_weight [experts, inner, features]``, twice ``inner`` for
    a gated ``activation``; ``down_weight [experts, features, inner]``; no biases.

    ``activation``: the name of one of ``tex.activations``, as ``"gelu"`` or ``"swiglu"``. ``weight_init_method`` fills a matrix and returns it, of
    each expert by itself; the default is that of ``nn.Linear``. Each expert's products are quantized by themselves, and the router's never are.
    ``fusible.distributed.parallelize`` shares out the experts along ``ep``. Raises ``ArgumentError``.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        normalized: bool = True,
        param_dtype: torch.dtype | None = None,
        weight_init_method: ParameterInitMethod = default_weight_init_method,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        row = _BY_NAME.get(activation)
        if row is None:
            of = "the activation of MixtureOfExperts"
            raise ArgumentError(expected(f"one of {', '.join(_BY_NAME)}", of=of, got=repr(activation), do="name one of these"))
        self.features, self.inner_features, self.experts, self.top_k, self.activation = features, inner_features, experts, top_k, activation
        self.normalized = normalized

        init = Init(weight_init_method)
        self.init_methods = {"router_weight": init, "up_weight": init.of_each, "down_weight": init.of_each}
        shapes = (experts, features), (experts, (1 + row.gated) * inner_features, features), (experts, features, inner_features)
        made = [nn.Parameter(torch.empty(shape, dtype=param_dtype, device=device)) for shape in shapes]
        self.router_weight, self.up_weight, self.down_weight = made
        router, up, down = (make_nvte_tensor(weight) for weight in (self.router_weight, self.up_weight, self.down_weight))
        sizes = "sizes_up", "sizes_down"
        products = [ops.GroupedMMT(experts, [weight]).with_(side_inputs=(name,)) for weight, name in zip((up, down), sizes, strict=True)]
        super().__init__(
            ops.RouteTokens(router, top_k, normalized),
            ops.DispatchTokens(experts, top_k, sizes),
            products[0],
            getattr(ops, row.title)(),
            products[1],
            ops.CombineTokens(),
        )
        self.reset_parameters()

    def extra_repr(self) -> str:
        sizes = f"features={self.features}, inner_features={self.inner_features}"
        normalized = "" if self.normalized else ", normalized=False"
        return f"{sizes}, experts={self.experts}, top_k={self.top_k}, activation={self.activation!r}{normalized}"
