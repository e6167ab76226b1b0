"""The native matrix product against float64, at every level: layouts, kinds of operands, sizes around the tiles, epilogues, threads."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fusible import cpp_extensions as native
from fusible.errors import ArgumentError, DTypeError, ShapeError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [torch.float32, torch.float16, torch.bfloat16, E4M3, E5M2]
SIZES = st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 33, 63, 64, 65, 97, 130, 200])


def random(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(x: Tensor, transposed: bool) -> Tensor:
    return x.float().t().contiguous().to(x.dtype) if transposed else x


def product(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32, flags: tuple[bool, bool] = (False, False), **more: Any) -> Tensor:
    """``left @ right`` by the kernel, each stored as its flag says."""
    out = more.pop("out", None)
    out = torch.empty(left.shape[0], right.shape[1], dtype=dtype) if out is None else out
    scales = more.pop("scales", (1.0, 1.0))
    a, b = stored(left, flags[0]), stored(right, flags[1])
    native.gemm(a, flags[0], left.dtype, scales[0], b, flags[1], right.dtype, scales[1], out, dtype, **more)
    return out


def bound(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What accumulation in fp32 and one rounding may be off by: depth roundings of the sum of magnitudes, and half an ulp of the result."""
    size = left.double().abs() @ right.double().abs()
    eps32 = torch.finfo(torch.float32).eps
    return size * (left.shape[1] + 2) * eps32 + size * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny


def agree(result: Tensor, expected: Tensor, allowed: Tensor) -> None:
    error = (result.double() - expected).abs()
    assert bool((error <= allowed).all()), f"off by {(error / allowed).max().item():.2f} times what is allowed"


@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, False), (True, True)])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=SIZES, n=SIZES, k=SIZES, data=st.data())
def test_layouts_and_sizes(level: str, flags: tuple[bool, bool], m: int, n: int, k: int, data: st.DataObject) -> None:
    left = random(m, k, data.draw(st.sampled_from(KINDS)))
    right = random(k, n, data.draw(st.sampled_from(KINDS)), seed=1)
    dtype = data.draw(st.sampled_from(KINDS[:3]))
    agree(product(left, right, dtype, flags), left.double() @ right.double(), bound(left, right, dtype))


BLOCKS = [(400, 150, 70), (130, 520, 40), (600, 610, 1300), (70, 80, 20000), (20, 70, 4500), (3, 60, 8300), (1, 300, 5000), (5, 1, 2049)]


@pytest.mark.parametrize(("m", "n", "k"), BLOCKS)
@pytest.mark.parametrize("flags", [(False, True), (True, False)])
def test_blocks_and_rounds(level: str, flags: tuple[bool, bool], m: int, n: int, k: int) -> None:
    left, right = random(m, k, E4M3), random(k, n, E5M2, seed=1)
    agree(product(left, right, flags=flags), left.double() @ right.double(), bound(left, right))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize("k", [40, 333])
def test_a_row_alone_is_to_the_bit_that_among_few(level: str, kind: torch.dtype, k: int) -> None:
    """However many sums of lanes are added up together, and whichever are left over: columns of all that go together, and the last ones."""
    rows = 2 if level == "amx" and kind is E4M3 else 8  # more codes are multiplied by tiles there
    left, right = random(rows, k, torch.float32 if kind is torch.float32 else torch.bfloat16), random(61, k, kind, seed=1)

    def of(x: Tensor) -> Tensor:
        out = torch.empty(len(x), 61)
        native.gemm(x, False, x.dtype, 1.0, right, True, kind, 1.0, out, torch.float32)
        return out

    alone = torch.cat([of(row[None]) for row in left])
    agree(alone, left.double() @ right.double().t(), bound(left, right.t()))
    for count in range(2, rows + 1):
        assert torch.equal(of(left[:count]), alone[:count]), count


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k"), [(9, 64), (9, 333), (16, 96), (24, 160), (24, 600)])
def test_few_rows_of_which_some_pack_the_right_operand(level: str, kind: torch.dtype, m: int, k: int) -> None:
    left, right = random(m, k, kind), random(k, 70, kind, seed=1)
    agree(product(left, right, flags=(False, True)), left.double() @ right.double(), bound(left, right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k"), [(30, 600), (64, 601), (90, 600), (128, 601)])
def test_a_right_operand_gives_the_same_wherever_it_lies(level: str, dtype: torch.dtype, m: int, k: int) -> None:
    left, right = random(m, k, dtype), random(200, k, dtype, seed=1)
    moved = torch.empty(1 + right.numel(), dtype=dtype)[1:].view(right.shape).copy_(right)
    results = []
    for operand in (right, moved):
        results.append(torch.empty(m, 200))
        native.gemm(left, False, dtype, 1.0, operand, True, dtype, 1.0, results[-1], torch.float32)
    assert torch.equal(*results)
    agree(results[0], left.double() @ right.double().t(), bound(left, right.t()))


def test_every_code_is_decoded_exactly(level: str) -> None:
    identity = torch.eye(256)
    for fp8 in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(fp8)
        finite = codes.float().isfinite()
        values = torch.where(finite, codes.float(), 0.0).to(fp8)
        for flags in ((False, False), (False, True), (True, False)):
            assert torch.equal(product(values.view(1, 256), identity.to(E4M3), flags=flags).view(-1), values.float())
            assert torch.equal(product(identity.to(E4M3), values.view(256, 1), flags=flags).view(-1), values.float())
            # Beside a factor of 1 alone: 0 times what is not finite would be NaN as well.
            alone = [product(c.view(1, 1), torch.ones(1, 1).to(E4M3), flags=flags) for c in codes.view(torch.uint8).view(fp8)]
            assert torch.equal(torch.cat(alone).view(-1).nan_to_num(7.0), codes.float().nan_to_num(7.0))


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("exponents", [(-130,), (-100, -60), (-8, 0, 6), (7, 8, 60, 100), (-40, 108)], ids=str)
def test_rows_of_any_magnitude_times_every_code(level: str, fp8: torch.dtype, exponents: tuple[int, ...]) -> None:
    """Subnormal codes and numbers near either end of float32, of which no product is lost that float32 holds."""
    every = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    every = every[every.isfinite() & (every.abs() <= 448)]
    right = every[torch.randint(len(every), (300, 70), generator=torch.Generator().manual_seed(1))].to(fp8)
    scale = torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64)[:, None]
    left = (random(len(exponents), 300, torch.float32).clamp(-1, 1).double() * scale).float()
    left[:, ::7] = 0
    expected = left.double() @ right.double()
    # A sum of subnormal products rounds each of them to a multiple of 2^-149.
    agree(product(left, right, flags=(False, True)), expected, bound(left, right) + 300 * 2.0**-149)


@pytest.mark.parametrize(("m", "k"), [(3, 48), (30, 64), (70, 48)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_the_epilogue(level: str, m: int, k: int, kind: torch.dtype) -> None:
    left, right = random(m, k, E4M3), random(k, 70, E4M3, seed=1)
    bias, addend = random(1, 70, kind, seed=2).view(-1), random(m, 70, kind, seed=3)
    scales = (0.5, torch.tensor([0.25]))
    before = 0.125 * 3.0 * (left.double() @ right.double()) + 0.5 * addend.double() + bias.double()
    allowed = bound(left, right) + 4 * torch.finfo(torch.float32).eps * (addend.double().abs() + bias.double().abs())
    common: dict[str, Any] = {"scales": scales, "alpha": 3.0, "beta": 0.5, "addend": addend, "bias": bias, "flags": (False, True)}
    agree(product(left, right, **common), before, allowed)

    pre = torch.empty(m, 70, dtype=kind)
    result = product(left, right, gelu=1, pre_gelu=pre, **common)
    agree(pre, before, allowed + torch.finfo(kind).eps * before.abs())
    agree(result, F.gelu(before, approximate="tanh"), 1.2 * allowed + 8 * torch.finfo(torch.float32).eps * before.abs())

    at = before.to(kind).double().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(at, approximate="tanh").sum(), at)
    sums = torch.empty(70)
    result = product(left, right, gelu=2, pre_gelu=before.to(kind), column_sums=sums, scales=scales, alpha=3.0, flags=(False, k == 64))
    plain = 0.375 * (left.double() @ right.double())
    each = 1.2 * bound(left, right) + 16 * torch.finfo(torch.float32).eps * plain.abs()
    agree(result, plain * slope, each)
    agree(sums, (plain * slope).sum(0), each.sum(0) + m * torch.finfo(torch.float32).eps * plain.abs().sum(0))


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 70, 40), (30, 150, 80), (130, 260, 300), (130, 97, 40), (200, 64, 40)])
def test_fp8_results_are_those_of_a_cast_of_the_float32_ones(level: str, fp8: torch.dtype, m: int, n: int, k: int) -> None:
    left, right = random(m, k, E4M3), random(k, n, E4M3, seed=1)
    plain = product(left, right, flags=(False, True))
    codes, turned, amax = torch.empty(m, n, dtype=torch.uint8), torch.empty(n, m, dtype=torch.uint8), torch.empty(1)
    a, b = left, stored(right, True)
    native.gemm(a, False, E4M3, 1.0, b, True, E4M3, 1.0, codes, fp8, turned, torch.tensor([3.0]), amax)
    expected = torch.empty(m, n, dtype=torch.uint8)
    native.quantize(plain, expected, 3.0, fp8)
    assert torch.equal(codes, expected) and torch.equal(turned, expected.t()) and amax.item() == plain.abs().max().item()
    native.gemm(a, False, E4M3, 1.0, b, True, E4M3, 1.0, None, fp8, turned, 3.0, torch.tensor([1e9]), True)
    assert torch.equal(turned, expected.t())


def test_results_may_replace_the_addend(level: str) -> None:
    left, right = random(70, 30, E4M3), random(30, 80, E4M3, seed=1)
    total = random(70, 80, torch.float32, seed=2)
    expected = total.double() + left.double() @ right.double()
    product(left, right, out=total, addend=total, beta=1.0)
    agree(total, expected, bound(left, right) + torch.finfo(torch.float32).eps * expected.abs())


def test_empty_products(level: str) -> None:
    for m, n, k in ((0, 5, 5), (5, 0, 5), (5, 5, 0), (70, 5, 0)):
        left, right = random(m, k, E4M3), random(k, n, E4M3)
        for flags in ((False, False), (False, True), (True, False)):
            assert torch.equal(product(left, right, flags=flags), torch.zeros(m, n))


@pytest.mark.parametrize("m", [4, 140, 300])
def test_threads_change_nothing(level: str, m: int) -> None:
    left, right = random(m, 300, E4M3), random(300, 333, E5M2, seed=1)
    sums = [torch.empty(333), torch.empty(333), torch.empty(333)]
    pre = random(m, 333, torch.bfloat16, seed=2)
    for flags in ((False, True), (True, False)):
        runs = zip((1, 2, 5), sums, strict=True)
        results = [product(left, right, flags=flags, gelu=2, pre_gelu=pre, column_sums=s, num_threads=n) for n, s in runs]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


def test_unaligned_storage(level: str) -> None:
    left, right = random(33, 41, E4M3), random(41, 50, E4M3, seed=1)
    expected = product(left, right)
    for shift in (1, 3):
        moved = torch.empty(33 * 41 + shift, dtype=torch.uint8)[shift:].view(33, 41).copy_(left.view(torch.uint8))
        out = torch.empty(33 * 50 + shift)[shift:].view(33, 50)
        native.gemm(moved, False, E4M3, 1.0, right, False, E4M3, 1.0, out, torch.float32)
        assert torch.equal(out, expected)


def test_four_threads_at_once_and_a_forked_child(level: str) -> None:
    left, right = random(150, 200, E4M3), random(200, 170, E4M3, seed=1)
    expected = product(left, right)
    wrong: list[int] = []

    def work(index: int) -> None:
        if not all(torch.equal(product(left, right), expected) for _ in range(5)):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    child = multiprocessing.get_context("fork").Process(target=lambda: exit(0 if torch.equal(product(left, right), expected) else 1))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_wrong_arguments_are_named_before_anything_is_written() -> None:
    left, right, out = random(4, 8, E4M3), random(8, 6, E4M3), torch.full((4, 6), 7.0)

    def refused(error: type[Exception], match: str, *, right: Tensor = right, out: Any = out, dtype: Any = torch.float32, **more: Any) -> None:
        with pytest.raises(error, match=match):
            native.gemm(left, False, E4M3, 1.0, right, False, E4M3, 1.0, out, dtype, **more)
        assert bool((out == 7.0).all())

    refused(ShapeError, "right: expected 8 in the contracted dimension, got 7", right=random(7, 6, E4M3))
    refused(DTypeError, "right: expected uint8 or float8_e4m3fn, got float32", right=random(8, 6, torch.float32))
    refused(DTypeError, "dst: expected bfloat16, got float32", dtype=torch.bfloat16)
    refused(ShapeError, "dst: expected 24 elements, got 16", out=torch.full((4, 4), 7.0))
    refused(ShapeError, "bias: expected 6 elements", bias=torch.zeros(5))
    refused(ArgumentError, "addend with beta: expected a tensor, got None", beta=1.0)
    refused(ArgumentError, "pre_gelu with gelu 2: expected a tensor, got None", gelu=2)
    refused(ArgumentError, "gelu: expected 0, 1 or 2, got 3", gelu=3)
    refused(ArgumentError, "the destination: expected dst alone", dst_transposed=torch.empty(6, 4, dtype=torch.uint8))
