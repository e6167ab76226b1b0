"""The storages and quantizers of block-scaled formats: fields, shapes, usages, saving, views."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.quantized import (
    BlockScaledStorage,
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4TensorStorage,
)
from fusible.tex import DType
from fusible.tex.operands import kind

E4M3, E5M2, E2M1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1
COPIES = ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]
STORAGES: dict[type[BlockScaledStorage], list[str]] = {
    Float8BlockwiseQTensorStorage: [*COPIES, "fp8_dtype", "quantizer", "is_2D_scaled"],
    MXFP8TensorStorage: [*COPIES, "fp8_dtype", "quantizer", "with_gemm_swizzled_scales"],
    NVFP4TensorStorage: [*COPIES, "amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales"],
}
MAKERS: dict[str, Any] = {
    "block-1d": lambda **usages: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usages),
    "block-2d": lambda **usages: Float8BlockQuantizer(E5M2, **usages),
    "mxfp8": lambda **usages: MXFP8Quantizer(E4M3, **usages),
    "nvfp4": lambda **usages: NVFP4Quantizer(**usages),
}
EVERY_FORMAT = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("storage", STORAGES)
def test_constructors_take_the_fields_in_their_order(storage: Any) -> None:
    names = STORAGES[storage]
    assert list(inspect.signature(storage).parameters)[: len(names)] == names
    known = {"fp8_dtype": 7, "fp4_dtype": 10}
    held = storage(*(known.get(name, name) for name in names), fake_dtype=torch.float16)
    assert all(getattr(held, f"_{name}") == known.get(name, name) for name in names) and held.dtype is torch.float16
    assert set(held.get_metadata()) == {*names, *storage._OPTIONS, "fake_dtype"}
    assert storage(*(known.get(name) for name in names))._dtype is torch.float32


def test_a_bound_of_e4m3_is_that_of_4_over_6() -> None:
    nothing = [None] * 6
    assert NVFP4TensorStorage(*nothing, E2M1, None, False, nvfp4_e4m3_max=256)._nvfp4_e4m3_max == 448
    assert NVFP4TensorStorage(*nothing, E2M1, None, False, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)._nvfp4_e4m3_max == 256


SHAPES = [
    (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1), (3, 100, 130), (2, 300), (3, 132), (130, 3, 100)),
    (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2), (3, 100, 130), (3, 4), (2, 4), (130, 3, 100)),
    (lambda: MXFP8Quantizer(E4M3), (3, 32, 160), (128, 8), (4, 256), (3, 32, 160)),
    (lambda: NVFP4Quantizer(), (3, 16, 96), (128, 8), (128, 4), (96, 3, 16)),
]


@pytest.mark.parametrize(("make", "shape", "rowwise", "columnwise", "turned"), SHAPES)
def test_shapes(make: Any, shape: tuple[int, ...], rowwise: tuple[int, int], columnwise: tuple[int, int], turned: tuple[int, ...]) -> None:
    quantizer = make()
    assert quantizer.get_scale_shape(shape, False) == rowwise and quantizer.get_scale_shape(shape, True) == columnwise
    assert quantizer.get_columnwise_shape(shape) == turned
    packed = quantizer.convert_shape_for_fp4 if isinstance(quantizer, NVFP4Quantizer) else tuple
    for t in (quantizer(normal(*shape)), quantizer.make_empty(shape, dtype=torch.bfloat16)):
        assert t.shape == t.size() == shape and t.size(-1) == shape[-1] and t.dtype is torch.bfloat16 and t.device.type == "cpu"
        assert t._rowwise_data.shape == packed(shape) and t._columnwise_data.shape == packed(turned)
        assert t._rowwise_scale_inv.shape == rowwise and t._columnwise_scale_inv.shape == columnwise
        assert t._quantizer is quantizer and t.get_data_tensors() == (t._rowwise_data, t._columnwise_data)


def test_quantizable_are_whole_blocks() -> None:
    for quantizer, length in ((Float8BlockQuantizer(E4M3), 128), (MXFP8Quantizer(E4M3), 32), (NVFP4Quantizer(), 16)):
        for shape, whole in (((length, 2 * length), True), ((2, length // 2, length), True), ((length, length + 1), False), ((length,), False)):
            assert quantizer.is_quantizable(torch.empty(shape)) == whole


def test_kinds_name_the_format() -> None:
    for name, make in MAKERS.items():
        quantizer, t = make(), make()(normal(32, 32))
        found = name.split("-")[0]
        assert kind(quantizer) == (found, quantizer.dtype, 3) and kind(t) == (found, "cpu", quantizer.dtype)
    assert kind(MXFP8Quantizer(E4M3, columnwise=False)) == ("mxfp8", E4M3, 2)


@EVERY_FORMAT
def test_copies_can_be_dropped_and_not_all_of_them(make: Any) -> None:
    t = make()(normal(32, 32))
    assert t.get_usages() == {"rowwise": True, "columnwise": True}
    t.update_usage()
    values = t.dequantize()
    t.update_usage(columnwise_usage=False)
    assert t.get_usages() == {"rowwise": True, "columnwise": False} and t._columnwise_scale_inv is None
    assert getattr(t, "_amax_columnwise", None) is None and torch.equal(t.dequantize(), values)
    with pytest.raises(ArgumentError, match="at least one usage"):
        t.update_usage(rowwise_usage=False)
    assert t.get_usages()["rowwise"]
    other = make()(normal(32, 32))
    other.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert other.get_usages() == {"rowwise": False, "columnwise": True} and other.shape == (32, 32) and other.dequantize().shape == (32, 32)
    with pytest.raises(ArgumentError, match="a request for rowwise data"):
        other.update_usage(rowwise_usage=True)


@pytest.mark.parametrize("name", ["block-1d", "mxfp8", "nvfp4"])
def test_a_copy_that_would_be_quantized_twice_is_refused(name: str) -> None:
    t = MAKERS[name](columnwise=False)(normal(32, 32))
    with pytest.raises(ArgumentError, match="a request for columnwise data"):
        t.update_usage(columnwise_usage=True)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize("shape", [(300, 200), (2, 128, 256)])
def test_tiles_of_fp8_are_turned(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    t, both = Float8BlockQuantizer(E4M3, columnwise=False)(x), Float8BlockQuantizer(E4M3)(x)
    t.update_usage(columnwise_usage=True)
    assert torch.equal(t._columnwise_data, both._columnwise_data) and torch.equal(t._columnwise_scale_inv, both._columnwise_scale_inv)
    t.update_usage(rowwise_usage=False)
    assert torch.equal(t.dequantize(), both.dequantize())


@pytest.mark.skipif("nvfp4_data_transpose" not in tex.DECLARATIONS, reason="tex does not transpose NVFP4 data")
@pytest.mark.parametrize("shape", [(48, 96), (2, 64, 32)])
def test_tiles_of_nvfp4_are_turned(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    t, both = NVFP4Quantizer(columnwise=False, with_2d_quantization=True)(x), NVFP4Quantizer(with_2d_quantization=True)(x)
    t.update_usage(columnwise_usage=True)
    for name in ("data", "scale_inv"):
        assert torch.equal(getattr(t, f"_columnwise_{name}"), getattr(both, f"_columnwise_{name}"))
    assert torch.equal(t._amax_columnwise, both._amax_columnwise) and t._amax_columnwise is not t._amax_rowwise


@EVERY_FORMAT
def test_saving_takes_the_tensors_out_and_puts_them_back(make: Any) -> None:
    t = make()(normal(32, 32)).storage_without_autograd()
    values, fields = t.dequantize(), t.get_metadata()
    tensors, same = t.prepare_for_saving()
    assert same is t and len(tensors) == len(t._TENSORS) and t.get_usages() == {"rowwise": False, "columnwise": False}
    assert tensors[:2] == [fields["rowwise_data"], fields["columnwise_data"]]
    assert t.restore_from_saved([*tensors, "rest"]) == ["rest"]
    assert torch.equal(t.dequantize(), values) and all(t.get_metadata()[name] is field for name, field in fields.items() if torch.is_tensor(field))
    again = type(t)(**t.get_metadata())
    assert torch.equal(again.dequantize(), values) and repr(again) == repr(t)
    t.clear()
    assert t._rowwise_data is None and "shape=None" in repr(t)


@EVERY_FORMAT
def test_values_and_updates(make: Any) -> None:
    x, y = normal(64, 32), normal(64, 32, seed=2)
    t = make()(x)
    assert t.dequantize().dtype is torch.bfloat16 and t.dequantize(dtype=torch.float32).dtype is torch.float32
    # The relative distance of neighbours is 2^-2 in E5M2, 2^-3 in E4M3, at most 2^-1 in E2M1; and a scale that is rounded to fit costs 2^-4 of it.
    assert ((t.dequantize().float() - x.float()).abs().max() <= x.float().abs().max() * 2**-2).all()
    data = t._rowwise_data
    assert t.quantize_(y) is t and t._rowwise_data is data and torch.equal(t.dequantize(), make()(y).dequantize())
    t.quantize_(x, noop_flag=torch.ones(1))
    assert torch.equal(t.dequantize(), make()(y).dequantize())
    other = make()(x)
    other.copy_from_storage(t)
    assert torch.equal(other.dequantize(), t.dequantize()) and other._rowwise_data is not t._rowwise_data
    foreign = MXFP8Quantizer(E5M2)(x)
    with pytest.raises(ArgumentError, match="copy_from_storage: expected .*"):
        other.copy_from_storage(foreign)


@EVERY_FORMAT
def test_views_have_other_leading_dimensions(make: Any) -> None:
    t = make()(normal(64, 32)).storage_without_autograd()
    for shape in ((2, 32, 32), [4, 16, 32], (2, -1, 32)):
        v = t.view(shape)
        whole = tuple(32 if size == -1 else size for size in shape)
        assert v.shape == whole and torch.equal(v.dequantize(), t.dequantize().view(whole))
        assert v._rowwise_data.data_ptr() == t._rowwise_data.data_ptr()
        v.update_usage(rowwise_usage=False)
        assert v.shape == whole and t._rowwise_data is not None
    assert t.view(2, 32, 32).shape == (2, 32, 32)
    for wrong in ((32, 64), (65, 32), ()):
        with pytest.raises(ShapeError, match="the same last dimension"):
            t.view(wrong)


def test_options_are_checked_where_they_are_given() -> None:
    for call, error in (
        (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=3), ArgumentError),
        (lambda: MXFP8Quantizer(E2M1), DTypeError),
        (lambda: NVFP4Quantizer(E4M3), DTypeError),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=255), ArgumentError),
        (lambda: NVFP4Quantizer(nvfp4_4over6_err_mode="max"), ArgumentError),
    ):
        with pytest.raises(error, match=": expected "):
            call()
    assert NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448 and NVFP4Quantizer(nvfp4_4over6_err_mode="mse").nvfp4_4over6_err_mode == "MSE"


def test_the_hadamard_matrix_is_orthonormal_and_its_mask_holds_the_signs() -> None:
    quantizer, plain = NVFP4Quantizer(), NVFP4Quantizer(with_random_sign_mask=False)
    matrix = quantizer.rht_matrix.float()
    assert quantizer.rht_matrix.dtype is torch.bfloat16 and torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert plain.rht_matrix_random_sign_mask_t == 0 and (plain.rht_matrix[0] == 0.25).all()
    signs = torch.tensor([-1.0 if quantizer.rht_matrix_random_sign_mask_t >> i & 1 else 1.0 for i in range(16)])
    assert torch.equal(matrix, signs[:, None] * plain.rht_matrix.float())
    assert signs.tolist() == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def test_a_copied_quantizer_has_usages_of_its_own() -> None:
    quantizer = NVFP4Quantizer(row_scaled_nvfp4=True)
    other = quantizer.copy()
    other.set_usage(columnwise=False)
    assert quantizer.columnwise_usage and not other.columnwise_usage and other.row_scaled_nvfp4  # type: ignore[attr-defined]
