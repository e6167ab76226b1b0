"""What a model keeps when it is copied, saved and loaded; and what a damaged checkpoint does not do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fusible import GELU, DelayedScaling, Float8CurrentScaling, LayerNorm, Linear, Recipe, Residual, Sequential, autocast
from fusible.errors import CheckpointError

WIDTH = 8
RECIPE = DelayedScaling(amax_history_len=3)


def block(seed: int = 1) -> Sequential:
    torch.manual_seed(seed)
    return Sequential(Residual(LayerNorm(WIDTH), Linear(WIDTH, 12), GELU(), Linear(12, WIDTH)), nn.Tanh(), Linear(WIDTH, WIDTH))


def train(model: nn.Module, steps: int, seed: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, WIDTH, generator=generator)
        with autocast(recipe=RECIPE):
            loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _by_safetensors(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    safetensors.torch.save_file(state, path / "model.safetensors")
    return safetensors.torch.load_file(path / "model.safetensors")


def _by_torch(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    torch.save(state, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=True)


def _by_nothing(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    return state


SAVERS = [pytest.param(save, id=save.__name__.removeprefix("_by_")) for save in (_by_safetensors, _by_torch, _by_nothing)]
Saver = Callable[[dict[str, Tensor], Path], dict[str, Tensor]]


@pytest.mark.parametrize("save", SAVERS)
def test_training_goes_on_from_a_checkpoint(save: Saver, tmp_path: Path) -> None:
    """Ten steps at a stretch, and ten with a checkpoint loaded into a fresh model after five: the same losses, weights and scales."""
    straight = block()
    losses = train(straight, 5, 3) + train(straight, 5, 4)
    first = block()
    before = train(first, 5, 3)
    state = save(first.state_dict(), tmp_path)
    second = block(seed=2)
    assert str(second.load_state_dict(state)) == "<All keys matched successfully>"
    assert before + train(second, 5, 4) == losses
    assert same(everything(straight), everything(second))


def test_the_keys_of_a_state_dict() -> None:
    model = block()
    plain = ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "0.3.weight", "0.3.bias", "2.weight", "2.bias"]
    assert list(model.state_dict()) == plain
    train(model, 1)
    saved = model.state_dict()
    extra = [name for name in saved if name not in plain]
    assert len(extra) == 2 and all(name.startswith("scaling_state.") and saved[name].dtype is torch.uint8 for name in extra)


def test_a_model_inside_a_foreign_module(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"net": block(seed)})["net"], nn.Identity())

    torch.manual_seed(0)
    first = make(1)
    train(first, 3)
    second = make(2)
    assert not second.load_state_dict(_by_safetensors(first.state_dict(), tmp_path)).unexpected_keys
    assert same(everything(first), everything(second)) and train(first, 3, 5) == train(second, 3, 5)


def test_a_checkpoint_without_scaling_state_says_so() -> None:
    """A model that has scales refuses it; where less is allowed, the names are told, and the scales are kept until they are reset."""
    model = block()
    plain = everything(model)
    train(model, 2)
    before = everything(model)
    scaling = [name for name in before if "scaling" in name]
    with pytest.raises(CheckpointError, match=r"^.*: expected its scaling state, got one without 'scaling_state.0'; load it with strict=False .*\.$"):
        model.load_state_dict(plain)
    assert same(everything(model), before)
    assert model.load_state_dict(plain, strict=False).missing_keys == scaling
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in scaling)
    model.reset_scaling_state()
    assert list(model.state_dict()) == list(plain)
    assert train(model, 2, 5) == train(block(), 2, 5)


def test_deepcopy_keeps_parameters_and_scales_apart() -> None:
    model = block()
    train(model, 3)
    twin = copy.deepcopy(model)
    assert same(everything(model), everything(twin))
    before = everything(twin)
    losses = train(model, 3, 5)
    assert same(everything(twin), before)
    assert train(twin, 3, 5) == losses and same(everything(model), everything(twin))


def test_deepcopy_of_a_model_whose_hooks_have_come_and_gone() -> None:
    """State belongs to a place in the model, not to the order in which pipelines were made."""
    model = Sequential(Linear(WIDTH, WIDTH), GELU(), Linear(WIDTH, WIDTH))
    handle = model[1].register_forward_hook(lambda *args: None)
    train(model, 2)
    handle.remove()
    train(model, 3)
    twin = copy.deepcopy(model)
    assert train(twin, 3, 5) == train(model, 3, 5)
    fresh = Sequential(Linear(WIDTH, WIDTH), GELU(), Linear(WIDTH, WIDTH))
    fresh.load_state_dict(model.state_dict())
    assert train(fresh, 3, 6) == train(model, 3, 6)


def test_a_copy_is_saved_before_its_first_call() -> None:
    """The state of a copy, and of a model that was loaded, is there before anything is called."""
    model = block()
    train(model, 3)
    twin = copy.deepcopy(model)
    loaded = block(seed=2)
    loaded.load_state_dict(twin.state_dict())
    assert same(everything(loaded), everything(model))
    assert same(everything(copy.deepcopy(twin)), everything(model))


def test_copies_share_no_executor_and_no_plan() -> None:
    model = block()
    train(model, 1)
    twin = copy.deepcopy(model)
    train(twin, 1)
    mine, theirs = ({id(plan) for runner in m._runners.values() for plan in runner._plans.values()} for m in (model, twin))
    assert mine and theirs and not mine & theirs


def _damaged(saved: Tensor, how: str) -> Tensor:
    data = saved.clone()
    if how == "truncated":
        return data[: len(data) // 2]
    if how == "empty":
        return data[:0]
    if how == "zeros":
        return torch.zeros_like(data)
    if how == "floats":
        return data.float()
    if how == "header":
        data[:8] = 255
        return data
    tensors = safetensors.torch.load(bytes(data.numpy()))
    if how == "fewer scales":
        tensors["forward.scale"] = tensors["forward.scale"][:1]
    elif how == "a missing tensor":
        del tensors["backward.scale"]
    elif how == "another format":
        tensors["forward.fp8_dtype"] = torch.tensor([99])
    elif how == "no window":
        tensors["forward.amax_history"] = tensors["forward.amax_history"][:0]
    elif how == "integer scales":
        tensors["forward.scale"] = tensors["forward.scale"].to(torch.int32)
    elif how == "a scale that is not finite":
        tensors["forward.scale"][0] = float("nan")
    elif how == "a scale of zero":
        tensors["backward.scale"][0] = 0.0
    elif how == "an amax that is not finite":
        tensors["forward.amax_history"][0, 0] = float("inf")
    elif how == "a scalar":
        tensors["forward.scale"] = torch.tensor(1.0)
    elif how == "two formats":
        tensors["forward.fp8_dtype"] = torch.tensor([7, 8])
    else:
        raise AssertionError(how)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


DAMAGES = (
    "truncated", "empty", "zeros", "floats", "header", "fewer scales", "a missing tensor", "another format", "no window", "integer scales",
    "a scale that is not finite", "a scale of zero", "an amax that is not finite", "a scalar", "two formats",
)  # fmt: skip


@pytest.mark.parametrize("place", [0, 1], ids=["first state", "second state"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_scaling_state_changes_nothing(how: str, place: int) -> None:
    """One error, before any parameter or scale is written."""
    model, other = block(), block(seed=2)
    train(model, 3)
    train(other, 3, 9)
    state, before = other.state_dict(), everything(model)
    name = [name for name in state if "scaling" in name][place]
    state[name] = _damaged(state[name], how)
    with pytest.raises(CheckpointError, match=r"^.*: expected .*, got .*; .*\.$"):
        model.load_state_dict(state)
    assert same(everything(model), before)
    train(model, 1)


def test_any_changed_byte_is_an_error_or_a_usable_state() -> None:
    model = block()
    train(model, 3)
    state = model.state_dict()
    name = next(name for name in state if "scaling" in name)
    random.seed(1)
    for _ in range(200):
        damaged = dict(state)
        damaged[name] = state[name].clone()
        for _ in range(random.choice((1, 1, 2, 8))):
            damaged[name][random.randrange(len(state[name]))] = random.randrange(256)
        fresh = block()
        try:
            fresh.load_state_dict(damaged)
        except CheckpointError:
            continue
        current = next(runner.scaling.current for runner in fresh._runners.values() if runner.scaling.current is not None)
        for part in (current.forward, current.backward):
            assert part.scale.isfinite().all() and (part.scale > 0).all() and part.amax_history.isfinite().all()


def test_the_state_of_another_model_is_refused() -> None:
    small = Sequential(Linear(WIDTH, WIDTH))
    large = Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH))
    for model in (small, large):
        train(model, 1)
    before = everything(small)
    state = {**small.state_dict(), **{name: value for name, value in large.state_dict().items() if "scaling" in name}}
    with pytest.raises(CheckpointError, match="a saved scaling state: expected 2 forward scales, got 4; load it into the model it was saved from."):
        small.load_state_dict(state)
    two = block()
    train(two, 1)
    state = {**small.state_dict(), **{name: value for name, value in two.state_dict().items() if "scaling" in name}}
    with pytest.raises(CheckpointError, match=": expected "):
        small.load_state_dict(state)
    assert same(everything(small), before)


def test_recipes_may_change_after_loading() -> None:
    model = block()
    train(model, 3)
    loaded = block()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(5, WIDTH)
    for recipe in (DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=9), Float8CurrentScaling()):
        with autocast(recipe=recipe):
            assert torch.equal(loaded(x), model(x))


QUANTIZES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "activations": (lambda: Sequential(GELU(), LayerNorm(WIDTH), GELU()), False),
    "a product": (lambda: Linear(WIDTH, WIDTH), True),
    "a product among others": (lambda: Sequential(GELU(), Linear(WIDTH, WIDTH)), True),
}


@pytest.mark.parametrize("name", QUANTIZES)
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()], ids=str)
def test_only_what_is_scaled_by_what_was_seen_has_a_scaling_state(name: str, recipe: Recipe | None) -> None:
    make, quantizes = QUANTIZES[name]
    model, x = make(), torch.randn(8, WIDTH)
    for grad in (False, True, True):
        with autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(grad):
            y = model(x.requires_grad_(grad))
        if grad:
            y.sum().backward()
        there = any("scaling_state" in key for key in model.state_dict())
        assert there == (quantizes and isinstance(recipe, DelayedScaling) and grad)


def test_a_torch_whose_loads_cannot_be_seen_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling states find their places by a function of torch that is not public: without it they must not be left out in silence."""
    monkeypatch.delattr("torch.distributed.checkpoint.state_dict._load_model_state_dict")
    with pytest.warns(RuntimeWarning, match="may leave scaling states out"):
        list(Linear(16, 16).named_buffers(recurse=False))
