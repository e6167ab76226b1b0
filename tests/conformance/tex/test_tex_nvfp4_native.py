"""NVFP4 by the compiled kernels beside plain torch: every option of a quantizer to the bit, and products within the rounding of their sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from native_calls import by_torch, native

from fusible import cpp_extensions, tex
from fusible.quantized import NVFP4Quantizer

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

COPIES = ((True, False), (False, True), (True, True))
BUFFERS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
OPTIONS = ("with_2d_quantization", "with_rht", "stochastic_rounding", "optimize_for_gemm")


def quantizer(rowwise: bool = True, columnwise: bool = True, **options: Any) -> Any:
    made = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise)
    for name, value in options.items():
        setattr(made, name, value)
    made.with_post_rht_amax = made.with_rht
    return made


def values(*shape: int, seed: int = 0, spread: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-spread, spread, shape, generator=generator))


def differing(a: Any, b: Any) -> list[str]:
    """The buffers that are not the same to the bit; numbers that are none are alike."""
    found = []
    for name in BUFFERS:
        x, y = getattr(a, name), getattr(b, name)
        if x is not y and (x is None or y is None or not torch.equal(x.nan_to_num(-1), y.nan_to_num(-1))):
            found.append(name)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [dict(zip(OPTIONS, each, strict=True)) for each in product((False, True), repeat=4)], ids=str)
def test_quantizing_is_torchs_to_the_bit(options: dict[str, bool], dtype: torch.dtype) -> None:
    for number, (copies, shape) in enumerate(product(COPIES, ((16, 16), (2, 16, 160), (272, 528), (0, 64)))):
        x = values(*shape, seed=number).to(dtype)
        found, after = native(tex.quantize, x, quantizer(*copies, **options)), torch.rand(1)
        wanted = by_torch(tex.quantize, x, quantizer(*copies, **options))
        assert not differing(found, wanted), (copies, shape)
        assert torch.equal(torch.rand(1), after), "as many seeds are drawn"
        for otype in (tex.DType.kFloat32, tex.DType.kBFloat16):
            assert torch.equal(native(tex.dequantize, found, otype), by_torch(tex.dequantize, wanted, otype))
        for noop in (None, torch.zeros(1), torch.ones(1)):  # into a tensor that is there
            other = values(*shape, seed=number + 10).to(dtype)
            native(tex.quantize, other, quantizer(*copies, **options), found, noop)
            by_torch(tex.quantize, other, quantizer(*copies, **options), wanted, noop)
            assert not differing(found, wanted), (copies, shape, noop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}, {"stochastic_rounding": True}, {"with_rht": True}], ids=str)
def test_infinities_zeros_and_not_a_number_are_torchs(options: dict[str, bool], dtype: torch.dtype) -> None:
    special = {
        "nan": torch.nan, "negative nan": -torch.nan, "inf": torch.inf, "-inf": -torch.inf, "zero": -0.0, "subnormal": 1e-40, "least": 2.0**-126,
        "largest": torch.finfo(dtype).max,
    }  # fmt: skip
    for name, value in special.items():
        for shift in (0, -100, 60):
            x = (values(48, 64) * 2.0**shift).to(dtype)
            x[3, 5], x[17:33, 20], x[40, 32:48] = value, value, value
            found, wanted = (ask(tex.quantize, x, quantizer(**options)) for ask in (native, by_torch))
            assert not differing(found, wanted), (name, shift)
    for zeros in (torch.zeros(32, 32, dtype=dtype), -torch.zeros(32, 32, dtype=dtype)):
        assert not differing(*(ask(tex.quantize, zeros, quantizer(**options)) for ask in (native, by_torch)))


def test_each_value_between_two_codes_goes_where_torchs_does() -> None:
    """Ties and their neighbours, with and without a sign, at the scale of 1 and others."""
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties = torch.cat([halves, torch.nextafter(halves, halves * 2), torch.nextafter(halves, halves * 0)])
    row = torch.cat([ties, -ties, ties.new_zeros(16)])
    x = torch.stack([row.roll(i) * 2.0 ** (i % 5) for i in range(16)])
    x[:, ::16] = 6.0
    for scale in (1.0, 448.0, 1 / 3):
        assert not differing(*(ask(tex.quantize, x * scale, quantizer()) for ask in (native, by_torch)))


def test_options_that_the_kernels_lack_are_left_to_torch() -> None:
    x = values(32, 64)
    for options in ({"nvfp4_use_4over6": True}, {"row_scaled_nvfp4": True}):
        for function, of in ((tex.quantize, lambda result: result), (tex.bgrad_quantize, lambda result: result[1])):
            assert not differing(of(function(x, quantizer(**options))), of(by_torch(function, x, quantizer(**options))))
        found = by_torch(tex.quantize, x, quantizer(**options))
        assert torch.equal(native(tex.dequantize, found, tex.DType.kFloat32), by_torch(tex.dequantize, found, tex.DType.kFloat32))


@pytest.mark.parametrize("transformed", [(), ("a",), ("b",), ("a", "b")], ids=str)
@pytest.mark.parametrize(("trans_a", "trans_b"), [*product((True, False), (True, False))])
@pytest.mark.parametrize("by_rows", [False, True])
def test_products_are_those_of_the_values(trans_a: bool, trans_b: bool, transformed: tuple[str, ...], by_rows: bool) -> None:
    for m, n, k in ((16, 32, 64), (64, 96, 128), (160, 64, 32), (128, 512, 384)):
        sizes = {"a": (n, k) if trans_a else (k, n), "b": (k, m) if trans_b else (m, k)}
        a, b = (
            by_torch(tex.quantize, values(*sizes[name], seed=seed, spread=2), quantizer(with_rht=name in transformed, row_scaled_nvfp4=by_rows))
            for seed, name in enumerate("ab")
        )
        rest = (None, None, tex.DType.kFloat32, None, None, False, None, False, None, 0, False, False)
        found, wanted = (ask(tex.generic_gemm, a, trans_a, b, trans_b, *rest)[0] for ask in (native, by_torch))
        size = (_size(b, not trans_b).t() if trans_b else _size(b, True)) @ (_size(a, trans_a).t() if trans_a else _size(a, False))
        bound = 8 * torch.finfo(torch.float32).eps * k**0.5 * size
        assert ((found.double() - wanted.double()).abs() <= bound).all()


def _size(x: Any, along_rows: bool) -> torch.Tensor:
    """At least the sizes of the values of the copy that a product reads, in the tensor's own layout: of transformed ones, the norm of their group."""
    kept = quantizer(rowwise=along_rows, columnwise=not along_rows, row_scaled_nvfp4=x._row_scaled_nvfp4)
    copy = kept.make_empty(tuple(x.shape))
    for name in BUFFERS:
        if getattr(copy, name) is not None:
            setattr(copy, name, getattr(x, name))
    value = by_torch(tex.dequantize, copy, tex.DType.kFloat32).double().abs()
    groups = value.unflatten(1, (-1, 16)) if along_rows else value.unflatten(0, (-1, 16)).transpose(1, 2)
    norms = groups.square().sum(-1, keepdim=True).sqrt().expand_as(groups)
    return norms.flatten(1) if along_rows else norms.transpose(1, 2).flatten(0, 1)
