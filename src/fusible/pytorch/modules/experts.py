"""``MixtureOfExperts``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.modules.base import ParameterInitMethod
from fusible.pytorch.modules.initialization import Init
from fusible.pytorch.modules.linear import default_weight_init_method
from fusible.pytorch.modules.options import ModuleWithOptions
from fusible.pytorch.quantized_init import as_parameter
from fusible.quantized import QuantizerRole
from fusible.tex.activations import ACTIVATIONS, Activation

__all__ = ["MixtureOfExperts"]

_WEIGHT = QuantizerRole("grouped_linear", "weight")
_BY_NAME = {row.name: row for row in ACTIVATIONS if not row.options}


def _activation(name: str, among: Collection[str]) -> Activation:
    if name not in among:
        of = "the activation of MixtureOfExperts"
        raise ArgumentError(expected(f"one of {', '.join(among)}", of=of, got=repr(name), do="name one of these"))
    return _BY_NAME[name]


class MixtureOfExperts(ModuleWithOptions):
    """``y[t] = sum_k p[t, k] * expert_e(x[t])`` over the ``top_k`` experts ``e = e[t, k]`` of each token; ``expert_e`` is ``up_e``, ``activation``
    and ``down_e``.

    The experts of a token are those of the largest logits ``x @ router_weight.T``, and ``p`` is the softmax over these (Shazeer et al. 2017,
    arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088), or, not ``normalized``, theirs of the softmax over all logits. No token is dropped. Takes
    fp32, bf16 and fp16, and no fp64. Parameters: ``router_weight [experts, features]``; ``up_weight [experts, inner, features]``, twice ``inner`` for
    a gated ``activation``; ``down_weight [experts, features, inner]``; no biases. In 8 bits (``quantize_parameters``) each expert has its own,
    ``up_weight0`` and so on, but for those that processes share out along ``ep``: these stay one, a ``GroupedTensor``, and so are those that are made
    within ``quantized_model_init``.

    ``activation``: the name of one of ``tex.activations``, as ``"gelu"`` or ``"swiglu"``. ``weight_init_method`` fills a matrix and returns it, of
    each expert by itself; the default is that of ``nn.Linear``. Each expert's products are quantized by themselves, and the router's never are.
    ``fusible.distributed.parallelize`` shares out the experts along ``ep``, and along ``tp`` with the rows. Raises ``ArgumentError``.

    ``score_function="sigmoid"``: ``p`` are sigmoids of the logits, ``normalized`` to a sum of 1, and experts are chosen by them (DeepSeek-AI 2024,
    arXiv:2412.19437). ``expert_bias``: a buffer of that name, fp32 ``[experts]`` of zeros, is added to choose, and to nothing else: who trains the
    model moves it so that experts get equally many tokens. ``groups``, ``top_groups``: the experts of a token are of ``top_groups`` of so many
    equal groups, those whose ``top_k // top_groups`` best sum highest. ``scaling_factor``: what ``p`` is multiplied by. ``router_dtype``:
    ``torch.float32`` for a router that is held in fp32 and multiplies in it, whatever x is.
    """

    fixed_options = frozenset({"features", "inner_features", "experts", "expert_bias"})
    initial_options = frozenset({"router_dtype", "param_dtype", "weight_init_method", "device"})

    def __init__(
        self,
        features: int,
        inner_features: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        normalized: bool = True,
        score_function: str = "softmax",
        expert_bias: bool = False,
        groups: int | None = None,
        top_groups: int | None = None,
        scaling_factor: float | None = None,
        router_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        weight_init_method: ParameterInitMethod = default_weight_init_method,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        row = _activation(activation, _BY_NAME)
        self.features, self.inner_features, self.experts, self.top_k, self.activation = features, inner_features, experts, top_k, activation
        self.normalized, self.score_function, self.groups, self.top_groups = normalized, score_function, groups, top_groups
        self.scaling_factor, self._router_dtype = scaling_factor, router_dtype
        if router_dtype not in (None, torch.float32):
            of, do = "router_dtype of MixtureOfExperts", "leave it out for a router in the type of x"
            raise ArgumentError(expected("torch.float32 or None", of=of, got=router_dtype, do=do))

        init = Init(weight_init_method)
        self.init_methods = {"router_weight": init, "up_weight": init.of_each, "down_weight": init.of_each}
        shapes = (experts, features), (experts, (1 + row.gated) * inner_features, features), (experts, features, inner_features)
        dtypes = router_dtype or param_dtype, param_dtype, param_dtype
        drawn = zip(self.init_methods.values(), shapes, dtypes, strict=True)
        made = [method(torch.empty(shape, dtype=dtype, device=device)) for method, shape, dtype in drawn]
        self.router_weight, self.up_weight, self.down_weight = nn.Parameter(made[0]), *(as_parameter(weight, _WEIGHT) for weight in made[1:])
        if expert_bias:
            self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=device))
        super().__init__(*self.make_ops())

    def make_ops(self) -> Iterator[Op]:
        router, up, down = self.tensor_of("router_weight"), self.tensor_of("up_weight"), self.tensor_of("down_weight")
        assert router is not None and up is not None and down is not None
        gated = up.shape[1] != self.inner_features
        row = _activation(self.activation, [name for name, each in _BY_NAME.items() if each.gated == gated])
        options: dict[str, Any] = {name: getattr(self, name) for name in ("score_function", "groups", "top_groups", "scaling_factor")}
        options |= {} if self._router_dtype is None else {"weight_dtype": DType.Float32}
        sizes = "sizes_up", "sizes_down"
        yield ops.RouteTokens(router, self.top_k, self.normalized, expert_bias=self.tensor_of("expert_bias"), **options)
        yield ops.DispatchTokens(self.experts, self.top_k, sizes)
        yield ops.GroupedMMT(self.experts, [up]).with_(side_inputs=sizes[:1])
        yield getattr(ops, row.title)()
        yield ops.GroupedMMT(self.experts, [down]).with_(side_inputs=sizes[1:])
        yield ops.CombineTokens()

    def unstacked(self) -> dict[str, Any]:
        """See ``BaseModule``: ``up_weight0``, ``down_weight0`` and so on, views of what is one, is in high precision, and not shared out."""
        if type(self._parameters.get("up_weight")) is not nn.Parameter:
            return {}
        parameters, bound, methods = dict(self._parameters), list(self._bound), dict(self.init_methods)
        init = methods["router_weight"]
        for place, b in enumerate(self._bound):
            if not isinstance(b.op, ops.GroupedMMT):
                continue
            (name,) = b.parameters
            whole: Any = parameters.pop(name)
            each = {f"{name}{i}": nn.Parameter(part, whole.requires_grad) for i, part in enumerate(whole.detach())}
            product = ops.GroupedMMT(self.experts, [make_nvte_tensor(part) for part in each.values()]).with_(side_inputs=b.op.side_inputs)
            parameters, bound[place] = parameters | each, b._replace(op=product, parameters=tuple(each))
            methods = {key: method for key, method in methods.items() if key != name} | dict.fromkeys(each, init)
        return {"_parameters": parameters, "_ops": tuple(b.op for b in bound), "_bound": tuple(bound), "init_methods": methods}

    def expert_weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What each expert multiplies with: ``[inner, features]``, twice ``inner`` for a gated activation, and ``[features, inner]``."""
        if "up_weight" in self._parameters:
            return zip(self.up_weight, self.down_weight, strict=True)
        return ((self.get_parameter(f"up_weight{i}"), self.get_parameter(f"down_weight{i}")) for i in range(self.experts))

    def extra_repr(self) -> str:
        sizes = f"features={self.features}, inner_features={self.inner_features}"
        _, _, options = self._ops[0].extra_repr().partition("experts")
        return f"{sizes}, experts={self.experts}, top_k={self.top_k}, activation={self.activation!r}{options}"
