"""How a recipe quantizes a tensor by its role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fusible.errors import ArgumentError, DTypeError
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QParams,
    Quantizer,
    QuantizerRole,
    Recipe,
    quantizer_for_role,
)
from fusible.tex import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")
STATELESS = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True), NVFP4BlockScaling()]


def made(recipe: Recipe, module_type: str = "linear", types: tuple[str, ...] = TENSOR_TYPES) -> list[Any]:
    return [quantizer_for_role(recipe, QuantizerRole(module_type, tensor_type)) for tensor_type in types]


@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_quantizers_are_new_equal_by_value_and_ready_to_use(recipe: Recipe, tensor_type: str) -> None:
    role = QuantizerRole("linear", tensor_type, "fc1")
    first, second = quantizer_for_role(recipe, role), quantizer_for_role(recipe, role)
    assert isinstance(first, Quantizer) and first is not second and first == second
    assert first.rowwise_usage and first.columnwise_usage and not first.internal
    first.set_usage(columnwise=False)
    assert isinstance(second, Quantizer) and second.columnwise_usage and first != second == quantizer_for_role(recipe, role)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    # Half a unit of E5M2 is 2^-3 of the value; E2M1's is 2^-2, with stochastic rounding 2^-1, and its E4M3 scale is off by 2^-4 at most.
    bound = 2.0**-1 + 2.0**-4 if recipe.nvfp4() else 2.0**-3
    assert (second(x).dequantize().float() - x.float()).norm() <= bound * x.float().norm()


def test_delayed_scaling_asks_for_state_with_all_of_its_options() -> None:
    recipe = DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent", reduce_amax=False, fp8_dpa=True)
    request = DelayedScalingRequest(Format.E4M3, 1, 3, "most_recent", None, False)
    assert made(recipe) == [request] * 5
    assert request.recipe() == DelayedScaling(1, Format.E4M3, 3, "most_recent", reduce_amax=False)


def test_current_scaling_follows_the_parameters_of_each_kind_of_tensor() -> None:
    inp, weight, grad = QParams(True, 0.5), QParams(False, 0.25), QParams(True, 0.125)
    quantizers = made(Float8CurrentScaling(fp8_quant_fwd_inp=inp, fp8_quant_fwd_weight=weight, fp8_quant_bwd_grad=grad))
    assert all(type(q) is Float8CurrentScalingQuantizer for q in quantizers)
    assert [QParams(q.force_pow_2_scales, q.amax_epsilon) for q in quantizers] == [inp, weight, inp, grad, grad]
    assert [q.dtype for q in quantizers] == [E4M3, E4M3, E4M3, E5M2, E5M2]


def test_block_scaling_follows_the_parameters_and_the_shape_of_blocks() -> None:
    recipe = Float8BlockScaling(
        use_f32_scales=True, fp8_format=Format.HYBRID, fp8_quant_bwd_grad=QParams(True, 0.125), w_block_scaling_dim=1, grad_block_scaling_dim=2
    )
    quantizers = made(recipe)
    assert all(type(q) is Float8BlockQuantizer for q in quantizers)
    assert [q.block_scaling_dim for q in quantizers] == [1, 1, 1, 2, 2]
    assert [q.force_pow_2_scales for q in quantizers] == [False] * 3 + [True] * 2
    assert [q.amax_epsilon for q in quantizers] == [0.0] * 3 + [0.125] * 2
    assert [q.dtype for q in quantizers] == [E4M3, E4M3, E4M3, E5M2, E5M2]
    assert [q.block_scaling_dim for q in made(Float8BlockScaling())] == [1, 2, 1, 1, 1]


def test_mxfp8_has_tiles_for_the_weights_of_linear_layers_alone() -> None:
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    for module_type, tiled in (("linear", True), ("grouped_linear", True), ("dpa", False), ("", False)):
        quantizers = made(recipe, module_type)
        assert all(type(q) is MXFP8Quantizer for q in quantizers)
        assert [q.with_2d_quantization for q in quantizers] == [False, tiled, False, False, False]
    assert not any(q.with_2d_quantization for q in made(MXFP8BlockScaling()))


def test_nvfp4_follows_every_option() -> None:
    def of(name: str, **options: Any) -> list[Any]:
        quantizers = made(NVFP4BlockScaling(**options))
        assert all(type(q) is NVFP4Quantizer for q in quantizers)
        return [getattr(q, name) for q in quantizers]

    assert of("with_rht") == of("with_post_rht_amax") == [True, False, True, True, True]
    assert not any(of("with_rht", disable_rht=True))
    assert of("stochastic_rounding") == [False, False, False, True, True]
    assert not any(of("stochastic_rounding", disable_stochastic_rounding=True))
    assert of("with_2d_quantization") == [False, True, False, False, False]
    assert not any(of("with_2d_quantization", disable_2d_quantization=True))
    assert of("row_scaled_nvfp4", row_scaled_activation=True) == [True, False, True, False, False]
    assert of("nvfp4_use_4over6", nvfp4_4over6="all", disable_rht=True) == [True] * 3 + [False] * 2
    assert of("nvfp4_use_4over6", nvfp4_4over6="weights") == [False, True, False, False, False]
    assert of("nvfp4_e4m3_max", nvfp4_4over6="all", disable_rht=True, nvfp4_4over6_e4m3_use_256="activations") == [256, 448, 256, 448, 448]
    assert of("nvfp4_e4m3_max", nvfp4_4over6="weights") == [448, 256, 448, 448, 448]
    assert NVFP4BlockScaling().e4m3_max("input") == 448 and NVFP4BlockScaling(nvfp4_4over6="weights").e4m3_max("weight") == 256
    assert of("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode="MSE") == ["MSE"] * 5
    assert of("with_rht", fp4_quant_fwd_weight=QParams(random_hadamard_transform=True))[1]


@pytest.mark.parametrize("recipe", [*STATELESS, DelayedScaling()])
def test_what_is_no_tensor_of_a_product_stays_in_high_precision(recipe: Recipe) -> None:
    assert made(recipe, "dpa", ("qkv", "", "bias")) == [None] * 3 and quantizer_for_role(recipe, None) is None


def test_high_precision_quantizes_nothing() -> None:
    assert made(HighPrecision()) == [None] * 5


def test_a_factory_decides_for_any_role_each_time() -> None:
    asked: list[Any] = []

    def factory(role: QuantizerRole | None) -> Any:
        asked.append(role)
        if role is None:
            return None
        return DelayedScalingRequest() if role.name == "fc1" else MXFP8Quantizer(E4M3, columnwise=False)

    recipe = CustomRecipe(factory)
    roles = [None, QuantizerRole("dpa", "qkv"), QuantizerRole("linear", "input", "fc1"), QuantizerRole("linear", "input", "fc1")]
    found = [quantizer_for_role(recipe, role) for role in roles]
    assert found == [None, MXFP8Quantizer(E4M3, columnwise=False), DelayedScalingRequest(), DelayedScalingRequest()]
    assert asked == roles


def test_a_factory_that_gives_something_else_is_refused() -> None:
    with pytest.raises(DTypeError) as raised:
        quantizer_for_role(CustomRecipe(lambda role: "mxfp8"), QuantizerRole("linear", "weight"))
    assert str(raised.value) == (
        "CustomRecipe.qfactory for module_type=linear|tensor_type=weight: expected a Quantizer, a DelayedScalingRequest or None, got 'mxfp8'; "
        "return fusible's quantizers."
    )


def test_a_recipe_of_no_known_kind_is_refused() -> None:
    @dataclass(frozen=True, repr=False)
    class Mine(Recipe):
        scaling: ClassVar[str] = "mine"

    with pytest.raises(ArgumentError, match=r"quantizer_for_role: expected a recipe that quantizes, got Mine\(\); take one of fusible's"):
        quantizer_for_role(Mine(), QuantizerRole("linear", "weight"))


def test_a_users_subclass_quantizes_as_its_base() -> None:
    @dataclass(frozen=True, repr=False)
    class Coarse(Float8CurrentScaling):
        note: str = ""

    assert made(Coarse(use_power_2_scales=True, note="x")) == made(Float8CurrentScaling(use_power_2_scales=True))
