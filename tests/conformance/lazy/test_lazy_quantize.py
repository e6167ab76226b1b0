"""Quantization bit for bit, int4 tensors, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fusible import lazy
from fusible.errors import DTypeError, ShapeError

_QUANTIZED = [lazy.int8, lazy.int4, lazy.float8, lazy.float8e5m2]
_FLOATS = [lazy.float32, lazy.float16, lazy.bfloat16, lazy.float64]
_SCALES = [((), None), ((6,), 0), ((10,), 1), ((10,), -1), ((2, 10), None), ((6, 10), None), ((1, 10), None)]


def _wide(x: np.ndarray, of: lazy.dtype) -> np.ndarray:
    return x.astype(np.float64 if of is lazy.float64 else np.float32)


def _spread(scale: np.ndarray, dim: int | None) -> np.ndarray:
    if scale.ndim == 2:
        return np.repeat(scale, 6 // len(scale), 0)
    return scale[:, None] if dim == 0 else scale


def _quantized(quotient: np.ndarray, to: lazy.dtype) -> np.ndarray:
    rounded = np.rint(quotient) if to.is_integer else quotient
    return np.clip(rounded, to.min, to.max).astype(to.numpy)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int8) if x.dtype == ml_dtypes.int4 else x.view(np.uint8)


def _data(of: lazy.dtype) -> np.ndarray:
    """Values of which many are halfway between two multiples of a scale that is a power of two, and some are out of range."""
    rng = np.random.default_rng(0)
    halves = rng.integers(-300, 300, (6, 10)) / 2
    return np.where(rng.random((6, 10)) < 0.5, halves, rng.standard_normal((6, 10)) * 60).astype(of.numpy)


@pytest.mark.parametrize("to", _QUANTIZED, ids=str)
@pytest.mark.parametrize("of", _FLOATS, ids=str)
def test_quantize_divides_rounds_to_even_and_saturates(of: lazy.dtype, to: lazy.dtype) -> None:
    x = _data(of)
    rng = np.random.default_rng(1)
    scales = [(np.exp2(rng.integers(-3, 3, shape)) * f).astype(of.numpy) for shape, _ in _SCALES for f in (1.0, 0.7)]
    dims = [dim for _, dim in _SCALES for _ in range(2)]
    outputs = [lazy.quantize(lazy.Tensor(x), lazy.Tensor(s), to, dim) for s, dim in zip(scales, dims, strict=True)]
    assert all(out.dtype is to and out.shape == x.shape for out in outputs)
    for got, scale, dim in zip(lazy.compile(lambda: outputs)(), scales, dims, strict=True):
        np.testing.assert_array_equal(_bits(got.numpy()), _bits(_quantized(_wide(x, of) / _spread(_wide(scale, of), dim), to)))


@pytest.mark.parametrize("of", [lazy.float32, lazy.bfloat16], ids=str)
def test_a_quotient_is_rounded_once_where_the_scale_is_a_literal_or_a_scalar(of: lazy.dtype) -> None:
    """``k * scale + scale / 2`` over ``scale`` is a tie: a product with the rounded reciprocal would often miss it."""
    scales = np.random.default_rng(2).uniform(0.5, 2, 40).astype(of.numpy)
    steps = np.arange(-100, 100) + 0.5
    for scale in scales:
        x = (steps * float(scale)).astype(of.numpy)
        want = _quantized(_wide(x, of) / _wide(scale, of), lazy.int8)
        assert lazy.quantize(lazy.Tensor(x), lazy.Tensor(scale), lazy.int8).tolist() == want.tolist()
    assert lazy.quantize(lazy.Tensor(x), float(scale), lazy.int8).tolist() == want.tolist()


def test_what_is_not_finite_saturates_and_nan_is_zero_in_an_integer() -> None:
    x = lazy.Tensor([float("inf"), float("-inf"), float("nan")])
    assert x.quantize(1.0, lazy.int8).tolist() == [127, -128, 0]
    assert x.quantize(1.0, lazy.int4).tolist() == [7, -8, 0]
    assert x.quantize(1.0, lazy.float8).tolist()[:2] == [448, -448] and np.isnan(x.quantize(1.0, lazy.float8).tolist()[2])


@pytest.mark.parametrize("to", _FLOATS, ids=str)
@pytest.mark.parametrize("of", _QUANTIZED, ids=str)
def test_dequantize_multiplies_and_rounds_once(of: lazy.dtype, to: lazy.dtype) -> None:
    x = _quantized(_data(lazy.float32), of)
    scales = [np.random.default_rng(3).uniform(0.1, 3, shape).astype(to.numpy) for shape, _ in _SCALES]
    outputs = [lazy.dequantize(lazy.Tensor(x), lazy.Tensor(s), to, dim) for s, (_, dim) in zip(scales, _SCALES, strict=True)]
    for got, scale, (_, dim) in zip(lazy.compile(lambda: outputs)(), scales, _SCALES, strict=True):
        assert got.dtype is to
        np.testing.assert_array_equal(got.numpy(), (_wide(x, to) * _spread(_wide(scale, to), dim)).astype(to.numpy))


_X, _Q = lazy.ones((6, 10)), lazy.ones((6, 10), lazy.int8)

_REFUSED = [
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones(10), lazy.int8)),
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones(10), lazy.int8, 0)),
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones(()), lazy.int8, 0)),
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones((4, 10)), lazy.int8)),
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones((2, 5)), lazy.int8)),
    (ShapeError, lambda: lazy.quantize(_X, lazy.ones((0, 10)), lazy.int8)),
    (ShapeError, lambda: lazy.quantize(lazy.ones((2, 6, 10)), lazy.ones((6, 10)), lazy.int8)),
    (ShapeError, lambda: lazy.dequantize(_Q, lazy.ones((6, 10, 1)), lazy.float32)),
    (DTypeError, lambda: lazy.dequantize(_Q, lazy.ones((), lazy.float16), lazy.float32)),
]


@pytest.mark.parametrize("case", range(len(_REFUSED)))
def test_a_wrong_scale_is_marked(case: int) -> None:
    kind, call = _REFUSED[case]
    with pytest.raises(kind) as caught:
        call()
    _, line, marks, sentence = str(caught.value).split("\n")
    assert line[marks.index("^") : marks.rindex("^") + 1].startswith("lazy.ones(") and "scale of " in sentence


def test_int4_tensors_are_stored_moved_and_cast() -> None:
    data = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    x = lazy.Tensor(data, dtype=lazy.int4)
    assert x.dtype is lazy.int4 and x.tolist() == data.tolist()
    assert lazy.Tensor(data.astype(ml_dtypes.int4)).tolist() == data.tolist()
    moved = lazy.concatenate([x.transpose(0, 1).flip(0), x], 1)[1:, ::3]
    want = np.concatenate([data.T[::-1], data], 1)[1:, ::3]
    assert moved.numpy().dtype == ml_dtypes.int4 and moved.tolist() == want.tolist()
    assert (moved.cast(lazy.float16) * 2).tolist() == (want * 2.0).tolist()
    assert x.cast(lazy.bool).tolist() == (data != 0).tolist()
    assert x[0, 0].item() == -8 and int(x[-1, -1]) == 7


def test_casts_to_int4_saturate_from_floats_and_wrap_from_integers() -> None:
    for of in (lazy.float32, lazy.float16, lazy.bfloat16, lazy.float64, lazy.float8):
        assert lazy.Tensor([1.9, -1.9, 7.9, 400, -400, np.nan], dtype=of).cast(lazy.int4).tolist() == [1, -1, 7, 7, -8, 0]
    for of in (lazy.int8, lazy.int16, lazy.int32, lazy.int64):
        assert lazy.Tensor([7, 8, -9, 100], dtype=of).cast(lazy.int4).tolist() == [7, -8, 7, 4]
    for of in (lazy.uint8, lazy.uint32, lazy.uint64):
        assert lazy.Tensor([7, 8, 255], dtype=of).cast(lazy.int4).tolist() == [7, -8, -1]
    assert lazy.Tensor([True, False]).cast(lazy.int4).tolist() == [1, 0]


def test_int4_passes_through_executables() -> None:
    run = lazy.compile(lambda x: [x.reshape(-1), x.cast(lazy.int8) + 1], args=[lazy.InputInfo((3, 1), lazy.int4)])
    data = np.array([[-8], [3], [7]], ml_dtypes.int4)
    flat, wide = run(data)
    assert flat.numpy().astype(np.int8).tolist() == [-8, 3, 7] and wide.numpy().tolist() == [[-7], [4], [8]]


def test_int4_neither_prints_nor_is_exported() -> None:
    x = lazy.Tensor([1, 2], dtype=lazy.int4)
    with pytest.raises(DTypeError, match="dequantize it, or cast it to int8 first"):
        repr(x)
    with pytest.raises(DTypeError, match="dequantize it, or cast it to int8 first"):
        x.__dlpack__()
