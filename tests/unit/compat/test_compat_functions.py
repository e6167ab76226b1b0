"""What stands beside the modules by NVIDIA's names: offloading, optimizers; and modules that are made without memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusible.compat import te_functions, te_modules
from fusible.errors import ArgumentError

WIDTH = 32


class Marked(torch.autograd.Function):
    """The identity, which saves a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        own = x.clone()
        kept.append(weakref.ref(own))
        ctx.save_for_backward(own)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors
        return grads[0], None


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_was_offloaded_goes_with_its_backward(by_hand: bool) -> None:
    """Layer by layer, as without offloading: nothing waits for the next pass."""
    layers, kept = 3, list[Any]()
    context, synchronize, *controller = te_functions.get_cpu_offload_context(True, 1, layers, manual_synchronization=by_hand)
    leaf = x = torch.ones(4, 4, requires_grad=True)
    ends = []
    for i in range(layers):
        with context:
            x = Marked.apply(x, kept)
        x = synchronize(x)
        ends.append(x)
        if controller:
            controller[0].start_offload_layer(i)
    assert all(each() is not None for each in kept)
    grad = torch.ones(4, 4)
    for i in reversed(range(layers)):
        if controller:
            controller[0].start_reload_layer(i)
        (grad,) = torch.autograd.grad(ends.pop(), ends[-1] if ends else leaf, grad)
        gc.collect()
        assert [each() is not None for each in kept] == [True] * i + [False] * (layers - i)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdam": te_functions.FusedAdam,
    "FusedSGD": lambda *a, **k: te_functions.FusedSGD(*a, lr=0.1, **k),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "made": lambda optimizer: optimizer,
    "copied": copy.deepcopy,
    "pickled": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.filterwarnings("ignore:set_grad_none is called")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("former", [None, True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_gradients_are_none_or_zero_as_was_asked(name: str, way: str, former: bool | None, asked: bool | None) -> None:
    """By the constructor, or by ``zero_grad``, which says the same or raises; None where neither says."""
    made = OPTIMIZERS[name]([nn.Parameter(torch.ones(4))], set_grad_none=former)
    optimizer = WAYS[way](made)
    (parameter,) = optimizer.param_groups[0]["params"]
    grad = parameter.grad = torch.ones(4)
    if None not in (former, asked) and former is not asked:
        with pytest.raises(ArgumentError, match="set_to_none of Fused"):
            optimizer.zero_grad(set_to_none=asked)
        assert parameter.grad is grad and grad.all()
        return
    optimizer.zero_grad() if asked is None else optimizer.zero_grad(set_to_none=asked)
    if next((each for each in (asked, former) if each is not None), True):
        assert parameter.grad is None
    else:
        assert parameter.grad is grad and not grad.any()


@pytest.mark.parametrize(("name", "option"), [("FusedAdam", "capturable"), ("FusedSGD", "materialize_master_grads")])
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_keeps_its_options(name: str, option: str, way: str) -> None:
    for value in (False, True):
        assert getattr(WAYS[way](OPTIMIZERS[name]([nn.Parameter(torch.ones(4))], **{option: value})), option) is value


def test_a_state_begins_as_it_is_asked_to() -> None:
    """As Megatron begins what it will load, and reads what is held in bf16 as it is."""
    p, bf16 = nn.Parameter(torch.randn(8).bfloat16()), torch.bfloat16
    optimizer = te_functions.FusedAdam([p], master_weights=True, exp_avg_dtype=bf16, exp_avg_sq_dtype=torch.uint8, store_param_remainders=True)
    with pytest.raises(ArgumentError, match="store_param_remainders of initialize_state: expected True, got False"):
        optimizer.initialize_state(p, False)
    assert not optimizer.state
    optimizer.initialize_state(p, True)
    assert {name: value.dtype for name, value in optimizer.state[p].items()} == {
        "exp_avg": bf16, "exp_avg_sq": torch.uint8, "master_param": torch.int16,
    }  # fmt: skip
    assert optimizer.get_unscaled_state(p, "exp_avg", skip_unscale=True).dtype is bf16
    assert optimizer.get_unscaled_state(p, "exp_avg").dtype is optimizer.get_unscaled_state(p, "exp_avg_sq", skip_unscale=True).dtype is torch.float32
    assert (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype, optimizer.master_weight_dtype) == (bf16, torch.uint8, torch.float32)
    assert optimizer.store_param_remainders


LAYER: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda: te_modules.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: te_modules.LayerNormLinear(WIDTH, WIDTH, bias=False),
    "LayerNormMLP": lambda: te_modules.LayerNormMLP(WIDTH, WIDTH, activation="swiglu"),
    "RMSNorm": lambda: te_modules.RMSNorm(WIDTH),
    **{
        f"TransformerLayer, {kind}": lambda kind=kind: te_modules.TransformerLayer(WIDTH, WIDTH, 4, softmax_type=kind, **LAYER)
        for kind in ("vanilla", "off-by-one", "learnable")
    },
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_was_made_on_meta_computes_like_another(name: str) -> None:
    """Made within torch's context of the device, given memory, and filled by a state dict."""
    torch.manual_seed(0)
    wanted, x = MODULES[name](), torch.randn(6, 2, WIDTH)
    with torch.device("meta"):
        module = MODULES[name]()
    module.to_empty(device="cpu")
    module.load_state_dict(wanted.state_dict())
    assert torch.equal(module(x), wanted(x))
