"""Delayed scaling over many iterations against an independent simulation in float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fusible import DelayedScaling, Format, Linear, autocast
from fusible.compute_pipeline import StateLayout
from fusible.errors import CheckpointError
from fusible.locks import Lock
from fusible.pytorch.engine.scaling import ScalingOwner
from fusible.quantized import FP8_MAX, ScalingState
from fusible.tex import DType

FLT_MAX = float(np.finfo(np.float32).max)
CPU = torch.device("cpu")
E4M3 = DType.kFloat8E4M3


class Simulation:
    """One tensor's scale under delayed scaling, by lists of Python floats: ``past`` holds the closed iterations, the latest last."""

    def __init__(self, fp8_max: float, window: int, margin: float, rule: str | Callable[[list[float]], float]) -> None:
        self.fp8_max, self.window, self.margin, self.rule = fp8_max, window, margin, rule
        self.past: list[float] = [0.0] * (window - 1)
        self.running = 0.0
        self.scale = 1.0

    def observe(self, amax: float) -> None:
        if math.isfinite(amax):
            self.running = max(self.running, amax)

    def advance(self) -> None:
        if self.running == 0:
            return
        seen = [self.running, *self.past]
        amax = self.running if self.rule == "most_recent" else max(seen) if self.rule == "max" else self.rule(seen)  # type: ignore[operator]
        if amax > 0:
            self.scale = min(self.fp8_max * 2.0**-self.margin / amax, FLT_MAX)
        self.past = [*self.past, self.running][1:] if self.window > 1 else []
        self.running = 0.0

    def resize(self, window: int) -> None:
        kept = self.past[max(0, len(self.past) - (window - 1)) :]
        self.past = [0.0] * (window - 1 - len(kept)) + kept
        self.window = window


def _agree(state: ScalingState, simulations: list[Simulation]) -> None:
    # The scale is one division in fp32: half an ulp.
    wanted = np.array([s.scale for s in simulations])
    assert np.abs(state.scale.double().numpy() / wanted - 1).max() <= 2.0**-24 * 1.001
    for column, simulation in enumerate(simulations):
        assert state.amax_history[1:, column].tolist() == [float(np.float32(a)) for a in simulation.past]
        assert state.amax_history[0, column].item() == float(np.float32(simulation.running))


amax_values = st.sampled_from([0.0, 1.0, 0.3, 448.0, 7.5e-40, 1e-30, 3.4e38, math.inf, math.nan]) | st.floats(0.0, 1e4, width=32)


@given(
    window=st.sampled_from([1, 2, 5]),
    rule=st.sampled_from(["max", "most_recent"]),
    margin=st.sampled_from([0, 1, 3]),
    fp8=st.sampled_from(list(FP8_MAX)),
    steps=st.lists(st.lists(st.lists(amax_values, min_size=3, max_size=3), max_size=3), min_size=12, max_size=12),
)
def test_scales_and_histories_follow_the_rule(window: int, rule: str, margin: int, fp8: DType, steps: list[list[list[float]]]) -> None:
    recipe = DelayedScaling(margin=margin, amax_history_len=window, amax_compute_algo=rule)
    slots = ("a", "b", "c")
    state = ScalingState.create(slots, fp8, window, CPU)
    simulations = [Simulation(FP8_MAX[fp8], window, margin, rule) for _ in slots]
    for step in steps:
        for seen in step:
            state = state.observe({slot: torch.tensor([amax]) for slot, amax in zip(slots, seen, strict=True)})
            for simulation, amax in zip(simulations, seen, strict=True):
                simulation.observe(float(np.float32(amax)))
        state = state.advance(recipe)
        for simulation in simulations:
            simulation.advance()
        _agree(state, simulations)
        assert state.amax_history.isfinite().all() and state.scale.isfinite().all()


@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=6, max_size=6),
    rule=st.sampled_from(["max", "most_recent"]),
    seen=st.lists(st.floats(0.0, 1e4, width=32), min_size=24, max_size=24),
)
def test_a_window_that_changes_keeps_the_latest(lengths: list[int], rule: str, seen: list[float]) -> None:
    state, simulation = ScalingState.create(("a",), E4M3, 4, CPU), Simulation(448.0, 4, 0, rule)
    amaxes = iter(seen)
    for window in lengths:
        recipe = DelayedScaling(amax_history_len=window, amax_compute_algo=rule)
        simulation.resize(window)
        for amax in [next(amaxes) for _ in range(4)]:
            state = state.observe({"a": torch.tensor([amax])}).advance(recipe)
            simulation.observe(amax)
            simulation.advance()
            _agree(state, [simulation])
        assert len(state.amax_history) == window


def test_functions_of_the_user() -> None:
    """A mean of the window, and a scale of a power of two; they see what their docstrings promise."""
    calls: list[tuple[Any, ...]] = []

    def mean(history: torch.Tensor) -> torch.Tensor:
        assert history.shape == (3, 1)
        return history.mean(0)

    def power_of_two(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
        calls.append((amax.item(), scale.item(), fp8_max, recipe))
        return 2.0 ** torch.floor(torch.log2(fp8_max / amax))

    averaged = DelayedScaling(amax_history_len=3, amax_compute_algo=mean)
    state, simulation = ScalingState.create(("a",), E4M3, 3, CPU), Simulation(448.0, 3, 0, lambda seen: sum(seen) / 3)
    for amax in (3.0, 1.5, 9.0, 0.75, 0.75, 0.75):
        state = state.observe({"a": torch.tensor([amax])}).advance(averaged)
        simulation.observe(amax)
        simulation.advance()
        assert abs(state.scale.item() / simulation.scale - 1) < 4 * 2.0**-24
        assert state.amax_history[1:, 0].tolist() == simulation.past
    rounded = DelayedScaling(amax_history_len=3, scaling_factor_compute_algo=power_of_two)
    former = state.scale.item()
    state = state.observe({"a": torch.tensor([3.0])}).advance(rounded)
    assert calls == [(3.0, former, 448.0, rounded)] and state.scale.item() == 128.0


def test_by_a_function_of_the_user_each_slot_has_a_window_of_its_own() -> None:
    recipes = [DelayedScaling(amax_history_len=4, amax_compute_algo=rule) for rule in ("max", lambda history: history.amax(0))]
    states = [ScalingState.create(("a", "b", "c"), E4M3, 4, CPU) for _ in recipes]
    for seen in ((3.0, 5.0, None), (1.0, None, None), (2.0, 7.0, 0.5), (None, 1.0, 4.0), (0.25, 0.5, 1.0), (0.25, 0.5, 1.0)):
        amaxes = {slot: torch.tensor([amax]) for slot, amax in zip("abc", seen, strict=True) if amax is not None}
        states = [state.observe(amaxes).advance(recipe) for state, recipe in zip(states, recipes, strict=True)]
        torch.testing.assert_close(states[0].scale, states[1].scale, rtol=2.0**-23, atol=0)
        assert torch.equal(states[0].amax_history, states[1].amax_history)


def test_a_slot_that_is_not_seen_has_no_amax() -> None:
    state = ScalingState.create(("a", "b"), E4M3, 2, CPU).observe({"b": torch.tensor([4.0])})
    assert state.amax_history.tolist() == [[0.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0, -1.0])
def test_a_function_of_the_user_that_gives_nonsense_leaves_the_scale(bad: float) -> None:
    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: torch.full_like(scale, bad))
    state = ScalingState.create(("a",), E4M3, 2, CPU).observe({"a": torch.tensor([4.0])}).advance(recipe)
    assert state.scale.item() == 1.0


def test_values_are_never_written_to() -> None:
    first = ScalingState.create(("a", "b"), E4M3, 2, CPU)
    kept = (first.scale.clone(), first.amax_history.clone())
    second = first.observe({"b": torch.tensor([2.0])})
    seen = second.amax_history.clone()
    second.advance(DelayedScaling(amax_history_len=2))
    second.advance(DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.amax(0)))
    assert torch.equal(first.scale, kept[0]) and torch.equal(first.amax_history, kept[1]) and torch.equal(second.amax_history, seen)


class Owner:
    """``ScalingOwner`` with one forward slot, driven as training calls do."""

    def __init__(self) -> None:
        self.owner = ScalingOwner(StateLayout(("0.x",), ("0.dy",)))

    def step(self, recipe: DelayedScaling, amax: float, grad: float | None = None) -> float:
        snapshot = self.owner.snapshot(recipe, CPU)
        self.owner.commit_forward(snapshot, {"0.x": torch.tensor([amax])})
        if grad is not None:
            self.owner.commit_backward({"0.dy": torch.tensor([grad])})
        return snapshot.scales["0.x"].item()


@given(
    window=st.sampled_from([1, 2, 5]),
    rule=st.sampled_from(["max", "most_recent"]),
    seen=st.lists(st.tuples(amax_values, amax_values), min_size=8, max_size=8),
)
def test_the_owner_closes_an_iteration_at_the_next_forward(window: int, rule: str, seen: list[tuple[float, float]]) -> None:
    recipe, owner = DelayedScaling(amax_history_len=window, amax_compute_algo=rule), Owner()
    forward, backward = Simulation(448.0, window, 0, rule), Simulation(57344.0, window, 0, rule)
    for i, (amax, grad) in enumerate(seen):
        owner.owner.snapshot(recipe, CPU, inference=True)  # a look in between changes nothing
        if i:
            forward.advance()
            backward.advance()
        assert abs(owner.step(recipe, amax, grad) / forward.scale - 1) <= 2.0**-24 * 1.001
        forward.observe(float(np.float32(amax)))
        backward.observe(float(np.float32(grad)))
        current = owner.owner.current
        assert current is not None
        _agree(current.forward, [forward])
        _agree(current.backward, [backward])


def test_a_snapshot_alone_changes_nothing() -> None:
    recipe, owner = DelayedScaling(amax_history_len=2), Owner()
    owner.step(recipe, 2.0)
    before = owner.owner.current
    for _ in range(3):
        assert owner.owner.snapshot(recipe, CPU).scales["0.x"].item() == 224.0
    assert owner.owner.current is before


def test_what_follows_is_made_once_and_again_when_anything_else_is_asked_or_seen() -> None:
    """Under ``reduce_amax`` what follows is agreed upon with other processes: each would have to ask again as well."""
    recipe, owner = DelayedScaling(amax_history_len=2), Owner()
    owner.step(recipe, 2.0)
    first = owner.owner.snapshot(recipe, CPU)
    assert owner.owner.snapshot(recipe, CPU) is first and owner.owner.upcoming(recipe) is first
    other = DelayedScaling(amax_history_len=2, margin=1)
    assert owner.owner.snapshot(other, CPU).scales["0.x"] == first.scales["0.x"] / 2
    assert owner.owner.upcoming(recipe) is not first and owner.owner.upcoming(recipe).scales == first.scales
    again = owner.owner.snapshot(recipe, CPU)
    owner.step(recipe, 4.0)
    assert owner.owner.snapshot(recipe, CPU) is not again and owner.owner.snapshot(recipe, CPU).scales["0.x"] == first.scales["0.x"] / 2


def test_a_committed_state_that_fits_is_taken_as_it_is() -> None:
    recipe, owner = DelayedScaling(amax_history_len=2), ScalingOwner(StateLayout(("0.x",), ("0.dy",)))
    owner.load(_saved(recipe))
    assert owner.current is not None and owner.snapshot(recipe, CPU) is owner.current and owner.upcoming(recipe) is owner.current


def _saved(recipe: DelayedScaling) -> torch.Tensor:
    """A state of closed iterations."""
    owner = ScalingOwner(StateLayout(("0.x",), ("0.dy",)))
    owner.commit_forward(owner.snapshot(recipe, CPU), {"0.x": torch.tensor([2.0])})
    saved = load(owner.save().numpy().tobytes())
    return torch.frombuffer(bytearray(save({**saved, "open": torch.tensor([False])})), dtype=torch.uint8)


def test_copies_have_a_lock_of_their_own_and_no_inference_to_repeat() -> None:
    recipe, owner = DelayedScaling(amax_history_len=2), ScalingOwner(StateLayout(("0.x",), ("0.dy",)))
    owner.load(_saved(recipe))
    inferred = owner.snapshot(recipe, CPU, inference=True)
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert isinstance(twin._lock, Lock) and twin._lock is not owner._lock and twin._state.inferred is None and owner._state.inferred is inferred
        assert torch.equal(twin.save(), owner.save()) and twin.layout == owner.layout and not twin.unread


def test_a_copy_brings_no_recipe_along() -> None:
    """Of a recipe with a rule of the user's own a function within a function could not be pickled."""
    owner = Owner().owner
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    owner.commit_forward(owner.snapshot(recipe, CPU), {"0.x": torch.tensor([2.0])})
    upcoming = owner.snapshot(recipe, CPU)
    twin = pickle.loads(pickle.dumps(owner))
    assert twin.recipe is None and twin.snapshot(recipe, CPU).scales == upcoming.scales


def test_a_backward_into_a_state_that_was_loaded_meanwhile_is_observed_there() -> None:
    """What it has seen is in the scales of the next iteration, although no forward has begun one."""
    recipe, owner = DelayedScaling(amax_history_len=2), Owner()
    owner.step(recipe, 2.0)
    owner.owner.load(_saved(recipe))
    assert not owner.owner.open
    owner.owner.commit_backward({"0.dy": torch.tensor([4.0])})
    assert owner.owner.open and owner.owner.snapshot(recipe, CPU).scales["0.dy"].item() == 57344 / 4


def test_a_backward_into_a_state_that_was_reset_meanwhile_leaves_it_as_it_is() -> None:
    recipe, owner = DelayedScaling(amax_history_len=2), Owner()
    owner.step(recipe, 2.0)
    owner.owner.reset()
    owner.owner.commit_backward({"0.dy": torch.tensor([4.0])})
    assert owner.owner.current is None and owner.owner.save() is None
    assert owner.step(recipe, 8.0) == 1.0


SAVED = ("open", *(f"{name}.{field}" for name in ("forward", "backward") for field in ("scale", "amax_history", "fp8_dtype")))


@pytest.mark.parametrize("change", [*(f"without {name}" for name in SAVED), "with another", "open of numbers"])
def test_what_save_did_not_give_is_refused_and_changes_nothing(change: str) -> None:
    recipe, owner = DelayedScaling(amax_history_len=2), ScalingOwner(StateLayout(("0.x",), ("0.dy",)))
    saved = _saved(recipe)
    owner.load(saved)
    tensors = load(saved.numpy().tobytes())
    assert set(tensors) == set(SAVED)
    if change == "with another":
        tensors["another"] = torch.ones(1)
    elif change == "open of numbers":
        tensors["open"] = torch.ones(1)
    else:
        del tensors[change.removeprefix("without ")]
    before = owner.current
    with pytest.raises(CheckpointError, match=r"^a saved scaling state: expected the tensors of save, got otherwise: \w|got open of torch.float32"):
        owner.load(torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8))
    assert owner.current is before


@pytest.mark.parametrize(("saved", "got"), [(torch.zeros(8), "one of torch.float32"), (b"0", "bytes"), (None, "NoneType")])
def test_what_is_no_uint8_tensor_is_refused_as_that(saved: Any, got: str) -> None:
    owner = Owner().owner
    with pytest.raises(CheckpointError, match=rf"^a saved scaling state: expected a uint8 tensor, got {got}; load the file that was saved\.$"):
        owner.load(saved)
    assert owner.current is None


def test_a_state_is_where_it_is_asked_for() -> None:
    """On the meta device, as there is no other beside the CPU everywhere."""
    meta = torch.device("meta")
    made = ScalingState.create(("0.x", "0.weight"), E4M3, 3, meta)
    here = ScalingState.create(("0.x", "0.weight"), E4M3, 3, CPU)
    for state in (made, made.resized(9), made.resized(2), here.to(meta), here.to(meta).formatted(DType.kFloat8E5M2)):
        assert {state.scale.device, state.amax_history.device} == {meta} and state.slots == ("0.x", "0.weight")
    assert here.to(meta).fp8_dtype == E4M3 and here.formatted(DType.kFloat8E5M2).fp8_dtype == DType.kFloat8E5M2
    assert here.to(CPU) is here and here.formatted(E4M3) is here and here.resized(3) is here


def test_a_longer_window_is_fp32_whatever_the_default_dtype_is() -> None:
    made, former = ScalingState.create(("0.x",), E4M3, 3, CPU), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert made.resized(9).amax_history.dtype is torch.float32
    finally:
        torch.set_default_dtype(former)


def test_formats_may_change_between_calls() -> None:
    owner = Owner()
    assert owner.step(DelayedScaling(), 2.0) == 1.0
    assert owner.step(DelayedScaling(), 2.0) == 224.0
    assert owner.step(DelayedScaling(fp8_format=Format.E5M2), 2.0) == 28672.0


@pytest.mark.parametrize("rule", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_batch_that_is_not_finite_leaves_scales_finite(bad: float, rule: str) -> None:
    """The scale stays at its last finite value, and the next finite batch goes on from there."""
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=rule)
    module = Linear(4, 3)
    x = torch.ones(2, 4)
    spoilt = x.clone()
    spoilt[0, 1] = bad

    def step(x: torch.Tensor) -> ScalingState:
        with autocast(recipe=recipe):
            module(x).sum().backward()
        current = module._runner().scaling.current
        assert current is not None
        return current.forward

    step(x)
    good = step(x)
    after = step(spoilt)
    column = good.slots.index("0.x")
    assert good.scale[column] == 448.0
    for state in (after, step(spoilt), step(x), step(x)):
        assert state.scale[column] == 448.0
        assert state.amax_history.isfinite().all()
