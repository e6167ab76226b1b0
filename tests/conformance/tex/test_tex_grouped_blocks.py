"""Grouped tensors of the block formats: every member is to the bit what quantizing it alone gives, and multiplies as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, NVFP4, block_format_of

QUANTIZERS = on_backends("group_quantize", "group_dequantize", "bgrad_group_quantize", "group_requantize_inplace")
PRODUCTS = on_backends("te_general_grouped_gemm", "te_general_grouped_gemm_for_grouped_tensor", "generic_gemm")
ROWS, K, N = [32, 0, 128, 64], 256, 128
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

FORMATS: dict[str, Callable[..., Any]] = {
    "block 1x128": lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usages),
    "block 128x128": lambda **usages: Float8BlockQuantizer(E5M2, force_pow_2_scales=False, **usages),
    "mxfp8": lambda **usages: MXFP8Quantizer(E4M3, **usages),
    "mxfp8 tiles": lambda **usages: MXFP8Quantizer(E5M2, with_2d_quantization=True, **usages),
    "nvfp4": lambda **usages: NVFP4Quantizer(**usages),
    "nvfp4 tiles": lambda **usages: NVFP4Quantizer(with_2d_quantization=True, **usages),
    "nvfp4 transformed": lambda **usages: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **usages),
    "nvfp4 4 over 6": lambda **usages: NVFP4Quantizer(nvfp4_use_4over6=True, **usages),
    "nvfp4 rows": lambda **usages: NVFP4Quantizer(row_scaled_nvfp4=True, **usages),
}
EACH = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in FORMATS.items()])
ONE_OF_EACH = pytest.mark.parametrize("make", [pytest.param(FORMATS[name], id=name) for name in ("block 1x128", "block 128x128", "mxfp8", "nvfp4")])
SWIZZLED = pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])


def spread(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Normal numbers whose size differs from block to block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-4, 4, (rows, columns // 16), generator=generator).repeat_interleave(16, 1)
    return (torch.randn(rows, columns, generator=generator) * 2.0**sizes).bfloat16()


def group(runner: Runner, x: Tensor, quantizer: Any, **changes: Any) -> Any:
    return runner("group_quantize", tensor=x, quantizer=quantizer, num_tensors=4, **{"first_dims": torch.tensor(ROWS), **changes})


def same(member: Any, x: Tensor, quantizer: Any) -> None:
    """``member`` has every buffer of ``x`` quantized alone, and no other."""
    alone = REFERENCE("quantize", tensor=x, quantizer=quantizer)
    assert type(member).__name__.removesuffix("Storage") == type(alone).__name__.removesuffix("Storage")
    for name in block_format_of(quantizer).buffer_specs(quantizer, tuple(x.shape), True, True):
        got, wanted = getattr(member, f"_{name}"), getattr(alone, f"_{name}")
        assert (got is None) == (wanted is None), name
        assert got is None or (got.shape == wanted.shape and got.dtype is wanted.dtype and torch.equal(got, wanted)), name
    assert getattr(member, "_with_gemm_swizzled_scales", False) == getattr(alone, "_with_gemm_swizzled_scales", False)


def with_swizzling(quantizer: Any, swizzled: bool) -> Any:
    quantizer.optimize_for_gemm = swizzled
    return quantizer


@QUANTIZERS
@EACH
@SWIZZLED
@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "rowwise", "columnwise"])
def test_each_member_is_quantized_by_itself(runner: Runner, make: Any, swizzled: bool, usages: dict[str, bool]) -> None:
    x, quantizer = spread(sum(ROWS), K), with_swizzling(make(**usages), swizzled)
    grouped = group(runner, x, quantizer)
    for member, piece in zip(grouped.split_into_quantized_tensors(), x.split(ROWS), strict=True):
        same(member, piece, quantizer)
    equal = group(runner, x[:128], quantizer, first_dims=None)
    for member, piece in zip(equal.split_into_quantized_tensors(), x[:128].split(32), strict=True):
        same(member, piece, quantizer)


@QUANTIZERS
@EACH
def test_members_apart_and_out_of_order(runner: Runner, make: Any) -> None:
    x, quantizer = spread(256, K), make()
    rows, starts = [32, 64, 32, 64], [192, 0, 64, 128]
    offsets = torch.tensor([start * K for start in starts] + [x.numel()])
    grouped = group(runner, x, quantizer, first_dims=torch.tensor(rows), tensor_offsets=offsets)
    for member, count, start in zip(grouped.split_into_quantized_tensors(), rows, starts, strict=True):
        same(member, x[start : start + count], quantizer)


@QUANTIZERS
@ONE_OF_EACH
def test_an_output_is_written_unless_told_otherwise(runner: Runner, make: Any) -> None:
    first, second, quantizer = spread(sum(ROWS), K), spread(sum(ROWS), K, 2), make()
    output = group(runner, first, quantizer)
    for x, flag, wanted in ((second, torch.ones(1), first), (second, torch.zeros(1), second), (first, None, first)):
        assert group(runner, x, quantizer, output=output, noop_flag=flag) is output
        for member, piece in zip(output.split_into_quantized_tensors(), wanted.split(ROWS), strict=True):
            same(member, piece, quantizer)


@QUANTIZERS
@EACH
def test_dequantizing_and_bias_gradients(runner: Runner, make: Any) -> None:
    x, quantizer = spread(sum(ROWS), K), make()
    grouped, sums = runner("bgrad_group_quantize", tensor=x, quantizer=quantizer, num_tensors=4, first_dims=torch.tensor(ROWS))
    values = runner("group_dequantize", input=grouped, otype=DType.kFloat32)
    pieces = zip(values.split_into_quantized_tensors(), grouped.split_into_quantized_tensors(), x.split(ROWS), strict=True)
    for i, (value, member, piece) in enumerate(pieces):
        same(member, piece, quantizer)
        alone = REFERENCE("quantize", tensor=piece, quantizer=quantizer)
        assert torch.equal(value, REFERENCE("dequantize", input=alone, otype=DType.kFloat32))
        assert torch.equal(sums[i], piece.float().sum(0).bfloat16())


@QUANTIZERS
@EACH
@SWIZZLED
def test_requantizing_adds_the_copy_of_the_dequantized_members(runner: Runner, make: Any, swizzled: bool) -> None:
    x = spread(sum(ROWS), K)
    arrived = group(runner, x, with_swizzling(make(columnwise=False), swizzled))
    rows = arrived.rowwise_data.clone()
    plain = [REFERENCE("dequantize", input=member, otype=DType.kBFloat16) for member in arrived.split_into_quantized_tensors()]
    call = {"quantizer": make(), "num_tensors": 4, "first_dims": torch.tensor(ROWS), "otype": DType.kBFloat16}
    values = runner("group_requantize_inplace", grouped_x=arrived, **call, return_dequantized=True)
    assert torch.equal(values, torch.cat(plain)) and torch.equal(arrived.rowwise_data, rows)
    alone = with_swizzling(make(rowwise=False), swizzled)
    arrived.rowwise_data = arrived.scale_inv = None
    for member, value in zip(arrived.split_into_quantized_tensors(), plain, strict=True):
        same(member, value, alone)


def products(layout: str) -> tuple[list[Tensor], list[Tensor], bool, bool, list[tuple[int, int]]]:
    """``(A, B, transa, transb, shapes of D)`` of the four experts."""
    weights = [spread(N, K, 10 + i) for i in range(4)]
    tokens, gradients = [*spread(sum(ROWS), K, 20).split(ROWS)], [*spread(sum(ROWS), N, 30).split(ROWS)]
    if layout == "TN":
        return weights, tokens, True, False, [(rows, N) for rows in ROWS]
    if layout == "NN":
        return weights, gradients, False, False, [(rows, K) for rows in ROWS]
    return tokens, gradients, False, True, [(N, K)] * 4


@PRODUCTS
@ONE_OF_EACH
@SWIZZLED
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_products_are_those_of_the_members(runner: Runner, make: Any, swizzled: bool, layout: str) -> None:
    A, B, transa, transb, shapes = products(layout)
    quantizer = with_swizzling(make(), swizzled)
    a, b = ([REFERENCE("quantize", tensor=x, quantizer=quantizer) for x in operand] for operand in (A, B))
    names = "quantizer output_dtype bias bias_type gelu gelu_in grad workspace workspace_size accumulate use_split_accumulator".split()
    rest = dict(zip(names, (None, None, None, None, False, None, False, None, 0, False, True), strict=True))
    wanted = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    for x, y, d in zip(a, b, wanted, strict=True):
        if 0 not in (*x.shape, *y.shape):
            runner("generic_gemm", A=x, transA=transa, B=y, transB=transb, D=d, **rest)
    D = [torch.full(shape, 7.0, dtype=torch.bfloat16) for shape in shapes]
    nothing = [torch.empty(0)] * 4
    runner(
        "te_general_grouped_gemm", A=a, transa=transa, B=b, transb=transb, D=D, D_type=DType.kBFloat16, m_splits=ROWS, bias=nothing,
        bias_type=DType.kBFloat16, single_output=False, pre_gelu_out=nothing, grad=False, workspace=[], workspaceSize=0, accumulate=False,
        use_split_accumulator=True, math_sm_count=0,
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(D, wanted, strict=True)) and any(x.any() for x in D)
    groups = [group(REFERENCE, torch.cat(x), quantizer, first_dims=torch.tensor([len(each) for each in x])) for x in (A, B)]
    outs = [torch.full(shape, 7.0, dtype=torch.bfloat16) for shape in shapes]
    runner(
        "te_general_grouped_gemm_for_discrete_out", A=groups[0], transa=transa, B=groups[1], transb=transb, D=outs, bias=None, bias_scale=None,
        alpha=torch.ones(1), beta=torch.zeros(1), workspace_setup=None, workspace_cublas=None, use_split_accumulator=True, math_sm_count=0,
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(outs, wanted, strict=True))


@QUANTIZERS
def test_given_amaxes_scale_each_member_of_nvfp4(runner: Runner) -> None:
    """Its own amaxes give what ``group_quantize`` gives; others take their place."""
    x, quantizer = spread(sum(ROWS), K), NVFP4Quantizer()
    plain = group(runner, x, quantizer)
    call = {"tensor": x, "quantizer": quantizer, "num_tensors": 4, "first_dims": torch.tensor(ROWS)}
    given = {"rowwise_amax": plain.amax.clone(), "columnwise_amax": plain.columnwise_amax.clone()}
    grouped = runner("nvfp4_group_quantize_with_amax", **call, **given)
    for name in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax"):
        assert torch.equal(getattr(grouped, name), getattr(plain, name)), name
    doubled = runner("nvfp4_group_quantize_with_amax", **call, **{name: 2 * amax for name, amax in given.items()})
    assert torch.equal(doubled.amax, 2 * plain.amax) and not torch.equal(doubled.scale_inv, plain.scale_inv)


def test_every_block_format_is_tried() -> None:
    assert {block_format_of(make()) for make in FORMATS.values()} == {FLOAT8_BLOCKS, MXFP8, NVFP4}
