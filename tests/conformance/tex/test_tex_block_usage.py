"""Block-scaled quantizing as a call: outputs, noop, usages, several tensors at once, groups, random numbers, refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.quantized import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.backends.torch_backend import number_formats

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FIELDS = [f"_{way}_{part}" for way in ("rowwise", "columnwise") for part in ("data", "scale_inv")]
RHT = {"with_rht": True, "with_post_rht_amax": True}
MAKERS: dict[str, Any] = {
    "block-1d": lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usages),
    "block-2d": lambda **usages: Float8BlockQuantizer(E5M2, block_scaling_dim=2, **usages),
    "mxfp8": lambda **usages: MXFP8Quantizer(E4M3, **usages),
    "nvfp4": lambda **usages: NVFP4Quantizer(**usages),
    "nvfp4-rht": lambda **usages: NVFP4Quantizer(**RHT, **usages),
    "nvfp4-rows": lambda **usages: NVFP4Quantizer(row_scaled_nvfp4=True, **usages),
}
EVERY_FORMAT = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)

pytestmark = on_backends("multi_tensor_quantize")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def buffers(t: Any) -> dict[str, Tensor | None]:
    names = [*FIELDS, "_amax_rowwise", "_amax_columnwise"] if hasattr(t, "_fp4_dtype") else FIELDS
    return {name: getattr(t, name) for name in names}


def same(a: Any, b: Any) -> bool:
    pairs = zip(buffers(a).values(), buffers(b).values(), strict=True)
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(2, 16, 64), (4, 8, 2, 32), (0, 32), (32, 0), (3, 32, 96)])
def test_leading_dimensions_are_rows(runner: Runner, make: Any, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    t, flat = (runner("quantize", tensor=v, quantizer=make()) for v in (x, x.reshape(math.prod(shape[:-1]), shape[-1])))
    assert t.shape == shape and flat.shape == (math.prod(shape[:-1]), shape[-1])
    for name, buffer in buffers(t).items():
        assert buffer is not None and torch.equal(buffer.flatten(), getattr(flat, name).flatten()) and buffer.is_contiguous()
    values = runner("dequantize", input=t, otype=torch.float32)
    assert values.shape == shape and torch.equal(values.reshape(flat.shape), runner("dequantize", input=flat, otype=torch.float32))
    alone = runner("quantize", tensor=x, quantizer=make(rowwise=False))
    assert alone.shape == shape and runner("dequantize", input=alone, otype=torch.float32).shape == shape


def test_nvfp4_of_an_odd_dimension_before_the_last_is_packed_across_rows(runner: Runner) -> None:
    x = normal(16, 3, 32)
    t = runner("quantize", tensor=x, quantizer=NVFP4Quantizer())
    assert t.shape == (16, 3, 32) and t._columnwise_data.shape == (32, 24)
    assert torch.equal(t._columnwise_data, runner("quantize", tensor=x.view(48, 32), quantizer=NVFP4Quantizer())._columnwise_data)


@EVERY_FORMAT
def test_a_strided_or_a_quantized_tensor_is_quantized_like_its_value(runner: Runner, make: Any) -> None:
    x = normal(64, 32).t()
    assert same(runner("quantize", tensor=x, quantizer=make()), runner("quantize", tensor=x.contiguous(), quantizer=make()))
    t = runner("quantize", tensor=x.contiguous(), quantizer=make())
    again = runner("quantize", tensor=t, quantizer=MXFP8Quantizer(E4M3))
    assert same(again, runner("quantize", tensor=runner("dequantize", input=t, otype=torch.bfloat16), quantizer=MXFP8Quantizer(E4M3)))


@EVERY_FORMAT
@pytest.mark.parametrize("swizzled", [False, True])
def test_an_output_is_written_in_place(runner: Runner, make: Any, swizzled: bool) -> None:
    quantizer = make()
    quantizer.optimize_for_gemm = swizzled
    x = normal(32, 64)
    empty = {"shape": [32, 64], "dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False}
    t = runner("create_empty_quantized_tensor", quantizer=quantizer, **empty)
    before, fresh = buffers(t), runner("quantize", tensor=x, quantizer=quantizer)
    assert {name: b.shape for name, b in before.items()} == {name: b.shape for name, b in buffers(fresh).items()}  # type: ignore[union-attr]
    assert runner("quantize", tensor=x, quantizer=quantizer, output=t) is t and same(t, fresh)
    assert all(getattr(t, name) is buffer for name, buffer in before.items()) and t._dtype is torch.bfloat16
    assert getattr(t, "_with_gemm_swizzled_scales", None) == getattr(fresh, "_with_gemm_swizzled_scales", None)


@EVERY_FORMAT
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_noop_writes_nothing_at_all(runner: Runner, make: Any, skip: float) -> None:
    quantizer = make()
    t = runner("quantize", tensor=normal(32, 64), quantizer=quantizer)
    held = {name: buffer.clone() for name, buffer in buffers(t).items()}  # type: ignore[union-attr]
    runner("quantize", tensor=3 * normal(32, 64, seed=2), quantizer=quantizer, output=t, noop=torch.tensor([skip]))
    assert all(torch.equal(buffer, held[name]) == bool(skip) for name, buffer in buffers(t).items())  # type: ignore[arg-type]


def test_noop_leaves_the_order_of_scales(runner: Runner) -> None:
    quantizer = MXFP8Quantizer(E4M3)
    t = runner("quantize", tensor=normal(32, 64), quantizer=quantizer)
    quantizer.optimize_for_gemm = True
    runner("quantize", tensor=normal(32, 64, seed=2), quantizer=quantizer, output=t, noop=torch.zeros(1))
    assert not t._with_gemm_swizzled_scales
    assert same(t, runner("quantize", tensor=normal(32, 64, seed=2), quantizer=MXFP8Quantizer(E4M3)))
    runner("quantize", tensor=normal(32, 64, seed=2), quantizer=quantizer, output=t)
    assert t._with_gemm_swizzled_scales and same(t, runner("quantize", tensor=normal(32, 64, seed=2), quantizer=quantizer))


@EVERY_FORMAT
def test_every_copy_of_an_output_is_kept_up_to_date(runner: Runner, make: Any) -> None:
    x = normal(32, 64, seed=2)
    t = runner("quantize", tensor=normal(32, 64), quantizer=make())
    runner("quantize", tensor=x, quantizer=make(columnwise=False), output=t)
    assert same(t, runner("quantize", tensor=x, quantizer=make()))
    alone = runner("quantize", tensor=normal(32, 64), quantizer=make(columnwise=False))
    assert alone._columnwise_data is None and alone._columnwise_scale_inv is None
    runner("quantize", tensor=x, quantizer=make(rowwise=False), output=alone)
    assert same(alone, t)


@EVERY_FORMAT
def test_what_does_not_fit_an_output_is_refused_before_anything_is_written(runner: Runner, make: Any) -> None:
    t = runner("quantize", tensor=normal(32, 64), quantizer=make())
    held = {name: buffer.clone() for name, buffer in buffers(t).items()}  # type: ignore[union-attr]
    with pytest.raises(ShapeError, match=r"the tensor .*: expected shape \[32, 64\]"):
        runner("quantize", tensor=normal(64, 32), quantizer=make(), output=t)
    other = Float8Quantizer(torch.ones(1), None, E4M3)
    with pytest.raises(DTypeError, match="a quantized tensor"):
        runner("quantize", tensor=normal(32, 64), quantizer=other, output=t)
    with pytest.raises(DTypeError, match="a quantized tensor "):
        runner("quantize", tensor=normal(32, 64), quantizer=make(), output=torch.zeros(32, 64))
    t._columnwise_scale_inv = t._columnwise_scale_inv.flatten()
    with pytest.raises(ShapeError, match="columnwise_scale_inv of the output"):
        runner("quantize", tensor=normal(32, 64), quantizer=make(), output=t)
    t._columnwise_scale_inv = t._columnwise_scale_inv.view(held["_columnwise_scale_inv"].shape)
    assert all(torch.equal(buffer, held[name]) for name, buffer in buffers(t).items())  # type: ignore[arg-type]


REFUSED: list[tuple[Any, tuple[int, ...], torch.dtype, type[Exception], str]] = [
    (MXFP8Quantizer(E4M3), (32, 40), torch.float32, ShapeError, r"a tensor to quantize to MXFP8: expected .*multiples of 32.*, got \[32, 40\]"),
    (MXFP8Quantizer(E4M3), (40, 32), torch.float32, ShapeError, "multiples of 32"),
    (NVFP4Quantizer(), (2, 4, 32), torch.float32, ShapeError, "multiples of 16"),
    (NVFP4Quantizer(), (16, 24), torch.float32, ShapeError, "multiples of 16"),
    (Float8BlockQuantizer(E4M3), (), torch.float32, ShapeError, "at least one dimension"),
    (NVFP4Quantizer(with_rht=True), (16, 16), torch.bfloat16, ArgumentError, "with_post_rht_amax"),
    (NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), (16, 16), torch.float32, ArgumentError, "no stochastic_rounding"),
    (NVFP4Quantizer(nvfp4_use_4over6=True, **RHT), (16, 16), torch.bfloat16, ArgumentError, "no with_rht"),
    (NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), (16, 16), torch.float32, ArgumentError, "an amax per row"),
    (MXFP8Quantizer(E4M3, rowwise=False, columnwise=False), (32, 32), torch.float32, ArgumentError, "rowwise or columnwise usage"),
]


@pytest.mark.parametrize(("quantizer", "shape", "dtype", "error", "message"), REFUSED)
def test_what_cannot_be_quantized_is_refused(
    runner: Runner, quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        runner("quantize", tensor=torch.zeros(shape, dtype=dtype), quantizer=quantizer)
    assert ": expected " in str(caught.value) and str(caught.value).endswith(".")


@EVERY_FORMAT
def test_bgrad_quantize(runner: Runner, make: Any) -> None:
    x = normal(2, 16, 32)
    bias_grad, t = runner("bgrad_quantize", input=x, quantizer=make())
    assert torch.equal(bias_grad, x.float().sum((0, 1)).bfloat16()) and same(t, runner("quantize", tensor=x, quantizer=make()))


def test_several_tensors_at_once(runner: Runner) -> None:
    makers, xs = [*MAKERS.values()], [normal(32, 32 * (i + 1), seed=i) for i in range(6)]
    quantized = runner("multi_tensor_quantize", tensor_list=[*xs, xs[0]], quantizer_list=[*(make() for make in makers), None])
    assert all(same(t, runner("quantize", tensor=x, quantizer=make())) for t, x, make in zip(quantized, xs, makers, strict=False))
    assert quantized[-1] is xs[0]
    with pytest.raises(ArgumentError, match="quantizer_list of multi_tensor_quantize: expected a quantizer for each tensor, got 1 for 2"):
        runner("multi_tensor_quantize", tensor_list=xs[:2], quantizer_list=[None])


@pytest.mark.parametrize("separate", [False, True])
def test_a_split_is_quantized_part_by_part(runner: Runner, separate: bool) -> None:
    x, sections = normal(160, 64), [32, 0, 96]
    quantizers = [MXFP8Quantizer(E4M3), NVFP4Quantizer(), None]
    parts = runner("split_quantize", tensor=x, split_sections=sections, quantizer_list=quantizers, disable_bulk_allocation=separate)
    assert same(parts[0], runner("quantize", tensor=x[:32], quantizer=quantizers[0])) and torch.equal(parts[2], x[32:128])
    assert parts[1].shape == (0, 64)
    assert runner("split_quantize", tensor=x, split_sections=[], quantizer_list=[]) == []
    for wrong in ([128, 64], [-32, 64]):
        with pytest.raises(ShapeError, match="sections of 160 rows"):
            runner("split_quantize", tensor=x, split_sections=wrong, quantizer_list=[None, None])
    with pytest.raises(ArgumentError, match="a quantizer for each tensor"):
        runner("split_quantize", tensor=x, split_sections=[160], quantizer_list=[])


def test_without_a_quantizer_an_empty_tensor_is_a_plain_one(runner: Runner) -> None:
    t = runner("create_empty_quantized_tensor", quantizer=None, shape=[2, 3], dtype=torch.bfloat16, device=torch.device("cpu"), pin_memory=False)
    assert type(t) is Tensor and t.shape == (2, 3) and t.dtype is torch.bfloat16


@pytest.mark.parametrize("options", [{}, RHT, {"row_scaled_nvfp4": True}])
def test_nvfp4_with_known_amaxes(runner: Runner, options: dict[str, Any]) -> None:
    x, quantizer = normal(32, 48), NVFP4Quantizer(**options)
    t = runner("quantize", tensor=x, quantizer=quantizer)
    amaxes = {"rowwise_amax": t._amax_rowwise, "columnwise_amax": t._amax_columnwise}
    again = runner("nvfp4_quantize_with_amax", tensor=x, quantizer=quantizer, **amaxes)
    assert same(t, again) and again._amax_rowwise is not t._amax_rowwise
    doubled = runner("nvfp4_quantize_with_amax", tensor=x, quantizer=quantizer, **{name: 2 * amax for name, amax in amaxes.items()})
    # Twice the amax: half the scales of blocks, the same codes.
    scales = [s._rowwise_scale_inv.view(torch.float8_e4m3fn).float() for s in (t, doubled)]
    assert torch.equal(doubled._rowwise_data, t._rowwise_data) and torch.equal(scales[0], 2 * scales[1])
    quantizer.columnwise_usage = False
    alone = runner("nvfp4_quantize_with_amax", tensor=x, quantizer=quantizer, rowwise_amax=t._amax_rowwise, columnwise_amax=None)
    assert alone._columnwise_data is None and torch.equal(alone._rowwise_data, t._rowwise_data)


def test_nvfp4_with_known_amaxes_refuses_what_is_none(runner: Runner) -> None:
    x, one = normal(16, 32), torch.ones(1)
    with pytest.raises(DTypeError, match="an NVFP4 quantizer"):
        runner("nvfp4_quantize_with_amax", tensor=x, quantizer=MXFP8Quantizer(E4M3), rowwise_amax=one, columnwise_amax=one)
    for wrong, error in ((torch.ones(2), ShapeError), (torch.ones(1).double(), DTypeError)):
        with pytest.raises(error, match="columnwise_amax of nvfp4_quantize_with_amax: expected .*"):
            runner("nvfp4_quantize_with_amax", tensor=x, quantizer=NVFP4Quantizer(), rowwise_amax=one, columnwise_amax=wrong)


@pytest.mark.parametrize("options", [{}, RHT, {"row_scaled_nvfp4": True}])
def test_amaxes_are_reduced_over_a_group(runner: Runner, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another member of the group had amaxes four times as large."""
    asked: list[Any] = []
    group = object()

    def all_reduce(amax: Tensor, op: Any, group: Any) -> None:
        asked.append((op, group))
        amax.mul_(4)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    x = normal(32, 48)
    plain = runner("quantize", tensor=x, quantizer=NVFP4Quantizer(**options))
    assert not asked
    reduced = runner("quantize", tensor=x, quantizer=NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group, **options))
    assert asked == [(torch.distributed.ReduceOp.MAX, group)] * 2
    assert torch.equal(reduced._amax_rowwise, 4 * plain._amax_rowwise) and torch.equal(reduced._amax_columnwise, 4 * plain._amax_columnwise)
    known = {"rowwise_amax": 4 * plain._amax_rowwise, "columnwise_amax": 4 * plain._amax_columnwise}
    assert same(reduced, runner("nvfp4_quantize_with_amax", tensor=x, quantizer=NVFP4Quantizer(**options), **known))


def test_quantizers_are_read_by_attributes_alone(runner: Runner) -> None:
    """A class of another package, with a factory of its own."""

    class Foreign:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes, rowwise_usage=True, columnwise_usage=True, optimize_for_gemm=False, internal=False)

    class ForeignMX(Foreign):
        pass

    class ForeignFP4(Foreign):
        pass

    for cls in (Foreign, ForeignMX, ForeignFP4):
        tex.register_factory(cls, lambda quantizer, **fields: SimpleNamespace(**{f"_{name}": value for name, value in fields.items()}))
    x, ours = normal(128, 128), {name: MAKERS[name]() for name in ("block-1d", "mxfp8", "nvfp4")}
    for (_, quantizer), cls in zip(ours.items(), (Foreign, ForeignMX, ForeignFP4), strict=True):
        attributes = {name: value for name, value in vars(quantizer).items() if "usage" not in name}
        found = runner("quantize", tensor=x, quantizer=cls(**attributes))
        assert same(found, runner("quantize", tensor=x, quantizer=quantizer)) and found._shape == (128, 128) and found._dtype is torch.bfloat16


def test_stochastic_rounding_takes_neighbours_without_bias(runner: Runner) -> None:
    """Ten values 10^5 times each: the mean of n draws of variance p (1 - p) step^2 lies within 5 sigma of the value."""
    values, rows = torch.tensor([0.1, 0.3, -0.4, 0.99, 1.26, 1.75, -2.2, 3.9, -4.5, 5.99]), 6672
    # A block of 15 equal values and a 6, and an amax of 6 * 448, make both scales 1.
    x = torch.full((10, rows, 16), 6.0)
    x[..., :15] = values[:, None, None]
    torch.manual_seed(0)
    quantizer = NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    amax = torch.tensor([6.0 * 448])
    t = runner("nvfp4_quantize_with_amax", tensor=x, quantizer=quantizer, rowwise_amax=amax, columnwise_amax=None)
    assert (t._rowwise_scale_inv[: 10 * rows, 0].contiguous().view(torch.float8_e4m3fn).float() == 1).all()
    drawn = number_formats.decode_e2m1_pairs(t._rowwise_data)
    assert (drawn[..., 15] == 6).all()
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for value, got in zip(values, drawn[..., :15].double(), strict=True):
        lower, upper = grid[grid <= value.abs()].max() * value.sign(), grid[grid >= value.abs()].min() * value.sign()
        assert ((got == lower) | (got == upper)).all()
        share = (value - lower) / (upper - lower)
        sigma = (upper - lower).abs() * (share * (1 - share) / got.numel()).sqrt()
        assert abs(got.mean() - value) <= 5 * sigma, value


def test_stochastic_rounding_follows_torchs_generator(runner: Runner) -> None:
    x, quantizer = normal(32, 32), NVFP4Quantizer(stochastic_rounding=True)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(runner("quantize", tensor=x, quantizer=quantizer))
    assert same(draws[0], draws[1]) and not torch.equal(draws[0]._rowwise_data, draws[2]._rowwise_data)
    plain = runner("quantize", tensor=x, quantizer=NVFP4Quantizer())
    assert torch.equal(draws[0]._rowwise_scale_inv, plain._rowwise_scale_inv)


@EVERY_FORMAT
def test_the_native_kernels_serve_every_format(runner: Runner, make: Any) -> None:
    x, quantizer = normal(32, 32), make()
    t = tex.quantize(x, quantizer, None, None)
    rest = [None, None, None, None, None, False, None, False, None, 0, False, False]
    calls = {"quantize": (x, quantizer), "dequantize": (t, torch.float32), "generic_gemm": (t, True, t, False, *rest)}
    for function, arguments in calls.items():
        assert tex.explain(function, *arguments).backend == "cpu"


def test_a_hadamard_transform_is_of_the_tensor_in_bfloat16(runner: Runner) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    wide, narrow = (runner("quantize", tensor=t, quantizer=NVFP4Quantizer(**RHT)) for t in (x, x.bfloat16()))
    for name in ("columnwise_data", "columnwise_scale_inv", "amax_columnwise"):
        assert torch.equal(getattr(wide, f"_{name}"), getattr(narrow, f"_{name}"))
    assert not torch.equal(wide._amax_rowwise, narrow._amax_rowwise)  # which is quantized as it came


@pytest.mark.parametrize("make", [make for name, make in MAKERS.items() if name != "nvfp4-rht"])
def test_producers_round_to_their_dtype_first(runner: Runner, make: Any) -> None:
    x, weight = normal(32, 64), torch.ones(64)
    y = runner("gelu", input=x, quantizer=None)
    assert same(runner("gelu", input=x, quantizer=make()), runner("quantize", tensor=y, quantizer=make()))
    _bias_grad, dx = runner("dbias_dgelu", grad=x, fwd_input=x, quantizer=make())
    assert same(dx, runner("quantize", tensor=runner("dgelu", grad=x, fwd_input=x, quantizer=None), quantizer=make()))
    norm = {"input": x, "weight": weight, "eps": 1e-5, "sm_margin": 0, "zero_centered_gamma": False}
    plain = runner("rmsnorm_fwd", **norm, ln_out=None, quantizer=None, otype=torch.bfloat16)[0]
    t = runner("rmsnorm_fwd", **norm, ln_out=None, quantizer=make(), otype=torch.bfloat16)[0]
    assert same(t, runner("quantize", tensor=plain, quantizer=make())) and t._dtype is torch.bfloat16
    out = runner("quantize", tensor=x, quantizer=make())
    assert runner("rmsnorm_fwd", **norm, ln_out=out, quantizer=make(), otype=torch.bfloat16)[0] is out and same(out, t)
