"""Grouped products against one product at a time: in float64 for the numbers, against generic_gemm for everything around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible import cpp_extensions, tex
from fusible.conformance.table import FLOATS, close
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, GroupedTensorStorage
from fusible.tex import DType

LISTS = on_backends("te_general_grouped_gemm")
GROUPS = on_backends(
    "te_general_grouped_gemm_for_grouped_tensor", "te_general_grouped_gemm_for_discrete_in", "te_general_grouped_gemm_for_discrete_out"
)
TYPES = pytest.mark.parametrize("dtype", FLOATS)
ROWS, N, K = [5, 0, 1, 10], 12, 8
TOTAL = sum(ROWS)
CODES = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16, torch.float16: DType.kFloat16}
NOTHING = torch.empty(0)
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(layout: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of every expert: weights and tokens, weights and gradients, or tokens and gradients."""
    weights = [values((N, K), dtype, 10 + i) for i in range(len(ROWS))]
    tokens = [values((rows, K), dtype, 20 + i) for i, rows in enumerate(ROWS)]
    gradients = [values((rows, N), dtype, 30 + i) for i, rows in enumerate(ROWS)]
    return {"TN": (weights, tokens), "NN": (weights, gradients), "NT": (tokens, gradients)}[layout]


def exact(layout: str, A: list[Tensor], B: list[Tensor]) -> list[Tensor]:
    transa, transb = LAYOUTS[layout]
    wide = [(a.double(), b.double()) for a, b in zip(A, B, strict=True)]
    return [(b.t() if transb else b) @ (a.t() if transa else a) for a, b in wide]


def depths(layout: str) -> list[int]:
    return {"TN": [K] * 4, "NN": [N] * 4, "NT": ROWS}[layout]


def grouped_gemm(runner: Runner, layout: str, A: Any, B: Any, D: Any, **changes: Any) -> Any:
    transa, transb = LAYOUTS[layout]
    call: dict[str, Any] = {
        "A": A,
        "transa": transa,
        "B": B,
        "transb": transb,
        "D": D,
        "D_type": CODES[(D or B)[0].dtype],
        "m_splits": ROWS,
        "bias": [torch.empty(0)] * len(A),
        "bias_type": DType.kBFloat16,
        "single_output": False,
        "pre_gelu_out": [torch.empty(0)] * len(A),
        "grad": False,
        "workspace": [],
        "workspaceSize": 0,
        "accumulate": False,
        "use_split_accumulator": True,
        "math_sm_count": 0,
    }
    return runner("te_general_grouped_gemm", **{**call, **changes})


@pytest.mark.skipif(not cpp_extensions.available or cpp_extensions.get_level() != "avx512bf16", reason="needs dot products of bfloat16")
def test_the_native_kernel_serves_what_it_gains_by() -> None:
    def serves(layout: str, dtype: torch.dtype, to: torch.dtype) -> str | None:
        A, B = operands(layout, dtype)
        D = blank(exact(layout, A, B), to)
        transa, transb = LAYOUTS[layout]
        call = (A, transa, B, transb, D, CODES[to], ROWS, [], None, False, [], False, [], 0, False, True, 0)
        return tex.explain("te_general_grouped_gemm", *call).backend

    assert serves("TN", torch.bfloat16, torch.bfloat16) == serves("NN", torch.bfloat16, torch.bfloat16) == "cpu"
    assert serves("NT", torch.bfloat16, torch.float32) == "cpu"
    assert serves("NT", torch.bfloat16, torch.bfloat16) == serves("TN", torch.float32, torch.float32) == "torch"


def blank(results: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.full(tuple(result.shape), 7.0, dtype=dtype) for result in results]


@LISTS
@TYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_each_problem_lands_in_its_tensor(runner: Runner, layout: str, dtype: torch.dtype, accumulate: bool) -> None:
    A, B = operands(layout, dtype)
    expected = exact(layout, A, B)
    D = blank(expected, dtype)
    bias = [torch.empty(0)] * 4
    assert grouped_gemm(runner, layout, A, B, D, accumulate=accumulate, bias=bias) is bias
    for got, product, depth in zip(D, expected, depths(layout), strict=True):
        close(got, product + 7 if accumulate else product, dtype, depth, 7 + 30.0)


@LISTS
@TYPES
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_a_single_output_is_filled_row_block_by_row_block(runner: Runner, layout: str, dtype: torch.dtype) -> None:
    A, B = operands(layout, dtype)
    D = torch.full((TOTAL + 2, N if layout == "TN" else K), 7.0, dtype=dtype)
    grouped_gemm(runner, layout, A, B, [D], single_output=True)
    close(D[:TOTAL], torch.cat(exact(layout, A, B)), dtype, N, 30.0)
    assert (D[TOTAL:] == 7).all()


@LISTS
def test_a_weight_gradient_fills_blocks_of_one_output_too(runner: Runner) -> None:
    A, B = operands("NT", torch.float32)
    D = torch.full((4 * N, K), 7.0)
    grouped_gemm(runner, "NT", A, B, [D], single_output=True)
    close(D, torch.cat(exact("NT", A, B)), torch.float32, max(ROWS), 30.0)
    assert not D[N : 2 * N].any()


@LISTS
@TYPES
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
def test_a_bias_is_added_in_fp32(runner: Runner, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    A, B = operands("TN", dtype)
    bias = [values((N,), bias_dtype or dtype, 40 + i) for i in range(4)]
    D = torch.zeros(TOTAL, N, dtype=dtype)
    assert grouped_gemm(runner, "TN", A, B, [D], single_output=True, bias=bias) is bias
    expected = torch.cat([product + x.double() for product, x in zip(exact("TN", A, B), bias, strict=True)])
    close(D, expected, dtype, K, 30.0)


@LISTS
@TYPES
def test_gelu_keeps_what_went_into_it(runner: Runner, dtype: torch.dtype) -> None:
    A, B = operands("TN", dtype)
    bias = [values((N,), dtype, 40 + i) for i in range(4)]
    pre = [torch.full((rows, N), 7.0, dtype=dtype) for rows in ROWS]
    D = [torch.zeros(rows, N, dtype=dtype) for rows in ROWS]
    grouped_gemm(runner, "TN", A, B, D, bias=bias, pre_gelu_out=pre)
    for i in (0, 2, 3):
        before = B[i].double() @ A[i].double().t() + bias[i].double()
        close(pre[i], before, dtype, K, 30.0)
        close(D[i], torch.nn.functional.gelu(before, approximate="tanh"), dtype, K, 30.0)


@LISTS
@TYPES
def test_bias_gradients_and_gelu_gradients(runner: Runner, dtype: torch.dtype) -> None:
    A, B = operands("NT", dtype)
    D, bias = [torch.zeros(N, K, dtype=dtype) for _ in ROWS], [torch.full((N,), 7.0, dtype=dtype) for _ in ROWS]
    grouped_gemm(runner, "NT", A, B, D, bias=bias, grad=True)
    for got, product, of_bias, b, rows in zip(D, exact("NT", A, B), bias, B, ROWS, strict=True):
        close(got, product, dtype, rows, 30.0)
        close(of_bias, b.double().sum(0), dtype, rows, 30.0)
    A, B = operands("NN", dtype)
    D, before = [torch.zeros(rows, K, dtype=dtype) for rows in ROWS], [values((rows, K), dtype, 50 + i) for i, rows in enumerate(ROWS)]
    kept = [x.clone() for x in before]
    grouped_gemm(runner, "NN", A, B, D, pre_gelu_out=before, grad=True)
    for got, product, x in zip(D, exact("NN", A, B), before, strict=True):
        point = x.double().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.nn.functional.gelu(point, approximate="tanh").sum(), point)
        close(got, product * slope, dtype, N, 60.0)
    assert all(torch.equal(x, y) for x, y in zip(before, kept, strict=True))


@LISTS
def test_empty_problems_clear_what_they_own(runner: Runner) -> None:
    A, B = [torch.ones(N, 0), torch.ones(N, 0)], [torch.ones(3, 0), torch.ones(3, 0)]
    bias, pre = [torch.full((N,), 7.0)] * 2, [torch.full((3, N), 7.0), torch.empty(0)]
    D = [torch.full((3, N), 7.0), torch.full((3, N), 7.0)]
    grouped_gemm(runner, "TN", A, B, D, bias=bias, pre_gelu_out=pre)
    assert not D[0].any() and not D[1].any() and not pre[0].any() and (bias[0] == 7).all()
    gradient = [torch.full((N,), 7.0)]
    kept = [torch.full((N, K), 7.0)]
    grouped_gemm(runner, "NT", [torch.ones(0, K)], [torch.ones(0, N)], kept, bias=gradient, pre_gelu_out=[NOTHING], grad=True, accumulate=True)
    assert not gradient[0].any() and (kept[0] == 7).all()


@LISTS
@TYPES
def test_without_outputs_the_bias_gradients_are_still_given(runner: Runner, dtype: torch.dtype) -> None:
    A, B = operands("NT", dtype)
    bias = [torch.full((N,), 7.0, dtype=dtype) for _ in ROWS]
    grouped_gemm(runner, "NT", A, B, None, bias=bias, grad=True)
    for of_bias, b in zip(bias, B, strict=True):
        close(of_bias, b.double().sum(0), dtype, max(ROWS), 30.0)


@LISTS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_operands_give_what_generic_gemm_gives(runner: Runner, layout: str) -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")
    A, B = [[quantizer(x) for x in operand] for operand in operands(layout, torch.bfloat16)]
    transa, transb = LAYOUTS[layout]
    D = blank(exact(layout, *operands(layout, torch.bfloat16)), torch.bfloat16)
    grouped_gemm(runner, layout, A, B, D)
    rest = (None, None, None, None, False, None, False, None, 0, False, True)
    names = "quantizer output_dtype bias bias_type gelu gelu_in grad workspace workspace_size accumulate use_split_accumulator".split()
    for a, b, d in zip(A, B, D, strict=True):
        alone = torch.zeros_like(d)
        REFERENCE("generic_gemm", A=a, transA=transa, B=b, transB=transb, D=alone, **dict(zip(names, rest, strict=True)))
        assert torch.equal(d, alone)


@LISTS
def test_a_problem_that_does_not_fit_stops_all_of_them(runner: Runner) -> None:
    A, B = operands("TN", torch.float32)
    D = [torch.full((rows, N), 7.0) for rows in ROWS]
    single = [torch.full((TOTAL, N), 7.0)]
    for kind, changes in (
        (ShapeError, {"A": [*A[:3], torch.zeros(N, K + 1)]}),
        (ShapeError, {"D": [*D[:3], torch.zeros(3, N)]}),
        (ShapeError, {"bias": [NOTHING, NOTHING, NOTHING, torch.zeros(N + 1)]}),
        (ShapeError, {"pre_gelu_out": [NOTHING, NOTHING, NOTHING, torch.zeros(N)]}),
        (ArgumentError, {"A": A[:3]}),
        (ArgumentError, {"bias": []}),
        (ArgumentError, {"D": single * 2, "single_output": True}),
        (ArgumentError, {"D": None, "single_output": True}),
        (ArgumentError, {"D": [torch.zeros(N, TOTAL).t()], "single_output": True}),
        (ShapeError, {"D": [single[0][1:]], "single_output": True}),
        (DTypeError, {"D_type": DType.kBFloat16}),
        (DTypeError, {"B": [*B[:3], B[3].double()]}),
    ):
        with pytest.raises(kind, match=": expected .*; "):
            grouped_gemm(runner, "TN", **{"A": A, "B": B, "D": D, "D_type": DType.kFloat32, **changes})
    assert all((d == 7).all() for d in (*D, *single))


def gather(parts: list[Tensor]) -> GroupedTensorStorage:
    """An unquantized grouped tensor with a gap of one row after its second member."""
    columns = parts[0].shape[1]
    gap = torch.full((1, columns), 7.0, dtype=parts[0].dtype)
    data = torch.cat([*parts[:2], gap, *parts[2:]])
    starts = [sum(part.numel() for part in parts[:i]) + (columns if i > 1 else 0) for i in range(len(parts))]
    offsets, rows = torch.tensor([*starts, data.numel()]), torch.tensor([len(part) for part in parts])
    shape, count = tuple(data.shape), len(parts)
    return GroupedTensorStorage(shape, data.dtype, num_tensors=count, data=data.view(-1), first_dims=rows, tensor_offsets=offsets)


def equal(parts: list[Tensor]) -> GroupedTensorStorage:
    data = torch.cat(parts).reshape(-1)
    return GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(num_tensors=len(parts), tensor_shape=tuple(parts[0].shape), rowwise_data=data)


def on_groups(runner: Runner, form: str, layout: str, A: Any, B: Any, D: Any, **changes: Any) -> Any:
    transa, transb = LAYOUTS[layout]
    call: dict[str, Any] = {"A": A, "transa": transa, "B": B, "transb": transb, "D": D, "bias": None, "bias_scale": None}
    call |= {"alpha": torch.ones(1), "beta": torch.zeros(1), "workspace_setup": NOTHING, "workspace_cublas": NOTHING}
    return runner(f"te_general_grouped_gemm_for_{form}", **{**call, **changes}, use_split_accumulator=True, math_sm_count=0)


@GROUPS
@TYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["grouped_tensor", "discrete_in", "discrete_out"])
def test_members_of_grouped_tensors_are_multiplied(runner: Runner, form: str, layout: str, dtype: torch.dtype) -> None:
    A, B = operands(layout, dtype)
    expected = exact(layout, A, B)
    D = blank(expected, dtype)
    weights = layout != "NT"
    grouped_a = A if form == "discrete_in" else equal(A) if weights else gather(A)
    grouped_d = D if form == "discrete_out" else gather(D) if weights else equal(D)
    assert on_groups(runner, form, layout, grouped_a, gather(B), grouped_d) is grouped_d
    results = D if form == "discrete_out" else grouped_d.split_into_quantized_tensors()
    for got, product, depth in zip(results, expected, depths(layout), strict=True):
        close(got, product, dtype, depth, 30.0)
    if form != "discrete_out" and weights:
        row = sum(ROWS[:2]) * D[0].shape[1]
        assert (grouped_d.rowwise_data[row : row + D[0].shape[1]] == 7).all()


@GROUPS
@TYPES
@pytest.mark.parametrize("count", [1, 4])
def test_alpha_beta_bias_and_its_scale_enter(runner: Runner, dtype: torch.dtype, count: int) -> None:
    A, B = operands("TN", dtype)
    alpha, beta = torch.linspace(0.5, 2.0, 4)[:count], torch.linspace(1.0, -1.0, 4)[:count]
    rows = torch.stack([values((N,), dtype, 40 + i) for i in range(4)])
    bias = GroupedTensorStorage((4, N), dtype, num_tensors=4, shapes=[(1, N)] * 4, data=rows.view(-1))
    vectors = GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(num_tensors=4, tensor_shape=(N,), rowwise_data=rows)
    factors = torch.linspace(-1.0, 1.0, TOTAL)
    per_row = [*factors.split(ROWS)]
    for given, scales in ((None, None), (bias, None), (vectors, factors), (bias, factors)):
        slack = 0 if given is None else 0.5 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps  # the product is rounded before its bias
        D = gather([torch.full((m, N), 3.0, dtype=dtype) for m in ROWS])
        on_groups(runner, "grouped_tensor", "TN", equal(A), gather(B), D, alpha=alpha, beta=beta, bias=given, bias_scale=scales)
        for i, (got, product) in enumerate(zip(D.split_into_quantized_tensors(), exact("TN", A, B), strict=True)):
            a, b = alpha[i % count].double(), beta[i % count].double()
            addition = rows[i].double() if given is not None else torch.zeros(N).double()
            wide = addition * (per_row[i].double()[:, None] if scales is not None else 1.0)
            close(got, a * product + 3 * b + wide, dtype, K + int(slack), 60.0)


@GROUPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", [None, torch.linspace(-1.0, 1.0, TOTAL)], ids=["plain", "scaled"])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
def test_a_bias_of_a_group_is_added_to_the_rounded_product(
    runner: Runner, dtype: torch.dtype, scales: Tensor | None, bias_dtype: torch.dtype | None
) -> None:
    A, B = operands("TN", dtype)
    rows = torch.stack([values((N,), bias_dtype or dtype, 40 + i) for i in range(4)])
    bias = GroupedTensorStorage((4, N), rows.dtype, num_tensors=4, data=rows.view(-1))
    without, with_bias = (gather([torch.full((m, N), 3.0, dtype=dtype) for m in ROWS]) for _ in range(2))
    on_groups(runner, "grouped_tensor", "TN", equal(A), gather(B), without, beta=torch.ones(1))
    on_groups(runner, "grouped_tensor", "TN", equal(A), gather(B), with_bias, beta=torch.ones(1), bias=bias, bias_scale=scales)
    factors = (scales if scales is not None else torch.ones(TOTAL)).split(ROWS)
    members = zip(without.split_into_quantized_tensors(), with_bias.split_into_quantized_tensors(), rows, factors, strict=True)
    for product, got, row, factor in members:
        # The factor's product is exact in float64, its sum nearly: where fp32 rounds before D's dtype does, both neighbours are right.
        exact_sum = product.double() + row.double() * factor.double()[:, None]
        assert (got.double() - exact_sum).abs().le(exact_sum.abs() * (torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps) + 1e-6).all()


@GROUPS
def test_quantized_groups_give_what_their_members_give(runner: Runner) -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")
    for layout in LAYOUTS:
        A, B = operands(layout, torch.bfloat16)
        rows_a = None if layout != "NT" else torch.tensor(ROWS)
        make = [{"tensor": torch.cat(x), "quantizer": quantizer, "num_tensors": 4} for x in (A, B)]
        grouped_a = REFERENCE("group_quantize", **make[0], first_dims=rows_a)
        grouped_b = REFERENCE("group_quantize", **make[1], first_dims=torch.tensor(ROWS))
        D = blank(exact(layout, A, B), torch.bfloat16)
        on_groups(runner, "discrete_out", layout, grouped_a, grouped_b, D)
        alone = [torch.zeros_like(d) for d in D]
        grouped_gemm(REFERENCE, layout, [quantizer(x) for x in A], [quantizer(x) for x in B], alone)
        assert all(torch.equal(x, y) for x, y in zip(D, alone, strict=True))
        # The copy that the forward does not need is dropped; the other serves alone.
        grouped_b.rowwise_data = grouped_b.scale_inv = None
        again = blank(D, torch.bfloat16)
        on_groups(runner, "discrete_out", layout, grouped_a, grouped_b, again)
        assert all(torch.equal(x, y) for x, y in zip(again, alone, strict=True))


@GROUPS
def test_groups_that_do_not_fit_are_refused(runner: Runner) -> None:
    A, B = operands("TN", torch.float32)
    D = [torch.full((rows, N), 7.0) for rows in ROWS]
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")
    quantized = REFERENCE("group_quantize", tensor=torch.cat(D), quantizer=quantizer, num_tensors=4, first_dims=torch.tensor(ROWS))
    bias = equal([torch.zeros(1, N)] * 4)
    for kind, changes in (
        (ArgumentError, {"A": A[:3]}),
        (DTypeError, {"A": torch.zeros(N, K)}),
        (DTypeError, {"D": quantized}),
        (ArgumentError, {"bias_scale": torch.ones(TOTAL)}),
        (ShapeError, {"bias": bias, "bias_scale": torch.ones(TOTAL - 1)}),
        (ShapeError, {"bias": equal([torch.zeros(1, N + 1)] * 4)}),
        (ShapeError, {"alpha": torch.ones(3)}),
        (ShapeError, {"beta": torch.ones(2)}),
        (ShapeError, {"A": [*A[:3], torch.zeros(N, K + 1)]}),
    ):
        with pytest.raises(kind, match=": expected .*; "):
            on_groups(runner, "discrete_in", "TN", **{"A": A, "B": gather(B), "D": D, **changes})
    assert all((d == 7).all() for d in D)


def test_no_workspace_is_needed() -> None:
    assert REFERENCE("get_grouped_gemm_setup_workspace_size", num_tensors=64) == 0


@LISTS
@TYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lie", ["stacked", "every other", "backwards", "apart"])
def test_alike_experts_agree_however_their_matrices_lie(runner: Runner, layout: str, dtype: torch.dtype, lie: str) -> None:
    """Those that lie evenly in one storage may be one batched product; the memory between them is neither read nor written."""
    rows, experts = 6, 4

    def lay(*shape: int, seed: int) -> tuple[list[Tensor], Tensor]:
        stack = values((2 * experts, *shape), dtype, seed)
        matrices = list({"every other": stack[::2]}.get(lie, stack[:experts]))
        if lie == "apart":
            matrices = [matrix.clone() for matrix in matrices]
        return matrices[::-1] if lie == "backwards" else matrices, stack

    shapes = {"TN": ((N, K), (rows, K), (rows, N)), "NN": ((N, K), (rows, N), (rows, K)), "NT": ((rows, K), (rows, N), (N, K))}[layout]
    (A, _), (B, _), (D, around) = (lay(*shape, seed=seed) for seed, shape in enumerate(shapes))
    between = around[1::2] if lie == "every other" else around[experts:]
    before = between.clone()
    grouped_gemm(runner, layout, A, B, D, m_splits=[rows] * experts)
    for got, product in zip(D, exact(layout, A, B), strict=True):
        close(got, product, dtype, max(rows, N, K), 30.0)
    assert torch.equal(between, before)
