"""norm_fwd and norm_bwd against float64 at every level; their FP8 outputs bit for bit against the cast of their own float32 outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusible import cpp_extensions, tex
from fusible.errors import ArgumentError, DTypeError, ShapeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((1, 1), (1, 7), (5, 15), (4, 16), (3, 33), (64, 64), (65, 127), (130, 70), (0, 8), (3, 0), (2, 3, 1000), (2, 9000))
EPS32 = torch.finfo(torch.float32).eps
CENTERED = pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def chain(count: int) -> int:
    """The most float32 roundings that a term of a row's sum goes through, on a level with eight lanes.

    Blocks of 4096 are summed in 4 x 8 lanes, the last three vectors and the row's end in eight of them; lanes, then blocks are added up.
    """
    return min(count, 4096) // 32 + 4 + 2 + 3 + count // 4096 + 1


def row_chain(rows: int) -> int:
    """The same for a sum over rows: rows of a tile, tiles of a chunk, at most 64 chunks."""
    return min(rows, 64) + rows // 4096 + 64


def offset(x: Tensor) -> Tensor:
    """A contiguous copy that begins one element after an aligned address."""
    return torch.cat([x.flatten()[:1].new_zeros(1), x.flatten()])[1:].view(x.shape)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, mean: float = 0.0) -> Tensor:
    return offset((torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, centered: bool, to: Any, plus: bool = False, threads: int = 0, **options: Any):
    """``(y, mu, rsigma)``."""
    rows = x.shape[:-1].numel()
    y = offset(torch.zeros(x.shape, dtype=to if to in FLOATS else torch.uint8))
    mu, rsigma = torch.full((rows,), 7.0) if centered else None, torch.full((rows,), 7.0)
    cpp_extensions.norm_fwd(x, weight, bias, mu, rsigma, 1e-3, plus, y, to, num_threads=threads, **options)
    return y, mu, rsigma


def backward(dz: Tensor, x: Tensor, mu: Tensor | None, rsigma: Tensor, weight: Tensor, *, plus: bool = False, add: Any = None, threads: int = 0):
    """``(dx, dgamma, dbeta)``, the last None without ``mu``."""
    dx, dgamma = offset(torch.zeros_like(x)), torch.zeros_like(weight)
    dbeta = torch.zeros_like(weight) if mu is not None else None
    cpp_extensions.norm_bwd(dz, x, mu, rsigma, weight, plus, dx, dgamma, dbeta, add, threads)
    return dx, dgamma, dbeta


def within(got: Tensor, reference: Tensor, error: Tensor | float) -> None:
    """Half a unit in the last place of the result's dtype, beside the ``error`` of the float32 computation."""
    info = torch.finfo(got.dtype)
    bound = 0.5001 * info.eps * reference.abs() + info.smallest_normal * info.eps + error
    assert ((got.double() - reference).abs() <= bound).all()


def max_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row, as a column."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


@CENTERED
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_forward_is_that_of_float64(level: str, centered: bool, dtype: torch.dtype, shape: tuple[int, ...], mean: float) -> None:
    cols = shape[-1]
    x = random(shape, dtype, 1, mean)
    weight, bias = random((cols,), torch.float32 if mean else dtype, 2), random((cols,), torch.bfloat16, 3) if centered else None
    y, mu, rsigma = forward(x, weight, bias, centered=centered, to=dtype, plus=bool(mean))
    if not x.numel():
        return
    wide, gamma = x.double(), weight.double() + bool(mean)
    mu64 = wide.mean(-1, keepdim=True) if centered else torch.zeros(1, dtype=torch.float64)
    rs64 = ((wide - mu64).square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    # A sum is off by at most chain * eps / 2 of the sum of magnitudes; rsigma by half of what its square is, and by the mean's error squared.
    off_mean = chain(cols) * EPS32 * max_rows(wide) * centered
    off_rsigma = (chain(cols) + 8) * EPS32 + (off_mean * rs64).square()
    off = gamma.abs() * ((wide - mu64).abs() * rs64 * (off_rsigma + 4 * EPS32) + off_mean * rs64)
    shift = bias.double() if bias is not None else 0.0
    within(y, (wide - mu64) * rs64 * gamma + shift, off + EPS32 * abs(shift))
    within(rsigma, rs64.flatten(), (rs64 * off_rsigma).flatten())
    if centered:
        within(mu, mu64.flatten(), off_mean.flatten())


@CENTERED
@pytest.mark.parametrize("dz_dtype", FLOATS, ids=str)
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_is_that_of_float64(level: str, centered: bool, dtype: torch.dtype, dz_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows, cols = int(torch.Size(shape[:-1]).numel()), shape[-1]
    x, dz, weight = random(shape, dtype, 1, 0.5), random(shape, dz_dtype, 2), random((cols,), dtype, 3)
    add = None if dz_dtype is dtype else random(shape, dz_dtype, 4)
    mu, rsigma = random((rows,), torch.float32, 5) if centered else None, random((rows,), torch.float32, 6).abs()
    dx, dgamma, dbeta = backward(dz, x, mu, rsigma, weight, plus=True, add=add)
    column = (*shape[:-1], 1)
    rs, z = rsigma.double().view(column), dz.double()
    xh = (x.double() - (mu.double().view(column) if mu is not None else 0)) * rs
    within(dgamma, (z * xh).reshape(rows, cols).sum(0), (row_chain(rows) + 4) * EPS32 * (z * xh).abs().reshape(rows, cols).sum(0))
    if dbeta is not None:
        within(dbeta, z.reshape(rows, cols).sum(0), row_chain(rows) * EPS32 * z.abs().reshape(rows, cols).sum(0))
    if not x.numel():
        return
    dy = z * (weight.double() + 1)
    slope, mean = (dy * xh).mean(-1, keepdim=True), dy.mean(-1, keepdim=True) * centered
    sizes = dy.abs() + dy.abs().mean(-1, keepdim=True) * centered + xh.abs() * (dy * xh).abs().mean(-1, keepdim=True)
    extra = add.double() if add is not None else 0.0
    within(dx, rs * (dy - mean - xh * slope) + extra, (chain(cols) + 8) * EPS32 * rs * sizes + EPS32 * abs(extra))


def test_sums_of_many_rows_stay_accurate(level: str) -> None:
    rows = 300_000
    x, dz, ones = torch.full((rows, 1), 3.0), torch.full((rows, 1), 0.1), torch.ones(1)
    _, dgamma, dbeta = backward(dz, x, torch.zeros(rows), torch.ones(rows), ones)
    # Half an eps a rounding of sums that only grow.
    within(dbeta, dz.double().sum(0), row_chain(rows) * EPS32 / 2 * dz.double().sum(0))
    within(dgamma, 3 * dz.double().sum(0), (row_chain(rows) + 2) * EPS32 / 2 * 3 * dz.double().sum(0))


@given(
    rows=st.integers(0, 140),
    cols=st.integers(0, 330),
    seed=st.integers(0, 9),
    centered=st.booleans(),
    fp8=st.sampled_from(FP8),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
def test_codes_are_those_of_the_float32_results(
    rows: int, cols: int, seed: int, centered: bool, fp8: torch.dtype, dtype: torch.dtype, data: st.DataObject
) -> None:
    cpp_extensions.set_level(data.draw(st.sampled_from(cpp_extensions.usable_levels())))
    x, weight, bias = random((rows, cols), dtype, seed), random((cols,), dtype, 2), random((cols,), dtype, 3) if centered else None
    if rows * cols > 3 and data.draw(st.booleans()):
        x.view(-1)[seed % (rows * cols)] = data.draw(st.sampled_from([float("nan"), float("-inf")]))
    y, *statistics = forward(x, weight, bias, centered=centered, to=torch.float32)
    wanted, turned, largest = torch.zeros(rows, cols, dtype=torch.uint8), torch.zeros(cols, rows, dtype=torch.uint8), torch.zeros(1)
    cpp_extensions.quantize(y, wanted, 5.0, fp8, turned, largest)
    for transposed in (None, torch.ones_like(turned)):
        for threads in (1, 2):
            amax = torch.full((1,), 0.25)
            options = {"dst_transposed": transposed, "scale": 5.0, "amax": amax, "threads": threads}
            codes, *again = forward(x, weight, bias, centered=centered, to=fp8, **options)
            torch.testing.assert_close(codes, wanted, rtol=0, atol=0)
            torch.testing.assert_close(amax, largest, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(again, statistics, rtol=0, atol=0, equal_nan=True)
            assert transposed is None or torch.equal(transposed, turned)
    alone = torch.ones_like(turned)
    mu = torch.zeros(rows) if centered else None
    cpp_extensions.norm_fwd(x, weight, bias, mu, torch.zeros(rows), 1e-3, False, None, fp8, alone, torch.tensor([5.0]))
    assert torch.equal(alone, turned)


@CENTERED
@DTYPES
@pytest.mark.parametrize("shape", [(200, 70), (9000, 3), (3, 5000)], ids=str)
def test_threads_change_no_bit(level: str, centered: bool, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, dz, weight = random(shape, dtype, 1), random(shape, dtype, 2), random(shape[1:], dtype, 3)
    found = []
    for threads in (1, 2):
        y, mu, rsigma = forward(x, weight, None, centered=centered, to=dtype, threads=threads)
        found.append([y, mu, rsigma, *backward(dz, x, mu, rsigma, weight, threads=threads)])
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(*found, strict=True))


@CENTERED
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(level: str, centered: bool, value: float) -> None:
    x, dz, weight = random((9, 40), torch.float32, 1), random((9, 40), torch.float32, 2), torch.ones(40)
    clean = forward(x, weight, None, centered=centered, to=torch.float32)
    dx = backward(dz, x, *clean[1:], weight)[0]
    x[3, 39] = value
    y, mu, rsigma = forward(x, weight, None, centered=centered, to=torch.float32)
    others = torch.arange(9) != 3
    assert torch.equal(y[others], clean[0][others])
    assert y[3].isnan().all() if centered or value != value else y[3, 39].isnan() and not y[3, :39].any()
    spoiled, dgamma, _ = backward(dz, x, mu, rsigma, weight)
    assert torch.equal(spoiled[others], dx[others])
    assert spoiled[3].isnan().all() and dgamma[39].isnan()


def test_the_amax_accumulates() -> None:
    x, codes, amax = torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2, dtype=torch.uint8), torch.tensor([5.0])
    arguments = (x, torch.ones(2), None, None, torch.zeros(1), 0.0, False, codes, "float8_e5m2", None, 1.0, amax)
    cpp_extensions.norm_fwd(*arguments, accumulate_amax=True)
    assert amax.item() == 5.0
    cpp_extensions.norm_fwd(*arguments)
    assert amax.item() == 1.0


X = torch.ones(4, 8)
FORWARD: dict[str, Any] = {
    "x": X,
    "weight": X[0],
    "bias": None,
    "mu": torch.zeros(4),
    "rsigma": torch.zeros(4),
    "eps": 1e-5,
    "zero_centered_gamma": False,
    "dst": torch.zeros(4, 8),
    "dtype": torch.float32,
}
BACKWARD: dict[str, Any] = {
    "dz": X,
    "x": X,
    "mu": torch.zeros(4),
    "rsigma": torch.zeros(4),
    "weight": X[0],
    "zero_centered_gamma": False,
    "dx": torch.zeros(4, 8),
    "dgamma": torch.zeros(8),
    "dbeta": torch.zeros(8),
}
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("norm_fwd", {"x": X.int()}, DTypeError, "x: expected .*, got int32"),
    ("norm_fwd", {"weight": X[0, 1:].clone()}, ShapeError, "weight: expected 8 elements"),
    ("norm_fwd", {"weight": X[0].double()}, DTypeError, "weight: expected .*, got torch.float64"),
    ("norm_fwd", {"bias": X}, ShapeError, "bias: expected 8 elements"),
    ("norm_fwd", {"bias": X[0], "mu": None}, ArgumentError, "RMSNorm: expected no bias"),
    ("norm_fwd", {"mu": torch.zeros(3)}, ShapeError, "mu: expected 4 elements"),
    ("norm_fwd", {"rsigma": torch.zeros(4).half()}, DTypeError, "rsigma: expected float32"),
    ("norm_fwd", {"dst": torch.zeros(4, 7)}, ShapeError, "dst: expected 32 elements"),
    ("norm_fwd", {"dst": torch.zeros(4, 8).half()}, DTypeError, "dst: expected float32"),
    ("norm_fwd", {"amax": torch.zeros(1)}, ArgumentError, "an unquantized output: expected no amax"),
    ("norm_fwd", {"num_threads": -1}, ArgumentError, "num_threads"),
    ("norm_bwd", {"dz": X[1:]}, ShapeError, "dz: expected 32 elements"),
    ("norm_bwd", {"x": X.int()}, DTypeError, "x.*: expected .*.*got int32"),
    ("norm_bwd", {"mu": None}, ArgumentError, "mu and dbeta, or neither"),
    ("norm_bwd", {"dbeta": None}, ArgumentError, "mu and dbeta, or neither"),
    ("norm_bwd", {"dx": torch.zeros(4, 8).half()}, DTypeError, "dx: expected float32"),
    ("norm_bwd", {"dgamma": torch.zeros(4)}, ShapeError, "dgamma: expected 8 elements"),
    ("norm_bwd", {"add": X[1:]}, ShapeError, "add: expected 32 elements"),
    ("norm_bwd", {"rsigma": torch.zeros(5)}, ShapeError, "rsigma: expected 4 elements"),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_before_anything_is_written(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**(FORWARD if name == "norm_fwd" else BACKWARD), **changes}
    with pytest.raises(error, match=message):
        getattr(cpp_extensions, name)(**arguments)
    written = ("dst", "mu", "rsigma") if name == "norm_fwd" else ("dx", "dgamma", "dbeta")
    assert all(arguments[key] is None or not arguments[key].any() for key in written)


def test_the_backend_serves_what_the_kernels_write() -> None:
    arguments = {"input": X, "weight": X[0], "eps": 1e-5, "ln_out": None, "quantizer": None, "sm_margin": 0, "zero_centered_gamma": False}
    assert tex.explain("rmsnorm_fwd", otype=tex.DType.kBFloat16, **arguments).backend == "cpu"
    refused = tex.explain("rmsnorm_fwd", otype=torch.float8_e5m2, **arguments)
    assert refused.backend == "torch" and "otype is torch.float8_e5m2" in dict(refused.others)["cpu"]
