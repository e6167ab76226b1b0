"""Recipes as values: equality, printing, options that follow from others, defaults from the environment, and refused options."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from fusible import autocast
from fusible.errors import ArgumentError, DTypeError, KnobError
from fusible.knobs import KNOBS
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from fusible.tex import DType

POWERS = QParams(power_2_scale=True)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOBS:
        if name.startswith("NVTE_"):
            monkeypatch.delenv(name, raising=False)


def factory(role: Any) -> None:
    return None


EVERY: list[tuple[Callable[..., Recipe], dict[str, Any]]] = [
    (HighPrecision, {"lowest": "float32"}),
    (DelayedScaling, {"margin": 1, "fp8_format": Format.E4M3}),
    (Float8CurrentScaling, {"use_power_2_scales": True}),
    (Float8BlockScaling, {"use_f32_scales": True, "backward_override": "dequantized"}),
    (MXFP8BlockScaling, {"enable_2d_quantization": True}),
    (NVFP4BlockScaling, {"disable_rht": True, "nvfp4_4over6": "all"}),
    (CustomRecipe, {"qfactory": factory, "quantization_alignment": 32}),
]


@pytest.mark.parametrize(("make", "options"), EVERY)
def test_recipes_are_values(make: Callable[..., Recipe], options: dict[str, Any]) -> None:
    recipe = make(**options)
    assert recipe == make(**options) and len({recipe, make(**options)}) == 1
    for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), replace(recipe)):  # type: ignore[type-var]
        assert other == recipe and hash(other) == hash(recipe) and repr(other) == repr(recipe)
    assert all(recipe != other(**given) for other, given in EVERY if other is not make)
    required = {"qfactory": factory} if make is CustomRecipe else {}
    assert recipe != make(**required)
    with pytest.raises(FrozenInstanceError):
        recipe.fp8_dpa = True  # type: ignore[misc]
    assert autocast(recipe=recipe).recipe is recipe


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (NVFP4BlockScaling(), "NVFP4BlockScaling()"),
        (NVFP4BlockScaling(disable_rht=True), "NVFP4BlockScaling(disable_rht=True)"),
        (DelayedScaling(fp8_format=Format.E4M3, fp8_dpa=True), "DelayedScaling(fp8_dpa=True, fp8_format=Format.E4M3)"),
        (Float8CurrentScaling(fp8_quant_fwd_weight=POWERS), "Float8CurrentScaling(fp8_quant_fwd_weight=QParams(power_2_scale=True))"),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams()), "Float8CurrentScaling(fp8_gemm_fprop=MMParams())"),
        (DelayedScalingRequest(margin=2), "DelayedScalingRequest(margin=2)"),
    ],
)
def test_what_differs_from_the_defaults_is_printed(recipe: Recipe, text: str) -> None:
    assert repr(recipe) == text


def test_the_kind_may_be_asked_of_an_instance_and_of_the_class() -> None:
    kinds = ["delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom", "high_precision"]
    order = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe, HighPrecision]
    for i, kind in enumerate(kinds):
        assert [getattr(cls, kind)() for cls in order] == [i == j for j in range(len(order))]
    assert MXFP8BlockScaling().mxfp8() and not Recipe.mxfp8()
    assert [cls.float8_per_tensor_scaling() for cls in order] == [True, True] + [False] * 5


def test_formats_name_their_elements() -> None:
    pairs = {f.name: (f.forward, f.backward) for f in Format}
    e4m3, e5m2, e2m1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1
    assert pairs == {"E2M1": (e2m1, e2m1), "E4M3": (e4m3, e4m3), "E5M2": (e5m2, e5m2), "HYBRID": (e4m3, e5m2)}


def test_a_constructors_option_reaches_the_parameters_of_every_tensor() -> None:
    for on in (True, False):
        current, block = Float8CurrentScaling(use_power_2_scales=on), Float8BlockScaling(use_f32_scales=on)
        for tensor_type in ("input", "weight", "output", "grad_output", "grad_input"):
            assert current.qparams(tensor_type) == QParams(power_2_scale=on)
            assert block.qparams(tensor_type) == QParams(power_2_scale=not on)


def test_parameters_that_were_given_stay_and_others_follow_when_options_are_replaced() -> None:
    given = QParams(amax_epsilon=0.5)
    recipe = Float8CurrentScaling(fp8_quant_fwd_weight=given)
    changed = replace(recipe, use_power_2_scales=True)
    assert changed == Float8CurrentScaling(use_power_2_scales=True, fp8_quant_fwd_weight=given)
    assert (changed.fp8_quant_fwd_inp, changed.fp8_quant_fwd_weight, changed.fp8_quant_bwd_grad) == (POWERS, given, POWERS)
    assert replace(changed, fp8_quant_fwd_inp=given).fp8_quant_fwd_inp == given
    assert replace(changed, fp8_quant_fwd_weight=None).fp8_quant_fwd_weight == POWERS  # type: ignore[arg-type]
    assert Float8CurrentScaling(fp8_quant_fwd_inp=QParams()) == Float8CurrentScaling()
    assert not replace(NVFP4BlockScaling(), disable_rht=True).fp4_quant_bwd_grad.random_hadamard_transform


DEFAULTS: list[tuple[str, str, type[Recipe], str, Any]] = [
    ("NVTE_BACKWARD_OVERRIDE", "dequantized", MXFP8BlockScaling, "backward_override", "dequantized"),
    ("NVTE_BACKWARD_OVERRIDE", "high_precision", NVFP4BlockScaling, "backward_override", "high_precision"),
    ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", Float8CurrentScaling, "use_power_2_scales", True),
    ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", Float8CurrentScaling, "fp8_quant_bwd_grad", POWERS),
    ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", Float8BlockScaling, "use_f32_scales", True),
    ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", Float8BlockScaling, "fp8_quant_fwd_inp", QParams()),
    ("NVTE_NVFP4_DISABLE_RHT", "1", NVFP4BlockScaling, "disable_rht", True),
    ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", NVFP4BlockScaling, "disable_stochastic_rounding", True),
    ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", NVFP4BlockScaling, "disable_2d_quantization", True),
    ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1", NVFP4BlockScaling, "row_scaled_activation", True),
    ("NVTE_NVFP4_4OVER6", "weights", NVFP4BlockScaling, "nvfp4_4over6", "weights"),
    ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none", NVFP4BlockScaling, "nvfp4_4over6_e4m3_use_256", "none"),
    ("NVTE_NVFP4_4OVER6_ERR_MODE", "mse", NVFP4BlockScaling, "nvfp4_4over6_err_mode", "MSE"),
]


@pytest.mark.parametrize(("variable", "text", "kind", "option", "value"), DEFAULTS)
def test_the_environment_gives_defaults_when_a_recipe_is_made(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, kind: type[Recipe], option: str, value: Any
) -> None:
    before = kind()
    monkeypatch.setenv(variable, text)
    after = kind()
    assert getattr(after, option) == value != getattr(before, option) and after != before
    assert not option.startswith(("use", "disable")) or repr(after) == f"{kind.__name__}({option}=True)"
    if not option.startswith("fp8_quant"):  # what is given comes before the environment
        assert getattr(kind(**{option: getattr(before, option)}), option) == getattr(before, option)
    monkeypatch.delenv(variable)
    assert kind() == before and after != before


def test_every_variable_is_tested() -> None:
    assert {row[0] for row in DEFAULTS} == {name for name in KNOBS if name.startswith("NVTE_")} - {"NVTE_PLUGIN"}


def test_a_variable_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "some")
    with pytest.raises(KnobError, match="the environment variable NVTE_NVFP4_4OVER6: expected none, weights, activations or all, got 'some'"):
        NVFP4BlockScaling()


def test_delayed_scaling_refuses_a_backward_override_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    with pytest.raises(ArgumentError, match="got 'dequantized'; give None, or unset NVTE_BACKWARD_OVERRIDE."):
        DelayedScaling()
    assert DelayedScaling(backward_override=None).backward_override is DelayedScalingRequest().recipe().backward_override is None
    assert HighPrecision().backward_override is None


BLOCK, NVFP4 = "Float8BlockScaling", "NVFP4BlockScaling"
TAKES_8 = "none but power_2_scale and amax_epsilon"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: DelayedScaling(fp8_format="E4M3"),
        DTypeError,  # type: ignore[arg-type]
        "DelayedScaling.fp8_format: expected a Format, got 'E4M3'; give one.",
    ),
    (
        lambda: DelayedScaling(fp8_format=Format.E2M1),
        ArgumentError,
        "DelayedScaling.fp8_format: expected Format.E4M3, Format.E5M2 or Format.HYBRID, got Format.E2M1; give one of these.",
    ),
    (
        lambda: DelayedScaling(margin="1"),
        DTypeError,  # type: ignore[arg-type]
        "DelayedScaling.margin: expected a number, got '1'; give one.",
    ),
    (
        lambda: DelayedScaling(scaling_factor_compute_algo="max"),
        ArgumentError,  # type: ignore[arg-type]
        "DelayedScaling.scaling_factor_compute_algo: expected a function or None, got 'max'; give one of the two.",
    ),
    (
        lambda: DelayedScaling(backward_override="dequantized"),
        ArgumentError,
        "DelayedScaling.backward_override: expected None, got 'dequantized'; give None, or unset NVTE_BACKWARD_OVERRIDE.",
    ),
    (
        lambda: DelayedScalingRequest(amax_history_len=0),
        ArgumentError,
        "DelayedScaling.amax_history_len: expected at least 1, got 0; give the window's length.",
    ),
    (lambda: HighPrecision(fp8_dpa=True), ArgumentError, "HighPrecision.fp8_dpa: expected False, got True; leave it at that."),
    (
        lambda: MXFP8BlockScaling(backward_override="bf16"),
        ArgumentError,
        "MXFP8BlockScaling.backward_override: expected None, 'high_precision' or 'dequantized', got 'bf16'; give one of these.",
    ),
    (
        lambda: MXFP8BlockScaling(enable_2d_quantization="0"),
        DTypeError,  # type: ignore[arg-type]
        "MXFP8BlockScaling.enable_2d_quantization: expected True or False, got '0'; give one.",
    ),
    (
        lambda: MXFP8BlockScaling(fp8_format=Format.E2M1),
        ArgumentError,
        "MXFP8BlockScaling.fp8_format: expected Format.E4M3, Format.E5M2 or Format.HYBRID, got Format.E2M1; give one of these.",
    ),
    (
        lambda: Float8CurrentScaling(use_power_2_scales="0"),
        DTypeError,  # type: ignore[arg-type]
        "Float8CurrentScaling.use_power_2_scales: expected True or False, got '0'; give one.",
    ),
    (
        lambda: Float8CurrentScaling(fp8_quant_fwd_inp=0.5),
        DTypeError,  # type: ignore[arg-type]
        "Float8CurrentScaling.fp8_quant_fwd_inp: expected QParams, got 0.5; give one.",
    ),
    (
        lambda: Float8CurrentScaling(fp8_quant_bwd_grad=QParams(stochastic_rounding=True)),
        ArgumentError,
        f"Float8CurrentScaling.fp8_quant_bwd_grad: expected {TAKES_8}, got QParams(stochastic_rounding=True); leave stochastic_rounding out.",
    ),
    (
        lambda: QParams(amax_epsilon=-1.0),
        ArgumentError,
        "QParams.amax_epsilon: expected a finite number of at least 0, got -1.0; give the least amax.",
    ),
    (
        lambda: QParams(amax_epsilon=float("nan")),
        ArgumentError,
        "QParams.amax_epsilon: expected a finite number of at least 0, got nan; give the least amax.",
    ),
    (lambda: Float8BlockScaling(x_block_scaling_dim=3), ArgumentError, f"{BLOCK}.x_block_scaling_dim: expected 1 or 2, got 3; give one of these."),
    (
        lambda: Float8BlockScaling(x_block_scaling_dim=2),
        ArgumentError,
        f"{BLOCK}.w_block_scaling_dim: expected 1 beside x_block_scaling_dim=2, got 2; let at most one operand of a product have tiles.",
    ),
    (
        lambda: Float8BlockScaling(grad_block_scaling_dim=2),
        ArgumentError,
        f"{BLOCK}.grad_block_scaling_dim: expected 1 beside w_block_scaling_dim=2, got 2; let at most one operand of a product have tiles.",
    ),
    (
        lambda: Float8BlockScaling(fp8_gemm_wgrad=MMParams(False)),
        ArgumentError,
        f"{BLOCK}.fp8_gemm_wgrad: expected MMParams(), got MMParams(use_split_accumulator=False); leave it at that.",
    ),
    (lambda: Float8BlockScaling(fp8_mha=True), ArgumentError, f"{BLOCK}.fp8_mha: expected False, got True; leave it at that."),
    (
        lambda: NVFP4BlockScaling(fp4_format=Format.E4M3),
        ArgumentError,
        f"{NVFP4}.fp4_format: expected Format.E2M1, got Format.E4M3; leave it at that.",
    ),
    (
        lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID),
        ArgumentError,
        f"{NVFP4}.fp8_format: expected Format.E4M3, got Format.HYBRID; leave it at that.",
    ),
    (
        lambda: NVFP4BlockScaling(nvfp4_4over6="inputs"),
        ArgumentError,
        f"{NVFP4}.nvfp4_4over6: expected 'none', 'weights', 'activations' or 'all', got 'inputs'; give one of these.",
    ),
    (
        lambda: NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256="yes"),
        ArgumentError,
        f"{NVFP4}.nvfp4_4over6_e4m3_use_256: expected 'none', 'weights', 'activations' or 'all', got 'yes'; give one of these.",
    ),
    (
        lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="mse"),
        ArgumentError,
        f"{NVFP4}.nvfp4_4over6_err_mode: expected 'MAE' or 'MSE', got 'mse'; give one of these.",
    ),
    (
        lambda: NVFP4BlockScaling(nvfp4_4over6="all"),
        ArgumentError,
        f"{NVFP4} with nvfp4_4over6: expected no random_hadamard_transform of the inputs, got nvfp4_4over6='all'; "
        "switch one of the two off (disable_rht=True).",
    ),
    (
        lambda: NVFP4BlockScaling(nvfp4_4over6="weights", fp4_quant_fwd_weight=QParams(stochastic_rounding=True)),
        ArgumentError,
        f"{NVFP4} with nvfp4_4over6: expected no stochastic_rounding of the weights, got nvfp4_4over6='weights'; "
        "switch one of the two off (fp4_quant_*).",
    ),
    (
        lambda: NVFP4BlockScaling(row_scaled_activation=True, fp4_quant_fwd_inp=QParams(fp4_2d_quantization=True)),
        ArgumentError,
        f"{NVFP4} with row_scaled_activation: expected no fp4_2d_quantization of the inputs, got row_scaled_activation=True; "
        "switch one of the two off (fp4_quant_*).",
    ),
    (
        lambda: NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(amax_epsilon=1.0)),
        ArgumentError,
        f"{NVFP4}.fp4_quant_fwd_inp: expected none but random_hadamard_transform and stochastic_rounding and fp4_2d_quantization, "
        "got QParams(amax_epsilon=1.0); leave amax_epsilon out.",
    ),
    (
        lambda: CustomRecipe("mxfp8"),
        ArgumentError,  # type: ignore[arg-type]
        "CustomRecipe.qfactory: expected a hashable function of a QuantizerRole, got 'mxfp8'; give one.",
    ),
    (
        lambda: CustomRecipe(factory, quantization_alignment=0),
        ArgumentError,
        "CustomRecipe.quantization_alignment: expected at least 1, got 0; give the number of rows.",
    ),
]


@pytest.mark.parametrize(("make", "error", "sentence"), REFUSED)
def test_an_option_that_cannot_be_followed_is_refused_in_one_sentence(make: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == sentence


def test_options_that_every_recipe_has_are_given_by_name_alone() -> None:
    for make, _ in EVERY:
        by_name = {n for n, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
        assert {"fp8_dpa", "fp8_mha", "backward_override"} <= by_name
