"""Layers are recognised by what they compute, and left where that is nothing of Fusible's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.models.convert.activation import find_activation, is_like_activation
from fusible.models.convert.norm import find_norm, is_like_norm


class Norm(nn.Module):
    """A user's own RMSNorm, one of whose details ``form`` names."""

    def __init__(self, form: str = "", features: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))
        self.variance_epsilon, self.form = 1e-5, form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        y = x / (mean.sqrt() + self.variance_epsilon) if self.form == "epsilon outside" else x * torch.rsqrt(mean + self.variance_epsilon)
        return {"": y * self.weight, "1 + weight": y * (1 + self.weight), "epsilon outside": y * self.weight, "exp": y * self.weight.exp()}[self.form]


class NoisyNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (torch.randn_like(x) if self.training else 0)


class NoisySwish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) + (torch.randn_like(x) if self.training else 0)


class GatedNorm(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.LayerNorm(8), "LayerNorm"),
        (nn.RMSNorm(8, eps=1e-6), "RMSNorm"),
        (Norm(), "RMSNorm"),
        (Norm(features=3), "RMSNorm"),
        (Norm("1 + weight"), "RMSNorm by 1 + weight"),
    ],
)
def test_norms_are_recognised_and_compute_the_same(module: Any, text: str) -> None:
    assert is_like_norm(module) and find_norm(module).text == text
    features = module.weight.shape[0]
    with torch.no_grad():
        module.weight.normal_()
    x: Any = torch.randn(2, 5, features, requires_grad=True)
    ours: Any = x.detach().clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    grad, module.weight.grad = module.weight.grad, None
    z = fusible.convert(module)(ours)
    z.square().sum().backward()
    for found, wanted in ((z, y), (ours.grad, x.grad), (module.weight.grad, grad)):
        assert found is not None and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Norm("epsilon outside"), "computes neither"),
        (Norm("exp"), "computes neither"),
        (GatedNorm(), "takes more than one tensor"),
        (NoisyNorm(), "otherwise in training"),
        (nn.BatchNorm1d(8), "keeps statistics"),
        (nn.GroupNorm(1, 8), "no layer normalization"),
        (nn.LayerNorm([4, 8]), "other parameters"),
        (nn.RMSNorm(8), "says no epsilon"),
        (nn.LayerNorm(8, bias=False), "computes neither"),
        (nn.LayerNorm(8, dtype=torch.complex64), "is in complex64"),
    ],
)
def test_other_norms_are_left_with_the_reason(module: nn.Module, why: str) -> None:
    former = type(module)
    assert is_like_norm(module)
    fusible.convert(module)
    (layer,) = fusible.conversion_report(module).left
    assert why in layer.text and type(module) is former


def test_a_norm_in_another_precision_than_its_input_is_that_of_its_class() -> None:
    module, x = Norm("1 + weight"), torch.randn(3, 8, dtype=torch.bfloat16)
    y = module(x)
    assert torch.equal(fusible.convert(module)(x), y) and y.dtype is torch.float32


class NewGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.ReLU(), "relu"),
        (nn.GELU(approximate="tanh"), "gelu"),
        (NewGELU(), "gelu"),
        (nn.GELU(), "erf_gelu"),
        (nn.ReLU6(), ""),
        (NoisySwish().eval(), ""),
    ],
)
def test_activations_are_recognised_by_their_values(module: nn.Module, name: str) -> None:
    assert is_like_activation(module) and find_activation(module) == name
    x = torch.randn(4, 3, 8)
    y = module(x)
    assert torch.allclose(fusible.convert(module)(x), y, rtol=1e-5, atol=1e-6)
    # Those that torch computes by one kernel are Fusible's with the products around them alone.
    assert len(fusible.conversion_report(module).converted) == isinstance(module, NewGELU)


def test_a_layer_is_tried_on_the_cpu_whatever_the_defaults_are() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            module = Norm()
            assert find_norm(module).text == "RMSNorm" and find_activation(nn.SiLU()) == "silu"
    finally:
        torch.set_default_dtype(torch.float32)


def test_trying_a_layer_leaves_it_and_the_random_state_alone() -> None:
    class Noisy(Norm):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) + 0 * torch.rand(1)

    module, before = Noisy(), torch.get_rng_state()
    module.register_forward_hook(lambda *_: pytest.fail("its hooks are the user's"))
    weight = module.weight
    assert find_norm(module).text == "RMSNorm"
    assert module.calls == 0 and module.weight is weight and torch.equal(torch.get_rng_state(), before)


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Own(8, 8), "a forward of its own"),
        (parametrized, "computed from other parameters"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), "is in complex64"),
        (lambda: nn.LazyLinear(8), "is a UninitializedParameter"),
    ],
)
def test_other_linear_layers_are_left_with_the_reason(make: Any, why: str) -> None:
    module = make()
    fusible.convert(module, fusible.DelayedScaling())
    assert [layer.text for layer in fusible.conversion_report(module).left if why in layer.text]
    assert not fusible.conversion_report(module).converted


def test_a_subclass_that_computes_as_its_base_is_converted() -> None:
    class Named(nn.Linear):
        pass

    module = fusible.convert(Named(8, 8), fusible.Float8CurrentScaling())
    assert isinstance(module, Named) and type(module).__name__ == "FusibleNamed"
    assert module(torch.randn(8)).shape == (8,) and module(torch.randn(2, 3, 4, 8)).shape == (2, 3, 4, 8)
