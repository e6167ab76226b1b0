"""Small unquantized products are the native kernel's, large ones are handed over; whoever computes one, it is the product; sums have one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusible import cpp_extensions, tex
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex.backends.cpu import gemm as products

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="the native kernels are not built")

DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = [(True, False), (False, False), (False, True), (True, True)]


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each product that the backend ``cpu`` hands over."""
    seen: list[str] = []
    real = products._of_next

    def heard(backend: Any) -> Any:
        seen.append(backend.NAME)
        return real(backend)

    monkeypatch.setattr(products, "_of_next", heard)
    return seen


def operands(rows: int, columns: int, depth: int, transA: bool, transB: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns + depth)
    a = torch.randn((columns, depth) if transA else (depth, columns), generator=generator).to(dtype)
    b = torch.randn((depth, rows) if transB else (rows, depth), generator=generator).to(dtype)
    return a, b


def gemm(A: Any, transA: bool, B: Any, transB: bool, **more: Any) -> Any:
    given = {"D": None, "quantizer": None, "output_dtype": A.dtype, "bias": None, "bias_type": None, "gelu": False, "gelu_in": None, "grad": False}
    given |= {"workspace": None, "workspace_size": 0, "accumulate": False, "use_split_accumulator": True}
    return tex.generic_gemm(A, transA, B, transB, **(given | more))


def bound(a: torch.Tensor, b: torch.Tensor, transA: bool, transB: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and how far one may be from it: a rounding of each sum, and one of the result."""
    left, right = (b.double().t() if transB else b.double()), (a.double().t() if transA else a.double())
    exact = left @ right
    return exact, left.shape[1] * 2.0**-23 * (left.abs() @ right.abs()) + torch.finfo(dtype).eps * exact.abs() + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("transA", "transB"), LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 64, 64), (5, 7, 9), (24, 33, 65), (64, 128, 64), (40, 300, 70), (200, 130, 150)], ids=str)
def test_a_product_is_the_product_whoever_computes_it(dtype: torch.dtype, transA: bool, transB: bool, sizes: tuple[int, int, int]) -> None:
    a, b = operands(*sizes, transA, transB, dtype)
    exact, most = bound(a, b, transA, transB, dtype)
    bias = torch.randn(sizes[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    assert ((gemm(a, transA, b, transB)[0].double() - exact).abs() <= most).all()
    with_bias = gemm(a, transA, b, transB, bias=bias)[0].double()
    assert ((with_bias - exact - bias.double()).abs() <= most + torch.finfo(dtype).eps * (exact.abs() + bias.double().abs())).all()
    product, sums, *_ = gemm(a, transA, b, transB, grad=True, bias=bias)
    assert ((product.double() - exact).abs() <= most).all()
    assert torch.equal(sums, tex.prim.row_sum(b)), "the sum that goes with a product is that which stands alone"


@pytest.mark.parametrize("sizes", [(16, 32, 48), (130, 140, 150)], ids=str)
def test_the_gradient_of_a_bias_behind_a_gelu_is_the_sum_of_what_comes_of_it(sizes: tuple[int, int, int]) -> None:
    a, b = operands(*sizes, False, False, torch.float32)
    bias, before = torch.zeros(sizes[1]), torch.randn(sizes[0], sizes[1])
    found, sums, *_ = gemm(a, False, b, False, grad=True, bias=bias, gelu=True, gelu_in=before)
    with tex.set_backend("torch", strict=True):
        wanted, of_wanted, *_ = gemm(a, False, b, False, grad=True, bias=bias, gelu=True, gelu_in=before)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, of_wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(16, 32, 32), (128, 160, 128)], ids=str)
def test_a_product_is_quantized_with_the_gradient_of_a_bias(sizes: tuple[int, int, int]) -> None:
    a, b = operands(*sizes, False, False, torch.float32)
    quantizer, bias = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3), torch.zeros(sizes[1])
    found, sums, *_ = gemm(a, False, b, False, grad=True, bias=bias, quantizer=quantizer)
    exact, most = bound(a, b, False, False, torch.float32)
    assert ((tex.dequantize(found, torch.float32).double() - exact).abs() <= most + exact.abs() / 16 + exact.abs().max() / 448).all()
    torch.testing.assert_close(sums.float(), b.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_handed_over_by_the_largest_of_its_matrices(dtype: torch.dtype, handed_over: list[str]) -> None:
    edge = products._done_here(cpp_extensions.get_level(), dtype)
    if edge in (0, products._ALL):
        pytest.skip("this level hands over all of them, or none")
    wide = edge // 64
    for rows, columns, depth, large in (
        *((16, wide, 64, False), (16, wide + 1, 64, True), (16, 64, wide, False), (16, 64, wide + 1, True)),
        *((wide, 64, 16, False), (wide + 1, 64, 16, True), (wide, 16, 64, False), (wide + 1, 16, 64, True)),
    ):
        for transA, transB in LAYOUTS[:3]:
            a, b = operands(rows, columns, depth, transA, transB, dtype)
            gemm(a, transA, b, transB)
            kernels_alone = dtype is torch.bfloat16 and transB  # which torch was never asked for
            assert bool(handed_over) is (large and not kernels_alone), (rows, columns, depth, transA, transB)
            handed_over.clear()


@pytest.mark.skipif(
    cpp_extensions.available and cpp_extensions.get_level() != "amx", reason="without tiles, bf16 is the kernel's or torch's, whatever its size"
)
def test_few_rows_of_bf16_are_the_kernels_whatever_the_matrix(handed_over: list[str]) -> None:
    a, b = operands(1, 700, 300, True, False, torch.bfloat16)
    gemm(a, True, b, False)
    gemm(a, True, b.repeat(8, 1), False)
    assert not handed_over
    gemm(a, True, b.repeat(9, 1), False)
    assert handed_over == ["cpu"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_no_other_may_serve_the_kernel_does(dtype: torch.dtype, handed_over: list[str]) -> None:
    a, b = operands(130, 140, 150, True, False, dtype)
    bias = torch.zeros(140, dtype=dtype)
    exact, most = bound(a, b, True, False, dtype)
    with tex.set_backend("cpu", strict=True):
        found, sums, *_ = gemm(a, True, b, False, grad=True, bias=bias)
    assert ((found.double() - exact).abs() <= most).all() and torch.equal(sums, tex.prim.row_sum(b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_laid_out_otherwise_negated_or_of_a_subclass_is_multiplied_all_the_same(dtype: torch.dtype) -> None:
    class Named(torch.Tensor):
        pass

    a, b = operands(16, 32, 64, True, False, dtype)
    exact, most = bound(a, b, True, False, dtype)
    apart, reals = torch.empty(16, 128, dtype=dtype)[:, ::2].copy_(b), torch.complex(torch.zeros(16, 64), -b.float()).conj().imag
    negated = reals if dtype is torch.float32 else b
    for other in (apart, negated, b.as_subclass(Named), b.view(2, 8, 64), torch.nn.Parameter(b)):
        with torch.no_grad():
            found = gemm(a, True, other, False)[0]
        assert found.shape == (*other.shape[:-1], 32) and ((found.double().view(16, 32) - exact).abs() <= most).all()
    with FakeTensorMode() as mode:
        fake = gemm(mode.from_tensor(a), True, mode.from_tensor(b), False)[0]
    assert fake.shape == (16, 32) and fake.dtype is dtype


@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, 0, 4), (4, 4, 0)], ids=str)
def test_nothing_times_something(sizes: tuple[int, int, int]) -> None:
    rows, columns, depth = sizes
    found = gemm(torch.ones(columns, depth), True, torch.ones(rows, depth), False)[0]
    assert torch.equal(found, torch.zeros(rows, columns))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_sums_of_rows_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 5], x[4, 6], x[5, 7] = torch.nan, torch.inf, -torch.inf
    exact = x.double().sum(0)
    for given in (x, x.view(3, 100, 40), x.t().contiguous().t(), x[:, :1].expand(300, 40)):
        want = exact if given.shape[-1] == 40 and given.stride(-1) else exact[:1].expand(40)
        found = tex.prim.row_sum(given).double()
        finite = want.isfinite()
        assert torch.equal(finite, found.isfinite()) and torch.equal(found[~finite].isnan(), want[~finite].isnan())
        most = 300 * 2.0**-23 * x.double().nan_to_num(0, 0, 0).abs().sum(0) + torch.finfo(dtype).eps * want.abs()
        assert ((found - want).abs()[finite] <= most[finite]).all()
    assert tex.prim.row_sum(x, torch.float32).dtype is torch.float32
