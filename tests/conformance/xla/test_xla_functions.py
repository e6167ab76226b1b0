"""What the table cannot say, on lazy tensors: bytes, given outputs, refusals. The tests are those of the other backends.

XLA's float arithmetic takes subnormals for zero, so fp32 values below 2^-126 quantize to zero; scales and amaxes keep them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_tex_attention
import test_tex_dropout
import test_tex_gemm
import test_tex_optimizer
import test_tex_prim
import test_tex_quantize
import test_tex_recipe
import test_tex_rules
import torch
from tex_backends import Runner
from xla_runner import RUNNER, adopted

from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex import DType

pytest.importorskip("jaxlib")
pytestmark = pytest.mark.parametrize("runner", [pytest.param(RUNNER, id="xla")])

MODULES = (
    test_tex_attention, test_tex_dropout, test_tex_gemm, test_tex_optimizer, test_tex_prim, test_tex_quantize, test_tex_recipe, test_tex_rules,
)  # fmt: skip

OF_MEMORY_OR_GENERATORS = {
    "test_packed_layouts_equal_separate_ones_and_give_views_of_one_buffer",
    "test_reshape_shares_memory_where_it_can",
    "test_dropout_is_drawn_per_call_from_the_generator_and_not_in_inference",
    "test_no_graph_is_recorded",
}
"""Values have no memory, and a program no generator."""

OF_SUBNORMALS_OR_DEVICES = {"test_current_scaling_follows_the_rule", "test_wrong_arguments_write_nothing"}
"""Restated here without those."""

for module in MODULES:
    for name, test in adopted(module).items():
        if name not in OF_MEMORY_OR_GENERATORS | OF_SUBNORMALS_OR_DEVICES:
            globals()[name] = test


@pytest.mark.parametrize("fp8", test_tex_quantize.FORMATS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_current_scaling_follows_the_rule(runner: Runner, fp8: DType, power_of_two: bool, epsilon: float) -> None:
    quantizer = Float8CurrentScalingQuantizer(fp8, "cpu", force_pow_2_scales=power_of_two, amax_epsilon=epsilon)
    for amax in test_tex_quantize.AMAXES:
        x = torch.tensor([[0.0, -amax]])
        quantized = runner("quantize", tensor=x, quantizer=quantizer)
        scale = test_tex_quantize.rule(amax, fp8, power_of_two, epsilon)
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / scale
            if not 0 < inverse < np.finfo(np.float32).tiny:
                assert quantized._scale_inv.item() == inverse, amax
            if not 0 < abs(amax) < np.finfo(np.float32).tiny:
                test_tex_quantize.assert_same_bytes(quantized._data, test_tex_quantize.oracle(x, float(scale), fp8))


@pytest.mark.parametrize(("arguments", "error", "message"), [case for case in test_tex_gemm.REFUSED if "a tensor on" not in case[2]])
def test_wrong_products_write_nothing(runner: Runner, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    test_tex_gemm.test_wrong_arguments_write_nothing(runner, arguments, error, message)


@pytest.mark.parametrize(("packed", "separate", "count", "at"), test_tex_attention.PACKED)
def test_packed_layouts_are_served_as_separate_tensors(runner: Runner, packed: Any, separate: Any, count: int, at: int) -> None:
    lengths = {"lengths_q": (3, 3), "lengths_kv": (3, 3)}
    masks = test_tex_attention.M
    mask = masks.NVTE_PADDING_CAUSAL_MASK if "THD" in separate.name else masks.NVTE_CAUSAL_MASK
    given = test_tex_attention.tensors(problem := test_tex_attention.Problem(layout=separate, mask=mask, **lengths))
    same = test_tex_attention.replace(problem, layout=packed)
    assert torch.equal(test_tex_attention.forward(runner, problem, given)[0], test_tex_attention.forward(runner, same, given)[0])
