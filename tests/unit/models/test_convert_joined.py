"""Layers that compute together: weights that are one in memory, MLPs as one pipeline, and queries, keys and values as one product."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fusible
from fusible.models.convert.attention import ConvertedAttention
from fusible.models.convert.joining import is_joined, pack
from fusible.models.convert.mlp import ConvertedMLP

BLOCKS = fusible.MXFP8BlockScaling()  # each row's blocks have scales of their own, so that rows of one product are those of two
WIDTH, INNER = 32, 64


class Gated(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER)
        self.act, self.dropout = nn.SiLU(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(self.up(x) * self.act(self.gate(x))))


class Plain(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.act(self.one(x)))


class Chunked(Plain):
    def __init__(self) -> None:
        super().__init__(nn.ReLU())
        self.one = nn.Linear(WIDTH, 2 * INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.one(x).chunk(2, -1)
        return self.two(self.act(gate) * up)


class Residual(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Reversed(Chunked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.one(x).chunk(2, -1)
        return self.two(self.act(gate) * up)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        context = x if context is None else context
        return torch.cat([self.q_proj(x), self.k_proj(context).tanh(), self.v_proj(context)], -1)


def converted(module: Any, recipe: fusible.Recipe | None = BLOCKS) -> Any:
    return fusible.convert(module, recipe, keep_high_precision=())


def one_by_one(module: Any) -> Any:
    """The same where a hook keeps layers from being computed together."""
    other = copy.deepcopy(module)
    for child in other.children():
        child.register_forward_hook(lambda *_: None)
        vars(child)["_group"] = None
    return other


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in module.parameters())]  # type: ignore[list-item]  # pyright: ignore


def check_alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Within the rounding of sums in another order, and of dy once more to 8 bits where a joined one is summed before."""
    assert torch.allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert (a - b).norm() <= 2.0**-4 * b.norm()


def test_packed_parameters_stay_themselves_and_lie_behind_one_another() -> None:
    parameters = [nn.Parameter(torch.randn(rows, 8)) for rows in (4, 2, 6)]
    values = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    assert not is_joined(parameters) and pack(parameters) and is_joined(parameters)
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert is_joined(parameters) and torch.equal(parameters[1], values[1] - 1)
    parameters[1].data = parameters[1].detach().clone()
    assert not is_joined(parameters)


@pytest.mark.parametrize(
    "second",
    [
        nn.Parameter(torch.zeros(2, 8, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2, 4)),
        nn.Parameter(torch.zeros(2, 8, device="meta")),
        torch.zeros(2, 8),
        None,
        nn.Parameter(torch.zeros(2, 8).share_memory_()),
    ],
)
def test_parameters_that_cannot_be_one_are_left(second: Any) -> None:
    first = nn.Parameter(torch.randn(4, 8))
    memory = first.data_ptr()
    assert not pack([first, second]) and first.data_ptr() == memory
    assert not pack([first, first])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Gated, "gate and up as one -> swiglu -> down"),
        (lambda: Gated(bias=True), "gate and up as one -> swiglu -> down"),
        (lambda: Plain(nn.GELU(approximate="tanh")), "one -> gelu -> two"),
        (lambda: Plain(nn.GELU()), "one -> erf_gelu -> two"),
        (Chunked, "one -> reglu -> two"),
    ],
)
def test_mlps_are_recognised_and_give_what_their_layers_give(make: Any, text: str) -> None:
    module, x = converted(make()).eval(), torch.randn(64, WIDTH)
    assert [layer.text for layer in fusible.conversion_report(module).converted if layer.kind == "MLP"] == [text]
    assert isinstance(module, ConvertedMLP) and module._is_whole()
    other = one_by_one(module)
    assert not other._is_whole()
    check_alike(gradients(module, x), gradients(other, x))


@pytest.mark.parametrize("make", [lambda: Plain(nn.ReLU6()), lambda: Residual(nn.ReLU()), Reversed])
def test_what_computes_otherwise_is_no_mlp(make: Any) -> None:
    module = make()
    x = torch.randn(4, WIDTH)
    y = module(x)
    assert not isinstance(converted(module, None), ConvertedMLP)
    assert torch.allclose(module(x), y, atol=1e-5)


def test_an_mlp_drops_out_in_training_as_its_class_does() -> None:
    module, x = converted(Gated()), torch.randn(64, WIDTH)
    assert not module.train()._is_whole()
    torch.manual_seed(0)
    first = module(x)
    assert not torch.equal(first, module(x))
    assert torch.equal(module.eval()(x), module(x))


def test_a_layer_in_the_place_of_another_is_called() -> None:
    module, x = converted(Plain(nn.ReLU())), torch.randn(4, WIDTH)
    module.two = nn.Linear(INNER, 3)
    assert module(x).shape == (4, 3)


def test_forwards_that_somebody_exchanged_are_called() -> None:
    late, early, x = converted(Plain(nn.ReLU())), Plain(nn.ReLU()), torch.randn(4, WIDTH)
    for module in (late, early):
        vars(module.two)["forward"] = lambda y: y.sum(-1)  # as accelerate does, by an attribute
    assert late(x).shape == (4,)
    fusible.convert(early, BLOCKS, keep_high_precision=())
    assert early(x).shape == (4,) and type(early) is Plain
    assert [layer.name for layer in fusible.conversion_report(early).left if "exchanged" in layer.text] == ["two"]


def test_undo_is_refused_where_a_class_has_been_exchanged_since() -> None:
    module = converted(Plain(nn.ReLU()))
    nn.utils.parametrizations.weight_norm(module.one)
    y = module(torch.ones(4, WIDTH))
    with pytest.raises(fusible.errors.ArgumentError, match="take parametrizations and the like off first"):
        fusible.convert(module, undo=True)
    assert torch.equal(module(torch.ones(4, WIDTH)), y)


def test_queries_keys_and_values_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = converted(Attention()), torch.randn(2, 8, WIDTH)
    other = one_by_one(module)
    calls: list[Any] = []
    joined = ConvertedAttention.joined
    monkeypatch.setattr(ConvertedAttention, "joined", lambda self, x: calls.append(x) or joined(self, x))
    check_alike(gradients(module, x), gradients(other, x))
    assert len(calls) == 1
    with torch.no_grad():
        assert torch.allclose(module(x), other(x), atol=1e-5)
    assert len(calls) == 2


def test_layers_of_different_inputs_compute_by_themselves_after_a_while() -> None:
    module, x, context = converted(Attention()), torch.randn(2, 8, WIDTH), torch.randn(2, 8, WIDTH)
    other = one_by_one(module)
    for _ in range(3):
        assert torch.allclose(module(x, context), other(x, context), atol=1e-5)
    assert not module.q_proj._group.together
    assert torch.allclose(module(x), other(x), atol=1e-5)


@torch.no_grad()
def test_an_input_that_was_written_to_is_another_one() -> None:
    module, x = converted(Attention()), torch.randn(2, 8, WIDTH)
    other = one_by_one(module)
    module.q_proj(x)
    x.mul_(2)
    assert torch.allclose(module.k_proj(x), other.k_proj(x), atol=1e-5)


@torch.no_grad()
def test_a_call_that_failed_half_way_and_other_threads_do_no_harm() -> None:
    module, x = converted(Attention()), torch.randn(2, 8, WIDTH)
    wanted = one_by_one(module)(x)
    module.q_proj(x)  # and an error
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(module(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.allclose(y, wanted, atol=1e-5) for y in found)
    assert torch.allclose(module(x), wanted, atol=1e-5) and module.q_proj._group.together


@pytest.mark.parametrize("change", [copy.deepcopy, lambda module: module.bfloat16().float(), lambda module: module.share_memory()])
def test_what_tears_weights_apart_joins_them_again(change: Any) -> None:
    for module, names in ((converted(Attention()), ("q_proj", "k_proj", "v_proj")), (converted(Gated()), ("gate", "up"))):
        changed = change(module)
        assert is_joined([changed.get_parameter(f"{name}.weight") for name in names])
        assert changed(torch.randn(4, WIDTH)).shape[0] == 4


def test_a_copied_layer_goes_alone() -> None:
    module = converted(Attention())
    alone = copy.deepcopy(module.q_proj)
    assert alone._group is None and module.q_proj._group is not None
    assert torch.allclose(alone(torch.ones(4, WIDTH)), module.q_proj(torch.ones(4, WIDTH)), atol=1e-5)


def test_joined_weights_are_saved_each_by_itself(tmp_path: Path) -> None:
    module = converted(Attention())
    safetensors.torch.save_file(module.state_dict(), tmp_path / "weights.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, loaded[name]) for name, value in module.state_dict().items()) and len(loaded) == 5
    module.load_state_dict({name: value * 2 for name, value in loaded.items()})
    assert is_joined([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
    fresh = Attention()
    fresh.load_state_dict(module.state_dict())
    assert torch.allclose(converted(fresh)(torch.ones(4, WIDTH)), module(torch.ones(4, WIDTH)))


def test_undo_gives_the_blocks_back() -> None:
    for made in (Attention(), Gated()):
        module = converted(made)
        module(torch.randn(4, WIDTH))
        fusible.convert(module, undo=True)
        assert type(module) in (Attention, Gated) and not [name for name in vars(module) if "fusible" in name]
        assert all("_group" not in vars(child) and type(child).__name__[:7] != "Fusible" for child in module.children())
