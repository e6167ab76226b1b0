"""``RecipeState``: quantizers by slot, the state that they share, and how it is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from fusible import tex
from fusible.errors import ArgumentError, CheckpointError, DTypeError
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
    RecipeState,
    quantizer_for_role,
)
from fusible.tex import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
DELAYED = DelayedScaling(amax_history_len=3)


def delayed(state: RecipeState) -> tuple[torch.Tensor, torch.Tensor]:
    assert state.scale is not None and state.amax_history is not None
    return state.scale, state.amax_history


def test_the_quantizers_of_delayed_scaling_are_views_of_one_state() -> None:
    state = RecipeState.create(DELAYED, mode="forward", num_quantizers=3)
    scale, history = delayed(state)
    assert scale.tolist() == [1.0] * 3 and history.shape == (3, 3) and not history.any()
    assert scale.dtype == history.dtype == torch.float32 and state.dtype == E4M3 and state.delayed_recipe is DELAYED
    quantizers: list[Any] = state.make_quantizers()
    assert all(type(q) is Float8Quantizer and q.rowwise_usage and q.columnwise_usage and not q.internal for q in quantizers)
    x = torch.tensor([[1.0, -3.0], [0.5, 2.0]])
    quantizers[1](x)
    assert history.tolist() == [[0.0, 3.0, 0.0], [0.0] * 3, [0.0] * 3]
    tex.fused_amax_and_scale_update_after_reduction(history[0].clone(), [history], [scale], "max", E4M3, 0.0)
    assert scale.tolist() == [1.0, float(torch.tensor(448.0) / 3), 1.0] and torch.equal(quantizers[1].scale, scale[1:2])
    again: Any = state.make_quantizers()[1]
    assert again is not quantizers[1] and again.scale.data_ptr() == quantizers[1].scale.data_ptr()
    assert quantizers[1](x)._scale_inv.item() == (torch.ones(1) / scale[1]).item()


@pytest.mark.parametrize(("fp8_format", "mode", "dtype"), [
    (Format.HYBRID, "forward", E4M3), (Format.HYBRID, "backward", E5M2), (Format.E4M3, "backward", E4M3), (Format.E5M2, "forward", E5M2),
])  # fmt: skip
def test_the_direction_says_the_format(fp8_format: Format, mode: str, dtype: DType) -> None:
    state = RecipeState.create(DelayedScaling(fp8_format=fp8_format, amax_history_len=1), mode=mode, num_quantizers=2)
    assert state.dtype == dtype and [q.dtype for q in state.make_quantizers()] == [dtype] * 2  # type: ignore[union-attr]


def test_stateless_quantizers_are_those_of_the_roles_and_each_slot_has_its_own() -> None:
    roles = [QuantizerRole("grouped_linear", "input")] * 2 + [QuantizerRole("grouped_linear", "weight")] * 2
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=4, roles=roles)
    quantizers: list[Any] = state.make_quantizers()
    assert quantizers == [quantizer_for_role(recipe, role) for role in roles] and quantizers[2].with_2d_quantization
    quantizers[0].set_usage(rowwise=False)
    assert quantizers[1].rowwise_usage and state.make_quantizers()[0] == quantizers[1]
    assert state.scale is state.amax_history is state.dtype is state.delayed_recipe is None


def test_positions_stand_in_for_roles() -> None:
    recipe = NVFP4BlockScaling()
    for mode, types in (("forward", ("input", "weight", "output", "input", "weight")), ("backward", ("grad_output", "grad_input") * 2)):
        wanted = [quantizer_for_role(recipe, QuantizerRole(tensor_type=tensor_type)) for tensor_type in types]
        assert RecipeState.create(recipe, mode=mode, num_quantizers=len(types)).make_quantizers() == wanted


def test_the_device_reaches_quantizers_that_have_one() -> None:
    (quantizer,) = RecipeState.create(Float8CurrentScaling(), mode="forward", device="meta").make_quantizers()
    assert isinstance(quantizer, Float8CurrentScalingQuantizer) and quantizer.device == torch.device("meta")
    scale, history = delayed(RecipeState.create(DELAYED, mode="forward", device="meta"))
    assert scale.device == history.device == torch.device("meta")


def test_high_precision_has_no_quantizers() -> None:
    state = RecipeState.create(HighPrecision(), mode="forward", num_quantizers=2)
    assert state.make_quantizers() == [None, None] and state.state_dict() == {}


def mixed(role: QuantizerRole | None) -> Any:
    if role is None:
        return None
    return DelayedScalingRequest(amax_history_len=2, margin=1) if role.tensor_type == "weight" else MXFP8Quantizer(E4M3, columnwise=False)


def test_a_custom_recipe_mixes_slots_with_state_and_without() -> None:
    roles = [QuantizerRole("linear", "weight", "a"), QuantizerRole("linear", "input"), None, QuantizerRole("linear", "weight", "b")]
    state = RecipeState.create(CustomRecipe(mixed), mode="forward", num_quantizers=4, roles=roles)
    quantizers: list[Any] = state.make_quantizers()
    assert quantizers[1:3] == [MXFP8Quantizer(E4M3, columnwise=False), None]
    assert [type(quantizers[i]) for i in (0, 3)] == [Float8Quantizer] * 2
    scale, history = delayed(state)
    assert history.shape == (2, 2) and state.delayed_recipe == DelayedScaling(amax_history_len=2, margin=1)
    quantizers[3](torch.full((2, 2), 5.0))
    assert history[0].tolist() == [0.0, 5.0] and scale.tolist() == [1.0, 1.0]


def test_a_factory_gets_empty_roles_where_there_are_none() -> None:
    asked: list[Any] = []
    RecipeState.create(CustomRecipe(asked.append), mode="backward", num_quantizers=2)
    assert asked == [QuantizerRole()] * 2


def test_requests_of_several_kinds_are_refused() -> None:
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=len(role.name)))
    with pytest.raises(ArgumentError) as raised:
        RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=[QuantizerRole(name="a"), QuantizerRole(name="bc")])
    assert str(raised.value) == (
        "every slot under delayed scaling of a layer: expected DelayedScalingRequest(amax_history_len=1), "
        "got DelayedScalingRequest(amax_history_len=2); give the same to each of them."
    )


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: RecipeState.create("delayed", mode="forward"),
        DTypeError,  # type: ignore[arg-type]
        "RecipeState: expected a recipe, got 'delayed'; give e.g. MXFP8BlockScaling().",
    ),
    (lambda: RecipeState.create(DELAYED, mode="fwd"), ArgumentError, "RecipeState's mode: expected 'forward' or 'backward', got 'fwd'; name one."),
    (
        lambda: RecipeState.create(DELAYED, mode="forward", num_quantizers=2, roles=[None]),
        ArgumentError,
        "RecipeState: expected 2 roles, got 1; give one per quantizer, or none.",
    ),
]


@pytest.mark.parametrize(("make", "error", "sentence"), REFUSED)
def test_bad_arguments_are_refused(make: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == sentence


def filled(recipe: Any = DELAYED, mode: str = "forward") -> RecipeState:
    state = RecipeState.create(recipe, mode=mode, num_quantizers=2, roles=[QuantizerRole("linear", "weight")] * 2)
    scale, history = delayed(state)
    scale.copy_(torch.tensor([2.0, 3.0]))
    history.copy_(torch.arange(history.numel()).reshape(history.shape))
    return state


@pytest.mark.parametrize("recipe", [DELAYED, CustomRecipe(mixed)])
def test_a_saved_state_is_taken_over_in_place(recipe: Any) -> None:
    state = filled(recipe)
    saved = load(save(state.state_dict()))
    assert sorted(saved) == ["amax_history", "fp8_dtype", "scale"] and saved["fp8_dtype"].tolist() == [int(E4M3)]
    other = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=state.roles)
    quantizers: list[Any] = other.make_quantizers()
    other.load_state_dict(saved)
    assert [q.scale.item() for q in quantizers] == [2.0, 3.0] and [q.amax.item() for q in quantizers] == [0.0, 1.0]
    for mine, theirs in zip(delayed(other), delayed(state), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_saved_is_a_copy() -> None:
    state = filled()
    saved = state.state_dict()
    delayed(state)[0].zero_()
    assert saved["scale"].tolist() == [2.0, 3.0]


def test_another_window_keeps_the_latest_entries() -> None:
    state = filled()
    other = RecipeState.create(DelayedScaling(amax_history_len=2), mode="forward", num_quantizers=2)
    other.load_state_dict(state.state_dict())
    assert delayed(other)[1].tolist() == [[0.0, 1.0], [4.0, 5.0]]


DAMAGED: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda s: s.pop("scale"), "a saved scaling state: expected 2 backward scales, got none; load it into the model it was saved from."),
    (
        lambda s: s.update(scale=torch.ones(3)),
        "a saved scaling state: expected 2 backward scales, got 3; load it into the model it was saved from.",
    ),
    (
        lambda s: s.update(amax_history=torch.ones(3, 1)),
        "a saved scaling state: expected backward amaxes [window, 2], got shape [3, 1]; use an intact checkpoint.",
    ),
    (
        lambda s: s["scale"].fill_(torch.nan),
        "a saved scaling state: expected finite fp32 backward scales above 0 and amaxes of at least 0, got values from nan to nan; "
        "use an intact checkpoint.",
    ),
    (
        lambda s: s.update(fp8_dtype=torch.tensor([4])),
        "a saved scaling state: expected the code of an 8-bit format, got [4]; use an intact checkpoint.",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGED)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Callable[[dict[str, torch.Tensor]], Any], sentence: str) -> None:
    state = filled(mode="backward")
    before = state.state_dict()
    saved = state.state_dict()
    saved["amax_history"] += 1
    damage(saved)
    with pytest.raises(CheckpointError) as raised:
        state.load_state_dict(saved)
    assert str(raised.value) == sentence
    assert all(torch.equal(before[name], tensor) for name, tensor in state.state_dict().items())


def test_a_recipe_without_state_takes_none() -> None:
    state = RecipeState.create(MXFP8BlockScaling(), mode="forward")
    state.load_state_dict({})
    with pytest.raises(CheckpointError) as raised:
        state.load_state_dict({"scale": torch.ones(1)})
    assert str(raised.value) == ("the saved state of MXFP8BlockScaling(): expected nothing, got scale; load it into the recipe it was saved from.")
