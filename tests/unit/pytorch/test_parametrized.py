"""Parameters that torch's parametrizations compute, torch.func, and torch.export: what is served is what plain torch gives, the rest says so."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize

from fusible import GELU, DelayedScaling, Float8CurrentScaling, LayerNorm, Linear, Sequential, autocast
from fusible.compat import te_modules as te
from fusible.errors import FusibleError, NotServedError
from fusible.pytorch import ops

WIDTH = 16
BOUND = 64 * WIDTH * torch.finfo(torch.float32).eps
WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
XLA = pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed")


def pair(wrap: Callable[..., nn.Module]) -> tuple[Sequential, nn.Sequential]:
    """A model of ours and the same of torch's, both parametrized."""
    torch.manual_seed(3)
    ours = Sequential(wrap(Linear(WIDTH, WIDTH)), GELU(), LayerNorm(WIDTH))
    theirs = nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.GELU(approximate="tanh"), nn.LayerNorm(WIDTH))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


WAYS: dict[str, Callable[[Sequential], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "compiled": lambda model: model.compile("xla"),
    "copy": copy.deepcopy,
    "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=XLA) if way == "compiled" else way for way in WAYS])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_parametrized_weight_trains_as_torchs_own_does(name: str, way: str) -> None:
    torch.compiler.reset()
    ours, theirs = pair(WRAPPERS[name])
    call = WAYS[way](ours)
    model = call if isinstance(call, Sequential) else ours
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, theirs)]
    for step in range(3):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        for m, f, optimizer in ((model, call, optimizers[0]), (theirs, theirs, optimizers[1])):
            optimizer.zero_grad()
            f(x).square().mean().backward()
            assert all(p.grad is not None for p in m.parameters())
            optimizer.step()
    for (own, a), (of, b) in zip(model.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert own == of and (a - b).abs().max() <= BOUND * max(1.0, b.abs().max().item()), own


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=2)], ids=["current", "delayed"])
def test_an_8_bit_product_reads_the_computed_weight_anew(recipe: Any) -> None:
    model = Sequential(parametrizations.weight_norm(Linear(32, 32, bias=False)))
    plain = Sequential(Linear(32, 32, bias=False))
    for step in range(3):
        with torch.no_grad():
            model[0].parametrizations.weight.original0.mul_(1.5)  # type: ignore[union-attr]
            plain[0].weight.copy_(model[0].weight)  # type: ignore[arg-type, operator, union-attr]
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
        with autocast(recipe=recipe):
            assert torch.equal(model(x), plain(x))


def test_it_comes_off_again_and_dictionaries_go_on() -> None:
    ours, _theirs = pair(parametrizations.weight_norm)
    x = torch.randn(3, WIDTH)
    y = ours(x)
    other, _ = pair(parametrizations.weight_norm)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x), y)
    parametrize.remove_parametrizations(ours[0], "weight")  # type: ignore[arg-type]
    assert torch.allclose(ours(x), y, rtol=0, atol=BOUND)
    assert set(ours.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_functional_call_takes_other_parameters_and_gives_their_gradients() -> None:
    model, x = Sequential(Linear(WIDTH, WIDTH), GELU()), torch.randn(3, WIDTH)
    other = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, other, (x,))
    grads = torch.autograd.grad(y.square().sum(), list(other.values()))
    leaves = [p.detach().double().requires_grad_() for p in other.values()]
    wanted = nn.functional.gelu(x.double() @ leaves[0].T + leaves[1], approximate="tanh")
    for found, right in zip(grads, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        assert (found.double() - right).abs().max() <= BOUND * max(1.0, right.abs().max().item())
    assert not any(torch.equal(p, other[name]) for name, p in model.named_parameters() if name.endswith("weight"))


def _dual(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


def _grad(model: nn.Module, x: Tensor) -> Any:
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))


TRANSFORMS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], type[FusibleError], str]] = {
    "grad": (_grad, NotServedError, "torch.func around Linear -> GELU: expected functional_call alone"),
    "vjp": (lambda m, x: torch.func.vjp(m, x), NotServedError, "torch.func .*: expected functional_call alone"),
    "jvp": (lambda m, x: torch.func.jvp(m, (x,), (x,)), NotServedError, "torch.func .*: expected functional_call alone"),
    "vmap": (lambda m, x: torch.func.vmap(m)(x[None]), NotServedError, "torch.func .*: expected functional_call alone"),
    "vmap without gradients": (
        lambda m, x: torch.no_grad()(torch.func.vmap(m))(x[None]),
        NotServedError,
        "torch.func .*: expected functional_call alone",
    ),
    "jacrev": (lambda m, x: torch.func.jacrev(m)(x), NotServedError, "torch.func around .*: expected functional_call alone"),
    "torch.jit.trace": (
        lambda m, x: torch.no_grad()(torch.jit.trace)(m, x),
        NotServedError,
        "a recording of Linear -> GELU: expected torch.compile or torch.export, got torch.jit.trace",
    ),
    "torch.jit.trace with gradients": (lambda m, x: torch.jit.trace(lambda x: m(x), x), NotServedError, "a recording of .* got torch.jit.trace"),
    "make_fx": (lambda m, x: make_fx(m)(x), NotServedError, "a recording of Linear -> GELU: expected torch.compile or torch.export, got make_fx"),
    "make_fx of fake tensors": (lambda m, x: make_fx(m, tracing_mode="fake")(x), NotServedError, "a recording of .* got make_fx"),
    "dual tensors": (_dual, NotServedError, "a call of Linear -> GELU: expected tensors without tangents"),
    "dual tensors without gradients": (torch.no_grad()(_dual), NotServedError, "a call of .*: expected tensors without tangents"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, of its derivatives in forward mode, too
@pytest.mark.parametrize("name", TRANSFORMS)
def test_other_transforms_say_what_to_do_instead(name: str) -> None:
    call, error, text = TRANSFORMS[name]
    with pytest.raises(error, match=text):
        call(Sequential(Linear(WIDTH, WIDTH), GELU()).eval(), torch.randn(3, WIDTH))


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


OPERATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "BasicLinear": (lambda: ops.BasicLinear(WIDTH, WIDTH), ("weight",)),
    "Bias": (lambda: ops.Bias(WIDTH), ("bias",)),
    "Linear": (lambda: ops.Linear(WIDTH, WIDTH), ("basic_ops.0.weight", "basic_ops.1.bias")),
    "LayerNorm": (lambda: ops.LayerNorm(WIDTH), ("weight", "bias")),
    "the first of two": (lambda: ops.LayerNorm(WIDTH), ("weight",)),
    "the second of two": (lambda: ops.LayerNorm(WIDTH), ("bias",)),
    "RMSNorm": (lambda: ops.RMSNorm(WIDTH), ("weight",)),
    "Sequential": (lambda: ops.Sequential(ops.LayerNorm(WIDTH), ops.BasicLinear(WIDTH, WIDTH)), ("0.bias", "1.weight")),
    "parts of a product": (lambda: te.Linear(WIDTH, WIDTH, parameters_split=("query", "key")), ("query_weight", "key_bias")),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_parameters_of_operations_and_parts_of_them_are_computed_as_well(case: str) -> None:
    make, names = OPERATIONS[case]
    torch.manual_seed(0)
    plain, x = make(), torch.randn(4, WIDTH)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn_like(p))
    computed = copy.deepcopy(plain)
    for name in names:
        owner, _, own = name.rpartition(".")
        with torch.no_grad():
            plain.get_parameter(name).mul_(2)
        parametrize.register_parametrization(computed.get_submodule(owner), own, Doubled())
    for model in (plain, computed):
        model(x).square().sum().backward()
    assert torch.equal(computed(x), plain(x))
    for name in names:
        owner, _, own = name.rpartition(".")
        original = getattr(computed.get_submodule(owner).parametrizations, own).original
        assert torch.equal(original.grad, 2 * plain.get_parameter(name).grad)  # type: ignore[operator]
