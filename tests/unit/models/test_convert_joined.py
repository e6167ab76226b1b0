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
from torch.utils.checkpoint import checkpoint

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


def gradients(module: Any, x: torch.Tensor, of: nn.Module | None = None) -> list[torch.Tensor]:
    """Of a call, to x and to the parameters of the module, or of another one."""
    x = x.clone().requires_grad_()
    y = module(x)
    parameters = list((module if of is None else of).parameters())
    for parameter in parameters:
        parameter.grad = None
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in parameters)]  # type: ignore[list-item]  # pyright: ignore


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


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of joint products, as they are made."""
    inputs: list[Any] = []
    joined = ConvertedAttention.joined
    monkeypatch.setattr(ConvertedAttention, "joined", lambda self, x: inputs.append(x) or joined(self, x))
    return inputs


def test_layers_of_different_inputs_compute_by_themselves(joint: list[Any]) -> None:
    module, x, context = converted(Attention()), torch.randn(2, 8, WIDTH), torch.randn(2, 8, WIDTH)
    other = one_by_one(module)
    for arguments, named in (((x, context), {}), ((x,), {"context": context}), ((), {"x": x, "context": context})):
        assert torch.equal(module(*arguments, **named), other(x, context))
    assert not joint
    for arguments in ((x,), (x, None), (x, x)):
        assert torch.allclose(module(*arguments), other(x), atol=1e-5)
    assert len(joint) == 3


class Reduced(Attention):
    """As Segformer's: keys and values are of fewer rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        fewer = x[:, ::2]
        return torch.cat([self.q_proj(x), self.k_proj(fewer).repeat(1, 2, 1), self.v_proj(fewer).repeat(1, 2, 1)], -1)


class Placed(Attention):
    """As DETR's: values have no positions."""

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        placed = x if places is None else x + places
        return torch.cat([self.q_proj(placed), self.k_proj(placed), self.v_proj(x)], -1)


class Told(Attention):
    """As SAM's, to which all three are given."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([self.q_proj(query), self.k_proj(key), self.v_proj(value)], -1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Attention, "q_proj, k_proj, v_proj as one product, but with context"),
        (Reduced, None),
        (Placed, "q_proj, k_proj, v_proj as one product, but with places"),
        (Told, "q_proj, k_proj, v_proj as one product, but with key or value"),
    ],
)
def test_which_inputs_projections_read_is_found_by_trying(make: Any, text: str | None, joint: list[Any]) -> None:
    module, x, y = converted(make()), torch.randn(2, 8, WIDTH), torch.randn(2, 8, WIDTH)
    assert [layer.text for layer in fusible.conversion_report(module).converted if layer.kind == "projection"] == ([text] if text else [])
    other = one_by_one(module)
    alone, apart = ((x, x, x), (x, y, y)) if make is Told else ((x,), (x, y))
    if make is not Reduced:
        assert torch.equal(module(*apart), other(*apart)) and not joint
    assert torch.allclose(module(*alone), other(*alone), atol=1e-5)
    assert len(joint) == (text is not None)


@torch.no_grad()
def test_a_layer_that_is_called_by_itself_gives_what_it_alone_computes(joint: list[Any]) -> None:
    module, x = converted(Attention()), torch.randn(2, 8, WIDTH)
    other = one_by_one(module)
    module.q_proj(x)
    for changed in (module, other):
        changed.k_proj.weight.mul_(3)
        changed.v_proj.bias.add_(1)
    assert torch.equal(module.k_proj(x), other.k_proj(x)) and torch.equal(module.v_proj(x), other.v_proj(x))
    x.mul_(2)
    assert torch.equal(module.k_proj(x), other.k_proj(x)) and not joint


class Writing(Attention):
    """That writes to what it has, between its calls."""

    written = "x"

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q = self.q_proj(x)
        (x if self.written == "x" else self.get_parameter(self.written)).add_(1)
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


@torch.no_grad()
@pytest.mark.parametrize("written", ["x", "k_proj.weight", "v_proj.bias"])
def test_what_is_written_to_in_a_call_is_read_again(written: str, joint: list[Any]) -> None:
    module, x = converted(Writing()), torch.randn(2, 8, WIDTH)
    module.written = written
    other = one_by_one(module)
    assert torch.allclose(module(x.clone()), other(x.clone()), atol=1e-5)
    assert len(joint) == 1


@torch.no_grad()
def test_a_hook_that_writes_to_its_layer_before_the_call_is_seen() -> None:
    module, x = converted(Attention()), torch.randn(2, 8, WIDTH)

    def clear(layer: Any, _: Any) -> None:
        layer.weight.data.zero_()

    module.k_proj.register_forward_pre_hook(clear)
    assert not module(x)[..., 64:96].any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["of one input", "of two"])
@pytest.mark.parametrize("recipe", [fusible.Float8CurrentScaling(), fusible.HighPrecision("float32")], ids=str)
def test_a_repeated_forward_takes_the_path_of_the_first(recipe: fusible.Recipe, apart: bool, reentrant: bool) -> None:
    plain, x = converted(Attention(), recipe), torch.randn(2, 8, WIDTH)
    repeated, context = copy.deepcopy(plain), torch.randn(2, 8, WIDTH) if apart else None
    for _ in range(3):
        wanted = gradients(lambda x: plain(x, context), x, plain)
        found = gradients(lambda x: checkpoint(repeated, x, context, use_reentrant=reentrant), x, repeated)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Partly(Attention):
    """Whose forward is repeated in part."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_of_a_call_that_is_repeated_takes_the_path_of_the_first(reentrant: bool) -> None:
    module, x = converted(Partly(), fusible.Float8CurrentScaling()), torch.randn(2, 8, WIDTH)
    module.reentrant = reentrant
    wanted = gradients(one_by_one(module), x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(module, x), wanted, strict=True))


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
    assert torch.allclose(module(x), wanted, atol=1e-5)


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


@pytest.mark.parametrize("make", [Attention, Gated, lambda: Gated(bias=True)], ids=["attention", "one bias", "biases"])
@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), fusible.Float8CurrentScaling()], ids=str)
def test_an_exported_program_has_a_zero_for_a_bias_that_one_of_them_lacks(make: Any, recipe: fusible.Recipe) -> None:
    torch.manual_seed(0)
    model, x = converted(nn.Sequential(make()), recipe), torch.randn(3, 8, WIDTH)
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        wanted, found = model(x), fusible.export_program(model, x).module()(x)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()
