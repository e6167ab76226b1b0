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
import test_tex_kv_cache
import test_tex_optimizer
import test_tex_optimizer_variants
import test_tex_prim
import test_tex_quantize
import test_tex_recipe
import test_tex_rules
import test_tex_token_layouts
import torch
from tex_backends import Runner
from xla_runner import RUNNER, adopted

from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex import DType

pytest.importorskip("jaxlib")
pytestmark = pytest.mark.parametrize("runner", [pytest.param(RUNNER, id="xla")])

MODULES = (
    test_tex_attention, test_tex_dropout, test_tex_gemm, test_tex_kv_cache, test_tex_optimizer, test_tex_prim, test_tex_quantize, test_tex_recipe,
    test_tex_rules, test_tex_token_layouts,
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

OF_ANOTHER_ORDER = {"test_a_paged_cache_reads_as_the_dense_one_of_its_pages"}
"""Restated here: scores of a paged cache are summed by themselves."""

for module in MODULES:
    for name, test in adopted(module).items():
        if name not in OF_MEMORY_OR_GENERATORS | OF_SUBNORMALS_OR_DEVICES | OF_ANOTHER_ORDER:
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


@pytest.mark.parametrize(("name", "page"), [("bf16", 48), ("a few tokens each, and none", 1), ("a prompt beside single tokens", 16), ("window", 256)])
def test_a_paged_cache_reads_what_its_pages_hold(runner: Runner, name: str, page: int) -> None:
    """And nothing past a sequence's end, whatever is there."""
    problem, given = test_tex_kv_cache.generation(name)
    expected = test_tex_kv_cache.forward(test_tex_kv_cache.Runner("torch"), problem, given)
    generator = torch.Generator().manual_seed(page)
    held = [x.clone() for x in given.packed[1:]]
    for x in held:
        for row, length in zip(x, problem.lengths_kv, strict=True):
            row[length:] = float("nan")
    (k, table_k), (v, table_v) = (test_tex_kv_cache.paged(x, page, generator, page == 16) for x in held)
    if problem.lengths_kv[1] <= page:
        table_k[1, 1:] = table_v[1, 1:] = -1
    layouts = test_tex_kv_cache.L
    layout = layouts.NVTE_Paged_KV_THD_SBHD_SBHD if page == 16 else layouts.NVTE_Paged_KV_THD_BSHD_BSHD
    changes = {"K": k, "V": v, "qkv_layout": layout, "page_table_k": table_k, "page_table_v": table_v}
    got = test_tex_kv_cache.forward(runner, problem, given, **changes)
    length, eps = problem.width + problem.max_kv, torch.finfo(torch.float32).eps
    # Both are rounded once to the output's type, from fp32 sums of that length.
    size = 8.0 + 0.5 * torch.finfo(problem.dtype).eps * 8.0 / eps / (length + 16)
    test_tex_kv_cache.close(got[0], expected[0].double(), problem.dtype, length, size)
    test_tex_kv_cache.close(got[1], expected[1].double(), torch.float32, length, 8.0)


def test_words_are_those_of_the_reference_where_arithmetic_is_exact(runner: Runner) -> None:
    """Moments and rates of few bits, so that no step but the last one rounds (of others XLA may round a product and its sum once); remainders of both
    signs, and ties."""
    generator = torch.Generator().manual_seed(8)
    n, options = 4096, {"lr": 2.0**-6, "step": 1, "mode": 1, "bias_correction": 0}
    rates = {"beta1": 0.5, "beta2": 0.5, "epsilon": 0.0, "weight_decay": 0.0}
    ones = torch.randint(2, (n,), generator=generator) * 2.0 - 1
    master = torch.randn(n, generator=generator).view(torch.int32)
    master[:64] = (master[:64] & ~0xFFFF) | 0x8000
    high = ((master + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    tensors = [[ones], [high], [torch.randint(-3, 4, (n,), generator=generator).float()], [torch.ones(n)], [master.to(torch.int16)]]
    found = []
    for each in (runner, test_tex_optimizer_variants.REFERENCE):
        own = test_tex_optimizer_variants.copied(tensors)
        each("multi_tensor_adam_param_remainder", **test_tex_optimizer_variants.call(own, **options, **rates))
        found.append(own)
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert not torch.equal(found[0][4][0], tensors[4][0])
