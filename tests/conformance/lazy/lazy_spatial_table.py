"""Records of the operations that slide windows, sample, pad, order and cut: against torch or numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from lazy_op_table import FLOATS, INTS, MOVED, SPECIAL, Op, of_shapes

from fusible import lazy
from fusible.lazy.ops.convolution import convolution, convolution_transpose

_WIDE = (lazy.float32, lazy.float64)
_HALF = (lazy.float16, lazy.bfloat16)
_FLOAT32_EPS = float(np.finfo(np.float32).eps)
_NUMBERS = FLOATS + INTS
_MOVED = (*MOVED, lazy.int4)
_INT8 = (lazy.int8, lazy.uint8)
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

Array = np.ndarray[Any, Any]
Padding = tuple[tuple[int, int], ...]
Window = tuple[tuple[int, ...], tuple[int, ...], Padding]


def _torch(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda *operands: function(*(torch.from_numpy(np.array(x, np.float64)) for x in operands)).numpy()


def _magnitudes(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*(np.abs(x.astype(np.float64)) for x in operands))


def _summed_in_float32(reference: Callable[..., Array], terms: int) -> Callable[..., float]:
    """The scale of a sum of ``terms`` in 16 bits: where they cancel, the error is not the rounding of the result but those of a float32 sum."""
    magnitudes = _magnitudes(reference)
    return lambda *operands: terms * magnitudes(*operands) * (_FLOAT32_EPS / float(ml_dtypes.finfo(operands[0].dtype).eps))


def _convolution(rank: int, stride: Any, padding: Padding, dilation: Any, groups: int) -> Callable[..., Array]:
    flat = [n for pair in reversed(padding) for n in pair]
    return _torch(lambda x, w, b=None: _CONV[rank](F.pad(x, flat), w, b, stride, 0, dilation, groups))


def _convolution_transpose(rank: int, stride: Any, padding: Padding, dilation: Any, groups: int) -> Callable[..., Array]:
    cut = [-n for pair in reversed(padding) for n in pair]
    return _torch(lambda x, w, b=None: F.pad(_CONV_TRANSPOSE[rank](x, w, b, stride, 0, 0, groups, dilation), cut))


def _convolutions(what: str, call: Any, make: Any, window: tuple[Any, Padding, Any, int], shapes: Any, terms: int) -> list[Op]:
    """A sum of ``terms`` products: that many roundings of the sum of magnitudes; and the one rounding of a 16-bit result."""
    stride, padding, dilation, groups = window
    reference = make(len(stride), stride, padding, dilation, groups)
    samples = of_shapes(*shapes)

    def run(x: Any, w: Any, b: Any = None) -> Any:
        return call(x, w, b, stride, padding, dilation, groups)

    return [
        Op(what, run, reference, samples, _WIDE, ulps=terms, scale=_magnitudes(reference)),
        *([Op(f"{what} in 16 bits", run, reference, samples, _HALF, 1, _summed_in_float32(reference, terms))] if len(stride) == 2 else []),
    ]


_WINDOWS = (
    ("1d", ((2,), ((2, 1),), (2,), 1), (((2, 3, 11), (4, 3, 3), (4,)), ((0, 3, 9), (4, 3, 2), (4,))), ((2, 3, 5), (3, 4, 3), (4,)), 10),
    ("2d", ((2, 1), ((1, 0), (0, 2)), (1, 2), 1), (((2, 3, 7, 9), (5, 3, 3, 2), (5,)),), ((2, 3, 4, 5), (3, 5, 3, 2), (5,)), 19),
    ("grouped", ((1, 2), ((1, 1), (1, 1)), (1, 1), 2), (((2, 4, 5, 6), (6, 2, 3, 3)),), ((2, 4, 5, 6), (4, 3, 3, 3)), 18),
    ("depthwise", ((1, 1), ((0, 0), (3, 0)), (1, 1), 3), (((1, 3, 5, 4), (3, 1, 2, 4), (3,)),), ((1, 3, 5, 4), (3, 1, 2, 4), (3,)), 9),
    ("3d", ((1, 2, 1), ((1, 0), (0, 1), (1, 1)), (1, 1, 2), 1), (((2, 2, 4, 5, 5), (3, 2, 2, 3, 2), (3,)),),
     ((2, 2, 3, 2, 4), (2, 3, 2, 3, 2), (3,)), 25),
)  # fmt: skip


def _windows(x: Array, window: Window, fill: Any) -> Array:
    """Every window of a padded array, flat in the last dimension."""
    kernel, stride, padding = window
    padded = np.pad(x, [(0, 0), (0, 0), *padding], constant_values=fill)
    seen = np.lib.stride_tricks.sliding_window_view(padded, kernel, tuple(range(2, x.ndim)))
    seen = seen[(slice(None), slice(None), *(slice(None, None, s) for s in stride))]
    return seen.reshape(*seen.shape[: x.ndim], -1)


def _maxpool(window: Window) -> Callable[[Array], Array]:
    return lambda x: _windows(x, window, -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min).max(-1)


def _avgpool(window: Window, inclusive: bool) -> Callable[[Array], Array]:
    def mean(x: Array) -> Array:
        count = 1 if inclusive else _windows(np.ones_like(x), window, 0).mean(-1)
        return _windows(x, window, 0).mean(-1) / count

    return mean


_POOL1 = ((3,), (1,), ((0, 0),))
_POOL2 = ((2, 3), (2, 1), ((1, 0), (1, 2)))
_POOL3 = ((2, 1, 2), (1, 2, 2), ((1, 1), (0, 0), (0, 1)))
_FAR = ((1, 2), (1, 1), ((0, 0), (3, 0)))
_POOLED = ((_POOL1, ((2, 3, 7),)), (_POOL2, ((2, 3, 5, 4),)), (_POOL3, ((1, 2, 3, 5, 4),)), (_FAR, ((1, 1, 2, 3),)))


def _call_avgpool(x: Any, window: Window, inclusive: bool) -> Any:
    return lazy.avgpool(x, *window, count_include_pad=inclusive)


def _pools() -> list[Op]:
    ops = []
    for window, shapes in _POOLED:
        rank = f"{len(window[0])}d{' beyond the edge' * (window is _FAR)}"
        terms = int(np.prod(window[0])) + 1
        every = window is _POOL2
        ops.append(Op(f"maxpool {rank}", lambda x, w=window: x.maxpool(*w), _maxpool(window), of_shapes(shapes), _NUMBERS if every else FLOATS))
        for inclusive in (True, False):
            reference = _avgpool(window, inclusive)
            call = partial(_call_avgpool, window=window, inclusive=inclusive)
            name = f"avgpool {rank} {'with' if inclusive else 'without'} padding"
            ops.append(Op(name, call, reference, of_shapes(shapes), _WIDE, ulps=terms, scale=_magnitudes(reference)))
            if every:
                scale = _summed_in_float32(reference, terms)
                ops.append(Op(f"{name} in 16 bits", call, reference, of_shapes(shapes), _HALF, ulps=1, scale=scale))
    return ops


def _interpolated(mode: str, align: bool, to: dict[str, Any]) -> Callable[[Array], Array]:
    names = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    return lambda x: _torch(lambda t: F.interpolate(t, **to, mode=names[mode, x.ndim - 2], align_corners=align))(x)


_TARGETS = (((2, 3, 9), (5,)), ((2, 3, 4), (9,)), ((1, 2, 5, 7), (11, 4)), ((2, 1, 4, 1), (1, 3)), ((1, 1, 3, 4, 5), (5, 4, 2)))
_SCALED = (((1, 2, 5, 7), (1.7, 0.6)), ((1, 1, 4, 5), (1.2, 1.1)))


def _resizes() -> list[Op]:
    """Positions up to 10 carry a rounding or two of their own (10 eps each), times neighbours that differ by twice the largest magnitude, in up
    to three dimensions: 64 eps, and twice that for four neighbours. Computed in float32, a 16-bit result is rounded once.
    """
    ops = []
    for mode, ulps in (("linear", 64), ("cubic", 128)):
        for align in (False, True):
            cases = [(shape, (*shape[:2], *size), {"size": size}, {}) for shape, size in _TARGETS]
            cases += [(shape, None, {"scale_factor": s}, {"scales": (1, 1, *s)}) for shape, s in _SCALED]
            for i, (shape, target, to, scales) in enumerate(cases):
                if mode == "linear" or len(shape) == 4:
                    name = f"resize {mode} {i}{' aligned' * align}"
                    call = partial(lazy.resize, output_shape=target, mode=mode, align_corners=align, **scales)
                    common = (call, _interpolated(mode, align, to), of_shapes((shape,)))
                    ops.append(Op(name, *common, _WIDE if i == 2 else _WIDE[:1], ulps=ulps, scale=_largest_magnitude))
                    if i == 2:
                        ops.append(Op(f"{name} in 16 bits", *common, _HALF, ulps=1, scale=_largest_magnitude))
    return ops


def _largest_magnitude(x: Array) -> float:
    return np.abs(x.astype(np.float64)).max()


def _nearest(*sizes: int) -> Callable[[Array], Array]:
    def take(x: Array) -> Array:
        for dim, size in enumerate(sizes):
            x = np.take(x, np.arange(size) * x.shape[dim] // size, dim)
        return x

    return take


def _rounded(x: Array) -> Array:
    doubled = _torch(lambda t: F.interpolate(t, scale_factor=2.0, mode="bilinear"))(x)
    return np.floor(doubled + 0.5).astype(x.dtype)


def _order(x: Array) -> Array:
    """Indices in descending order along the last dimension: NaN first, equal elements in their order."""
    wide = x.astype(np.float64)
    return np.lexsort((-wide, ~np.isnan(wide)), axis=-1).astype(np.int32)


def _largest(x: Array, k: int) -> Array:
    return np.take_along_axis(x, _order(x)[..., :k], -1)


_TOP = of_shapes(((9,),), ((3, 7),), ((0, 4),), ((2, 1, 8),))
_RESIZE2 = of_shapes(((2, 3, 5, 4),))

SPATIAL: tuple[Op, ...] = (
    *(op for name, window, shapes, _, terms in _WINDOWS
      for op in _convolutions(f"convolution {name}", convolution, _convolution, window, shapes, terms)),
    *(op for name, window, _, shapes, terms in _WINDOWS
      for op in _convolutions(f"transposed-convolution {name}", convolution_transpose, _convolution_transpose, window, (shapes,), terms)),
    Op("transposed-convolution with much padding", lambda x, w: convolution_transpose(x, w, padding=((2, 1),)),
       _convolution_transpose(1, (1,), ((2, 1),), (1,), 1), of_shapes(((1, 2, 6), (2, 3, 2))), _WIDE, ulps=4,
       scale=_magnitudes(_convolution_transpose(1, (1,), ((2, 1),), (1,), 1))),
    *_pools(),
    Op("maxpool with NaN", lambda x: x.maxpool((2,)), _maxpool(((2,), (1,), ((0, 0),))),
       lambda of, rng: [[SPECIAL.astype(of.numpy)[None, None]]]),
    *_resizes(),
    Op("resize nearest", lambda x: x.resize((2, 3, 8, 3), "nearest"), _nearest(2, 3, 8, 3), _RESIZE2, FLOATS + _INT8),
    Op("resize nearest, torch's", lambda x: lazy.resize(x, scales=(1, 1, 1.7, 0.6), mode="nearest"),
       _torch(lambda t: F.interpolate(t, scale_factor=(1.7, 0.6), mode="nearest")), _RESIZE2, FLOATS),
    Op("resize of any dimension", lambda x: x.resize((5, 3), mode="nearest"), _nearest(5, 3), of_shapes(((2, 4),)), FLOATS),
    Op("resize to nothing", lambda x: x.resize((2, 0)), lambda x: x[:, :0], of_shapes(((2, 0),)), FLOATS + _INT8),
    Op("resize of integers", lambda x: x.resize((1.0, 1.0, 2.0, 2.0)), _rounded, _RESIZE2, _INT8),
    Op("reflecting pad", lambda x: lazy.pad(x, ((1, 2), (0, 3), (0, 0)), "reflect"), lambda x: np.pad(x, ((1, 2), (0, 3), (0, 0)), "reflect"),
       of_shapes(((3, 4, 2),), ((3, 4, 0),)), _MOVED),
    Op("reflecting pad of nothing", lambda x: x.pad(((0, 0), (0, 1)), "reflect"), lambda x: np.pad(x, ((0, 0), (0, 1)), "reflect"),
       of_shapes(((0, 2),)), _MOVED),
    Op("pad with a value", lambda x: x.pad(((1, 0), (0, 2)), value=1), lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=x.dtype.type(1)),
       of_shapes(((3, 4),), ((0, 2),)), _MOVED),
    Op("topk values", lambda x: x.topk(4, -1)[0], lambda x: _largest(x, 4), _TOP, _NUMBERS),
    Op("topk indices", lambda x: x.topk(4, -1)[1], lambda x: _order(x)[..., :4], _TOP, _NUMBERS),
    Op("topk of a leading dimension", lambda x: x.topk(2, 0)[1], lambda x: _order(x.T).T[:2], of_shapes(((5, 3),)), _NUMBERS),
    Op("topk with many ties", lambda x: x.topk(900, 0)[1], lambda x: _order(x)[:900], of_shapes(((1000,),)), (lazy.int32, lazy.uint8)),
    Op("topk of none", lambda x: x.topk(0, -1)[0], lambda x: x[..., :0], _TOP, _NUMBERS),
    Op("topk with NaN", lambda x: x.topk(9, 0)[1], _order, lambda of, rng: [[SPECIAL.astype(of.numpy)], [-SPECIAL.astype(of.numpy)]], FLOATS),
    Op("flip of all", lambda x: x.flip(), np.flip, of_shapes(((),), ((2, 3),), ((0, 2),)), _MOVED),
    Op("flip of some", lambda x: x.flip((-1, 0)), lambda x: np.flip(x, (-1, 0)), of_shapes(((2, 3, 4),)), _MOVED),
    Op("split into parts", lambda x: lazy.split(x, 3, -1)[1], lambda x: np.split(x, 3, -1)[1], of_shapes(((2, 6),), ((2, 0),)), _MOVED),
    Op("concatenate along the last", lambda a, b: lazy.concatenate((a, b), -1), lambda a, b: np.concatenate((a, b), -1),
       of_shapes(((2, 0), (2, 3)), ((4,), (1,)), ((0, 1), (0, 2))), _MOVED),
    Op("stack of scalars", lambda a, b: lazy.stack((a, b)), lambda a, b: np.stack((a, b)), of_shapes(((), ()), ((0, 2), (0, 2))), _MOVED),
    Op("squeeze of all", lambda x: x.squeeze(), np.squeeze, of_shapes(((1, 3, 1),), ((1,),), ((1, 0),)), _MOVED),
    Op("squeeze of several", lambda x: x.squeeze((0, -1)), lambda x: x.squeeze((0, -1)), of_shapes(((1, 3, 1),), ((1, 0, 1),)), _MOVED),
    Op("unsqueeze in front", lambda x: x.unsqueeze(-2), lambda x: np.expand_dims(x, -2), of_shapes(((3,),), ((0, 2),)), _MOVED),
    Op("flatten of all", lambda x: x.flatten(), lambda x: x.reshape(-1), of_shapes(((),), ((2, 3),), ((0, 2),)), _MOVED),
    Op("flatten of the middle", lambda x: x.flatten(-3, -2), lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1),
       of_shapes(((2, 3, 4, 5),), ((2, 1, 3, 1),)), _MOVED),
    Op("transpose by negative dimensions", lambda x: x.transpose(-2, 0), lambda x: x.swapaxes(-2, 0), of_shapes(((2, 3, 4),), ((2, 0),)), _MOVED),
    Op("permute by negative dimensions", lambda x: x.permute((-1, 0, 1)), lambda x: x.transpose(-1, 0, 1), of_shapes(((2, 0, 4),)), _MOVED),
    Op("expand to nothing", lambda x: x.expand((0, -1)), lambda x: np.broadcast_to(x, (0, 3)), of_shapes(((1, 3),), ((3,),)), _MOVED),
    Op("gather by a scalar", lambda x: x.gather(-1, lazy.Tensor(-2)), lambda x: np.take(x, -2, -1), of_shapes(((2, 3),), ((0, 4),)), _MOVED),
    Op("gather of nothing", lambda x: x.gather(0, lazy.zeros((0, 2), lazy.int64)), lambda x: np.take(x, np.zeros((0, 2), int), 0),
       of_shapes(((2, 3),), ((0, 4),)), _MOVED),
    Op("gather beyond the edge", lambda x: x.gather(0, lazy.Tensor([9, -9])), lambda x: np.take(x, [9, 0], 0, mode="clip"),
       of_shapes(((4, 2),)), _MOVED),
)  # fmt: skip
