"""Every module against the one of torch with the same weights in float64, in every float: compiled, and alike without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fusible.lazy as tp

DTYPES = {tp.float32: torch.float32, tp.float16: torch.float16, tp.bfloat16: torch.bfloat16, tp.float64: torch.float64}


@dataclass(frozen=True)
class Case:
    """``ours(dtype)`` and torch's module, an input shape, and how many products or terms an output element sums up."""

    name: str
    ours: Callable[[tp.dtype], tp.Module]
    theirs: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    length: int


def _conv(rank: int, transposed: bool = False) -> Any:
    return getattr(torch.nn, f"Conv{'Transpose' if transposed else ''}{rank}d")


LINEAR = (
    Case("linear", lambda of: tp.Linear(33, 7, dtype=of), lambda: torch.nn.Linear(33, 7), (2, 3, 33), 33),
    Case("linear of a vector", lambda of: tp.Linear(33, 7, dtype=of), lambda: torch.nn.Linear(33, 7), (33,), 33),
    Case("linear without bias", lambda of: tp.Linear(5, 1, False, of), lambda: torch.nn.Linear(5, 1, bias=False), (0, 5), 5),
    Case("conv 1d", lambda of: tp.Conv(3, 4, (5,), dtype=of), lambda: _conv(1)(3, 4, 5), (2, 3, 9), 15),
    Case("conv 2d", lambda of: tp.Conv(4, 6, (3, 2), (2, 1), ((1, 1), (2, 2)), (1, 2), 2, dtype=of),
         lambda: _conv(2)(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), 2), (2, 4, 8, 7), 12),
    Case("conv 2d without bias", lambda of: tp.Conv(2, 2, (1, 1), bias=False, dtype=of), lambda: _conv(2)(2, 2, 1, bias=False), (1, 2, 3, 3), 2),
    Case("conv 3d", lambda of: tp.Conv(2, 3, (2, 2, 2), dtype=of), lambda: _conv(3)(2, 3, 2), (1, 2, 4, 3, 5), 16),
    Case("transposed conv 1d", lambda of: tp.ConvTranspose(3, 4, (5,), (3,), dtype=of), lambda: _conv(1, True)(3, 4, 5, 3), (2, 3, 9), 15),
    Case("transposed conv 2d", lambda of: tp.ConvTranspose(4, 6, (3, 2), (2, 1), ((1, 1), (2, 2)), (1, 3), 2, dtype=of),
         lambda: _conv(2, True)(4, 6, (3, 2), (2, 1), (1, 2), 0, 2, True, (1, 3)), (2, 4, 5, 7), 12),
)  # fmt: skip

NORMS = (
    Case("layer norm", lambda of: tp.LayerNorm(48, of), lambda: torch.nn.LayerNorm(48), (3, 5, 48), 48),
    Case("layer norm of two dimensions", lambda of: tp.LayerNorm((4, 6), of, 1e-3), lambda: torch.nn.LayerNorm([4, 6], 1e-3), (3, 4, 6), 24),
    Case("group norm", lambda of: tp.GroupNorm(2, 6, of), lambda: torch.nn.GroupNorm(2, 6), (3, 6, 4, 5), 60),
    Case("group norm of rows", lambda of: tp.GroupNorm(3, 12, of, 1e-2), lambda: torch.nn.GroupNorm(3, 12, 1e-2), (5, 12), 4),
    Case("instance norm", lambda of: tp.InstanceNorm(3, of), lambda: torch.nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 5), 20),
    Case("instance norm of rows", lambda of: tp.InstanceNorm(3, of, 1e-3), lambda: torch.nn.InstanceNorm1d(3, 1e-3, affine=True), (2, 3, 7), 7),
    Case("batch norm", lambda of: tp.BatchNorm(3, of), lambda: torch.nn.BatchNorm2d(3), (2, 3, 4, 5), 1),
    Case("batch norm of rows", lambda of: tp.BatchNorm(6, of, 1e-2), lambda: torch.nn.BatchNorm1d(6, 1e-2), (4, 6), 1),
)


def twins(case: Case, of: tp.dtype) -> tuple[tp.Module, torch.nn.Module, torch.Tensor]:
    """Both modules with the same random weights, torch's in float64 with the values that ``of`` can hold, and an input like them."""
    torch.manual_seed(sum(map(ord, case.name)))
    narrow = case.theirs().eval()
    state = {name: torch.rand_like(t) + 0.5 if "var" in name else torch.randn_like(t) for name, t in narrow.state_dict().items() if t.ndim}
    state = {name: t.to(DTYPES[of]) for name, t in state.items()}
    narrow.load_state_dict({name: t.double() for name, t in state.items()}, strict=False)
    ours = case.ours(of)
    ours.load_state_dict(state)
    x = (torch.randn(case.shape) + 0.5).to(DTYPES[of])
    return ours, narrow.double(), x


@dataclass
class Check:
    """A module on an input, the exact result, and the error allowed beside one rounding, in epsilons of the dtype that is computed in."""

    ours: tp.Module
    x: torch.Tensor
    of: tp.dtype
    want: torch.Tensor
    slack: Any

    def close(self, got: np.ndarray[Any, Any]) -> None:
        exact = self.want.detach().numpy()
        info = ml_dtypes.finfo(self.of.numpy)
        rounding = 0.5 * float(info.eps) * np.abs(exact) + float(info.smallest_subnormal) / 2
        computing = self.slack * float(np.finfo(np.float64 if self.of is tp.float64 else np.float32).eps)
        assert got.dtype == self.of.numpy and got.shape == exact.shape
        np.testing.assert_array_less(np.abs(got.astype(np.float64) - exact), rounding + computing)


def outputs_of(result: Any) -> list[np.ndarray[Any, Any]]:
    """The values of an executable's outputs."""
    return [t.numpy() for t in (result if isinstance(result, list | tuple) else [result])]


def check(checks: Sequence[Check]) -> None:
    """All of them in one compiled program."""
    infos = [tp.InputInfo(tuple(c.x.shape), c.of) for c in checks]
    compiled = tp.compile(lambda a, b, c, d: [one.ours(x) for one, x in zip(checks, (a, b, c, d), strict=True)], args=infos)
    for one, got in zip(checks, outputs_of(compiled(*(tp.Tensor(c.x) for c in checks))), strict=True):
        one.close(got)


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_what_sums_products_agrees_with_torch(case: Case) -> None:
    checks = []
    for of in DTYPES:
        ours, theirs, x = twins(case, of)
        magnitude = {name: t.abs() for name, t in theirs.state_dict().items()}
        # Each of the sums of `length` products and a bias rounds at most once per term, relative to the sum of magnitudes.
        sizes = torch.func.functional_call(theirs, magnitude, (x.double().abs(),)).detach().numpy()
        checks.append(Check(ours, x, of, theirs(x.double()), (case.length + 2) * sizes))
    check(checks)


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_norms_agree_with_torch(case: Case) -> None:
    checks = []
    for of in DTYPES:
        ours, theirs, x = twins(case, of)
        # A mean over n elements is off by n roundings of the largest, and the difference from it is divided by the deviation, here above 1/4;
        # six more roundings (subtraction, square root, eps, weight, bias) are relative to values no larger.
        weight, bias = (t.abs().max() for t in (theirs.state_dict()["weight"], theirs.state_dict()["bias"]))
        largest = 4 * x.double().abs().max() * weight + bias
        checks.append(Check(ours, x, of, theirs(x.double()), (2 * case.length + 6) * float(largest)))
    check(checks)


@pytest.mark.parametrize("case", [LINEAR[0], LINEAR[4], NORMS[0], NORMS[2]], ids=lambda case: case.name)
def test_called_without_compiling_it_gives_the_same(case: Case) -> None:
    ours, _, x = twins(case, tp.bfloat16)
    compiled = tp.compile(ours, args=[tp.InputInfo(case.shape, tp.bfloat16)])
    np.testing.assert_array_equal(ours(tp.Tensor(x)).numpy(), outputs_of(compiled(tp.Tensor(x)))[0])


_SIZE = (1, 4, 8)
_DYNAMIC: list[tuple[Callable[[], tp.Module], tuple[Any, ...], tuple[int, ...]]] = [
    (lambda: tp.Linear(3, 2), (_SIZE, 3), (2, 3)),
    (lambda: tp.Linear(3, 2, quant_dtype=tp.int8, weight_quant_dim=0), (_SIZE, 3), (8, 3)),
    (lambda: tp.LayerNorm(3), (_SIZE, _SIZE, 3), (2, 5, 3)),
    (lambda: tp.GroupNorm(2, 4), (_SIZE, 4, _SIZE), (2, 4, 5)),
    (lambda: tp.InstanceNorm(4), (_SIZE, 4, _SIZE), (2, 4, 5)),
    (lambda: tp.BatchNorm(4), (_SIZE, 4, _SIZE), (2, 4, 5)),
    (lambda: tp.Conv(4, 3, (3,), padding=((1, 1),)), (_SIZE, 4, _SIZE), (2, 4, 5)),
    (lambda: tp.ConvTranspose(4, 3, (3,), (2,)), (_SIZE, 4, _SIZE), (2, 4, 5)),
]


@pytest.mark.parametrize("case", range(len(_DYNAMIC)))
def test_a_dynamic_batch_and_dynamic_positions_give_the_same(case: int) -> None:
    make, declared, shape = _DYNAMIC[case]
    module = make()
    module.initialize_dummy_parameters()
    x = np.random.default_rng(case).standard_normal(shape).astype(np.float32)
    (got,) = outputs_of(tp.compile(module, args=[tp.InputInfo(declared, tp.float32)])(x))
    np.testing.assert_array_equal(got, module(tp.Tensor(x)).numpy())


@pytest.mark.parametrize("of", [*DTYPES, tp.int8, tp.bool, tp.float8], ids=str)
def test_an_embedding_takes_rows(of: tp.dtype) -> None:
    table = (np.arange(12).reshape(6, 2) % 5).astype(of.numpy)
    ours = tp.Embedding(6, 2, of)
    ours.load_state_dict({"weight": table})
    index = np.array([[0, 5, 1], [-1, 2, 2]], np.int32)
    for rows in (ours(tp.Tensor(index)).numpy(), *outputs_of(tp.compile(ours, args=[tp.InputInfo((2, 3), tp.int32)])(index))):
        assert rows.dtype == of.numpy
        np.testing.assert_array_equal(rows.astype(np.float32), table[index].astype(np.float32))


def test_asymmetric_padding_is_that_of_a_padded_input() -> None:
    torch.manual_seed(0)
    x, weight = torch.randint(-8, 8, (1, 2, 5, 6)).float(), torch.randint(-8, 8, (3, 2, 3, 3)).float()
    conv = tp.Conv(2, 3, (3, 3), padding=((0, 2), (1, 0)), bias=False)
    conv.load_state_dict({"weight": weight})
    want = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (1, 0, 0, 2)), weight)
    np.testing.assert_array_equal(conv(tp.Tensor(x)).numpy(), want.numpy())
    transposed = tp.ConvTranspose(3, 2, (3, 3), padding=((0, 2), (1, 0)), bias=False)
    transposed.load_state_dict({"weight": weight})
    full = torch.nn.functional.conv_transpose2d(want, weight)
    np.testing.assert_array_equal(transposed(tp.Tensor(want)).numpy(), full[:, :, : full.shape[2] - 2, 1:].numpy())


def _fake_quantized(x: np.ndarray[Any, Any], scale: np.ndarray[Any, Any] | np.floating[Any], of: tp.dtype) -> np.ndarray[Any, Any]:
    """Quantized to ``of`` and dequantized, in numpy: computed in float32, and rounded to the dtype of ``x``."""
    low, high = float(of.min), float(of.max)
    quotient = x.astype(np.float32) / np.asarray(scale, np.float32)
    held = np.clip(np.rint(quotient) if of.is_integer else quotient, low, high).astype(of.numpy)
    return (held.astype(np.float32) * np.asarray(scale, np.float32)).astype(x.dtype)


def _quantized_linear(of: tp.dtype, quant: tp.dtype, dim: Any, quantized_input: bool) -> Check:
    rng = np.random.default_rng(3)
    weight, bias, x = (rng.standard_normal(shape).astype(of.numpy) for shape in ((6, 10), (6,), (4, 10)))
    shape = {None: (), 0: (6,), 1: (10,), "blocks": (3, 10)}[dim]
    scale = np.asarray(rng.uniform(0.5, 2.0, shape) * 3 / float(quant.max), of.numpy)
    ours = tp.Linear(10, 6, dtype=of, quant_dtype=quant, weight_quant_dim=None if dim == "blocks" else dim)
    state = {"weight": weight, "bias": bias, "weight_scale": scale}
    spread = scale[:, None] if dim == 0 else np.repeat(scale, 2, 0) if dim == "blocks" else scale
    held, given = _fake_quantized(weight, spread, quant), x
    if quantized_input:
        state["input_scale"] = np.asarray(2.5 / float(quant.max), of.numpy)
        given = _fake_quantized(x, state["input_scale"], quant)
    ours.load_state_dict(state)
    assert not np.array_equal(held, weight)
    wide = [t.astype(np.float64) for t in (given, held, bias)]
    sizes = np.abs(wide[0]) @ np.abs(wide[1]).T + np.abs(wide[2])
    # Ten products and a bias, as above; quantizing itself is exact to the bit.
    return Check(ours, torch.from_dlpack(tp.Tensor(x)), of, torch.from_numpy(wide[0] @ wide[1].T + wide[2]), 12 * sizes)


@pytest.mark.parametrize("of", [tp.float32, tp.bfloat16, tp.float16], ids=str)
@pytest.mark.parametrize("quant", [tp.int8, tp.int4, tp.float8], ids=str)
def test_a_quantized_linear_is_linear_in_what_the_narrow_dtype_holds(of: tp.dtype, quant: tp.dtype) -> None:
    check([_quantized_linear(of, quant, dim, quantized_input) for dim, quantized_input in ((None, True), (0, True), (1, False), ("blocks", False))])


@pytest.mark.parametrize("quant", [tp.int8, tp.int4, tp.float8], ids=str)
def test_a_weight_that_is_quantized_already_gives_the_same(quant: tp.dtype) -> None:
    rng = np.random.default_rng(4)
    weight, x = tp.Tensor(rng.standard_normal((6, 10)).astype(np.float32)), tp.Tensor(rng.standard_normal((2, 10)).astype(np.float32))
    ours = tp.Linear(10, 6, False, quant_dtype=quant, weight_quant_dim=0)
    ours.weight_scale = tp.Tensor(np.full(6, 3 / float(quant.max), np.float32))
    ours.weight = weight
    want = ours(x).numpy()
    ours.weight = tp.quantize(weight, ours.weight_scale, quant, 0).eval()
    assert ours.weight.dtype is quant
    np.testing.assert_array_equal(ours(x).numpy(), want)


def test_a_transformer_block_of_modules_is_that_of_torch() -> None:
    """Attention of plain functions between modules: the arithmetic of nn.MultiheadAttention, whose packed weights are loaded as they are."""
    torch.manual_seed(5)
    hidden, heads, tokens = 32, 4, 6
    theirs = torch.nn.TransformerEncoderLayer(hidden, heads, 64, 0.0, "relu", batch_first=True, norm_first=True).eval()

    class Block(tp.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = tp.LayerNorm(hidden), tp.LayerNorm(hidden)
            self.self_attn = tp.Module()
            self.self_attn.in_proj_weight = tp.DefaultParameter((3 * hidden, hidden), tp.float32)  # pyright: ignore[reportAttributeAccessIssue]
            self.self_attn.in_proj_bias = tp.DefaultParameter(3 * hidden, tp.float32)  # pyright: ignore[reportAttributeAccessIssue]
            self.self_attn.out_proj = tp.Linear(hidden, hidden)  # pyright: ignore[reportAttributeAccessIssue]
            self.linear1, self.linear2 = tp.Linear(hidden, 64), tp.Linear(64, hidden)

        def forward(self, x: tp.Tensor) -> tp.Tensor:
            attention: Any = self.self_attn
            packed = self.norm1(x) @ attention.in_proj_weight.transpose(0, 1) + attention.in_proj_bias
            q, k, v = (t.reshape((2, tokens, heads, hidden // heads)).transpose(1, 2) for t in packed.split(3, -1))
            scores = q @ k.transpose(2, 3) / math.sqrt(hidden // heads)
            x = x + attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape((2, tokens, hidden)))
            return x + self.linear2(tp.maximum(self.linear1(self.norm2(x)), 0.0))

    ours = Block()
    ours.load_state_dict({name: t.detach() for name, t in theirs.state_dict().items()})
    x = torch.randn(2, tokens, hidden)
    with torch.no_grad():
        want = theirs.double()(x.double()).numpy()
    (got,) = outputs_of(tp.compile(ours, args=[tp.InputInfo((2, tokens, hidden), tp.float32)])(tp.Tensor(x)))
    # Four matrix products of at most 64 terms in a row, on values of order 1 to 10 (measured: 2 epsilons of the largest).
    np.testing.assert_allclose(got, want, rtol=0, atol=64 * 2.0**-23 * np.abs(want).max())
