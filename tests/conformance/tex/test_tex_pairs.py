"""Two ways of the interface to one thing give the same bits: single and grouped products, one tensor's quantization, a list's and a split's,
one scale swizzle and many. And what is accumulated is rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tex_backends import Runner, runners
from torch import Tensor

from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.formats import format_of

E4M3 = DType.kFloat8E4M3
ROWS, COLUMNS, DEPTH = 32, 96, 64
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantizer(name: str) -> Any:
    made = {
        "delayed": lambda: Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), E4M3),
        "current": lambda: Float8CurrentScalingQuantizer(E4M3, torch.device("cpu")),
        "block": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        "mxfp8": lambda: MXFP8Quantizer(E4M3),
        "nvfp4": lambda: NVFP4Quantizer(),
    }[name]()
    made.set_usage(rowwise=True, columnwise=True)
    return made


FORMATS = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
EMPTY = torch.empty(0)


def operands(layout: str, dtype: torch.dtype, name: str, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    trans_a, trans_b = LAYOUTS[layout]
    shapes = (COLUMNS, DEPTH) if trans_a else (DEPTH, COLUMNS), (DEPTH, ROWS) if trans_b else (ROWS, DEPTH)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return (a, b) if name == "none" else (quantizer(name)(a), quantizer(name)(b))


def single(runner: Runner, a: Any, b: Any, layout: str, d: Tensor, accumulate: bool, bias: Tensor | None) -> Tensor:
    flags = LAYOUTS[layout]
    call = (a, flags[0], b, flags[1], d, None, d.dtype, bias, d.dtype, False, None, False, EMPTY, 0, accumulate, True)
    names = "A transA B transB D quantizer output_dtype bias bias_type gelu gelu_in grad workspace workspace_size accumulate"
    return runner("generic_gemm", **dict(zip([*names.split(), "use_split_accumulator"], call, strict=True)))[0]


def grouped(runner: Runner, problems: list[tuple[Any, Any]], layout: str, ds: list[Tensor], accumulate: bool, biases: list[Tensor]) -> list[Tensor]:
    flags, empty = LAYOUTS[layout], [EMPTY] * len(ds)
    runner(
        "te_general_grouped_gemm",
        A=[a for a, _ in problems],
        transa=flags[0],
        B=[b for _, b in problems],
        transb=flags[1],
        D=ds,
        D_type=ds[0].dtype,
        m_splits=[ROWS] * len(ds),
        bias=biases,
        bias_type=ds[0].dtype,
        single_output=False,
        pre_gelu_out=empty,
        grad=False,
        workspace=empty,
        workspaceSize=0,
        accumulate=accumulate,
        use_split_accumulator=True,
        math_sm_count=0,
    )
    return ds


def serving(function: str) -> list[Any]:
    return [pytest.param(runner, id=runner.backend) for runner in runners(function)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", serving("te_general_grouped_gemm"))
def test_single_and_grouped_products_agree(runner: Runner, dtype: torch.dtype, layout: str, name: str, accumulate: bool, with_bias: bool) -> None:
    problems = [operands(layout, dtype, name, seed) for seed in range(3)]
    begun = [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9 + i)).to(dtype) * 10 for i in range(3)]
    biases = [torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5)).to(dtype) if with_bias else EMPTY] * 3
    given = zip(problems, begun, biases, strict=True)
    alone = [single(runner, a, b, layout, d.clone(), accumulate, bias if with_bias else None) for (a, b), d, bias in given]
    together = grouped(runner, problems, layout, [d.clone() for d in begun], accumulate, biases)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other), f"{(one != other).float().mean():.3%} differ"


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("runner", serving("generic_gemm"))
def test_what_is_accumulated_is_rounded_once(runner: Runner, dtype: torch.dtype, layout: str, name: str, with_bias: bool) -> None:
    """Half a unit of the result beside what fp32 sums may be off by, where a second rounding would add half a unit of the product."""
    a, b = operands(layout, dtype, name, 3)
    d = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)).to(dtype) / 8
    bias = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5)).to(dtype) if with_bias else None
    found = single(runner, a, b, layout, d.clone(), True, bias)
    product = single(runner, a, b, layout, torch.zeros(ROWS, COLUMNS), False, None).double()
    exact = product + d.double() + (0 if bias is None else bias.double())
    unit = torch.exp2(torch.floor(torch.log2(exact.abs()))) * torch.finfo(dtype).eps
    slack = (DEPTH + 16) * 2.0**-24 * (product.abs() + d.double().abs() + 8)
    assert ((found.double() - exact).abs() <= unit / 2 + slack).all()


def parts(x: Any) -> list[Tensor]:
    """The buffers of a quantized tensor."""
    return [value for _, value in sorted(vars(x).items()) if type(value) is Tensor and value.dtype in (torch.uint8, torch.float32)]


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("runner", serving("quantize"))
def test_a_list_and_a_split_are_quantized_as_their_parts(runner: Runner, name: str) -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(6))
    pieces = list(x.split([32, 48, 16]) if name in ("delayed", "current", "block", "nvfp4") else x.split([32, 32, 32]))
    sections = [len(piece) for piece in pieces]
    try:
        alone = [runner("quantize", tensor=piece, quantizer=quantizer(name)) for piece in pieces]
        listed = runner("multi_tensor_quantize", tensor_list=pieces, quantizer_list=[quantizer(name) for _ in pieces])
        split = runner("split_quantize", tensor=x, split_sections=sections, quantizer_list=[quantizer(name) for _ in pieces])
    except NotImplementedError:
        assert runner.backend == "cpu"
        return
    for one, *others in zip(alone, listed, split, strict=True):
        for other in others:
            assert parts(one) and all(torch.equal(p, q) for p, q in zip(parts(one), parts(other), strict=True))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("runner", serving("swizzle_scales_for_gemm_"))
def test_scales_are_swizzled_alike_one_by_one_together_and_for_discrete_weights(runner: Runner, name: str) -> None:
    x = torch.randn(96, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float32).bfloat16()

    def fresh(padding: int) -> Any:
        made = runner("quantize", tensor=x, quantizer=quantizer(name))
        for usage in ("rowwise", "columnwise"):
            scales = getattr(made, f"_{usage}_scale_inv")
            lines, blocks = format_of(made).used_scales(x.shape, usage == "columnwise", False)
            scales[lines:], scales[:, blocks:] = padding, padding
        return made

    one, many, weight, clean = fresh(77), fresh(78), fresh(79), fresh(0)
    runner("swizzle_scales_for_gemm_", tensor=clean)
    runner("swizzle_scales_for_gemm_", tensor=one)
    runner("multi_tensor_swizzle_scales_for_gemm_", tensors=[many], rowwise_usage=True, columnwise_usage=True)
    for other in (many, clean):  # what pads them may be anything, and becomes 0
        assert all(torch.equal(p, q) for p, q in zip(parts(one), parts(other), strict=True))
    for usage in ("rowwise", "columnwise"):
        packed = runner(
            "swizzle_scales_and_pack_ptrs_for_discrete_weights",
            data_tensors=[getattr(weight, f"_{usage}_data")],
            scale_tensors=[getattr(weight, f"_{usage}_scale_inv")],
            swizzle_type="nvfp4" if name == "nvfp4" else f"mxfp8_{usage}",
            device=torch.device("cpu"),
        )[2]
        assert torch.equal(packed, getattr(one, f"_{usage}_scale_inv").reshape(-1))
