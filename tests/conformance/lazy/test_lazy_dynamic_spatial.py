"""Windows, sampling, order and scales on sizes that a call determines, in this process and from a file, against torch or numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusible import lazy
from fusible.errors import ArgumentError, CompileError, ShapeError
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.ops.convolution import convolution, convolution_transpose
from fusible.lazy.trace.checker import check_trace

_F32 = lazy.float32
_D = (1, 6, 12)


def _info(*shape: Any) -> lazy.InputInfo:
    return lazy.InputInfo(shape, _F32)


def _resized(to: Any, mode: str = "linear", align: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``lazy.resize`` and torch's on ``[N, C, width]`` (``[N, C, height, width]`` if cubic); ``to`` gives the spatial sizes."""

    def call(x: lazy.Tensor) -> lazy.Tensor:
        return lazy.resize(x, (*x.shape[:2], *to(*x.shape[2:])), mode, align)

    names = {"cubic": "bicubic"}
    return call, lambda x: F.interpolate(x, size=to(*x.shape[2:]), mode=names.get(mode, mode), align_corners=None if mode == "nearest" else align)


def _scaled(*scales: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return partial(lazy.resize, scales=(1, 1, *scales)), lambda x: F.interpolate(x, scale_factor=scales, mode="linear")


def _quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).round().clamp(-128, 127)


_Case = tuple[Callable[..., Any], Callable[..., Any], list[lazy.InputInfo], list[tuple[tuple[int, ...], ...]]]
_CASES: dict[str, _Case] = {
    "convolution": (
        lambda x, w, b: convolution(x, w, b, stride=(2,), padding=((1, 0),), dilation=(2,)),
        lambda x, w, b: F.conv1d(F.pad(x, (1, 0)), w, b, 2, 0, 2),
        [_info(_D, 3, _D), _info(4, 3, 3), _info(4)],
        [((2, 3, 7), (4, 3, 3), (4,)), ((1, 3, 12), (4, 3, 3), (4,))],
    ),
    "convolution of dynamic channels and kernels": (
        lambda x, w, b: convolution(x, w, b, padding=((2, 2),), groups=2),
        lambda x, w, b: F.conv1d(x, w, b, 1, 2, 1, 2),
        [_info(2, _D, _D), _info(_D, _D, (1, 3, 5)), _info(_D)],
        [((2, 6, 5), (4, 3, 2), (4,)), ((2, 2, 8), (6, 1, 5), (6,))],
    ),
    "transposed convolution": (
        lambda x, w: convolution_transpose(x, w, stride=(3,), padding=((1, 2),), dilation=(2,)),
        lambda x, w: F.pad(F.conv_transpose1d(x, w, None, 3, 0, 0, 1, 2), (-1, -2)),
        [_info(_D, 3, _D), _info(3, _D, 3)],
        [((2, 3, 1), (3, 2, 3)), ((1, 3, 5), (3, 1, 3))],
    ),
    "transposed convolution of dynamic kernels, in this process": (
        lambda x, w: convolution_transpose(x, w, stride=(2,)),
        lambda x, w: F.conv_transpose1d(x, w, None, 2),
        [_info(1, 3, _D), _info(3, 2, _D)],
        [((1, 3, 4), (3, 2, 3)), ((1, 3, 5), (3, 2, 1))],
    ),
    "maxpool": (
        lambda x: x.maxpool((2, 3), (2, 1), ((1, 0), (1, 1))),
        lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 0), value=-np.inf), (2, 3), (2, 1)),
        [_info(1, 2, _D, _D)],
        [((1, 2, 5, 4),), ((1, 2, 12, 1),)],
    ),
    "avgpool": (
        lambda x: x.avgpool((3,), (2,), ((1, 1),), count_include_pad=False),
        lambda x: F.avg_pool1d(x.flatten(0, 0), 3, 2, 1, count_include_pad=False),
        [_info(_D, 2, _D)],
        [((2, 2, 5),), ((1, 2, 12),)],
    ),
    "resize to twice the size": (*_resized(lambda n: (2 * n,)), [_info(_D, 2, _D)], [((1, 2, 5),), ((3, 2, 12),)]),
    "resize to a fixed size": (*_resized(lambda n: (7,)), [_info(1, 2, _D)], [((1, 2, 1),), ((1, 2, 12),)]),
    "resize from a fixed size": (*_resized(lambda n: (7,), "nearest"), [_info(_D, 2, 5)], [((1, 2, 5),), ((3, 2, 5),)]),
    "nearest resize": (*_resized(lambda n: (n + n // 3,), "nearest"), [_info(1, 2, _D)], [((1, 2, 4),), ((1, 2, 11),)]),
    "aligned resize": (*_resized(lambda n: (2 * n - 1,), align=True), [_info(1, 2, _D)], [((1, 2, 1),), ((1, 2, 12),)]),
    "aligned resize to one": (*_resized(lambda n: (n // 4,), align=True), [_info(1, 2, (4, 6, 12))], [((1, 2, 4),), ((1, 2, 12),)]),
    "cubic resize": (*_resized(lambda n, m: (n + 1, m), "cubic"), [_info(1, 2, _D, _D)], [((1, 2, 4, 3),), ((1, 2, 12, 5),)]),
    "scales": (*_scaled(1.5), [_info(1, 2, _D)], [((1, 2, 3),), ((1, 2, 12),)]),
    "decimal scales": (*_scaled(1.7), [_info(1, 2, _D)], [((1, 2, 10),), ((1, 2, 11),)]),
    "topk": (
        lambda x: (x.topk(2, 1)[0], x.topk(x.shape[1] // 2, 1)[0], x.topk(x.shape[0], 0)[1]),
        lambda x: (x.topk(2, 1)[0], x.topk(x.shape[1] // 2, 1)[0], x.argsort(0, descending=True)),
        [_info(_D, _D)],
        [((1, 2),), ((4, 7),)],
    ),
    "reflecting pad": (
        lambda x: lazy.pad(x, ((0, 0), (2, 3)), "reflect"),
        lambda x: F.pad(x, (2, 3), "reflect"),
        [_info(_D, _D)],
        [((1, 4),), ((5, 12),)],
    ),
    "pad by sizes": (
        lambda x: lazy.pad(x, ((x.shape[1], 0), (0, x.shape[0] - 1))),
        lambda x: F.pad(x, (0, x.shape[0] - 1, x.shape[1], 0)),
        [_info(_D, _D)],
        [((1, 4),), ((5, 2),)],
    ),
    "search and repeat": (
        lambda x: (x.argmax(0), x.argmin(1), x.argmax(), x.repeat(x.shape[0] - 1, 1), x.max(0), x.min(1), lazy.softmax(x, 0)),
        lambda x: (x.argmax(0), x.argmin(1), x.argmax(), x.repeat_interleave(len(x) - 1, 1), x.amax(0), x.amin(1), x.softmax(0)),
        [_info((0, 6, 12), _D)],
        [((1, 4),), ((5, 2),)],
    ),
    "quantization per channel and per block": (
        lambda x, s, t: (x.quantize(s, lazy.int8, 1).cast(_F32), x.quantize(t, lazy.int8).cast(_F32)),
        lambda x, s, t: (_quantized(x, s), _quantized(x, t.repeat_interleave(len(x) // len(t), 0))),
        [_info(_D, _D), _info(_D), _info((1, 2, 3), _D)],
        [((4, 3), (3,), (2, 3)), ((3, 5), (5,), (3, 5))],
    ),
    "gather of a dimension that may be empty": (
        lambda x: x.gather(0, lazy.Tensor([0, -1], dtype=lazy.int32)),
        lambda x: x[[0, -1]],
        [_info((0, 6, 12))],
        [((1,),), ((7,),)],
    ),
    "windows of sizes, in this process": (
        lambda x: (x.avgpool((x.shape[2],)), x.maxpool((x.shape[2] // 2,), (x.shape[2] // 2,))),
        lambda x: (F.avg_pool1d(x, x.shape[2]), F.max_pool1d(x, x.shape[2] // 2)),
        [_info(1, 2, (2, 6, 12))],
        [((1, 2, 2),), ((1, 2, 7),)],
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_dynamic_sizes_give_what_torch_does_and_so_does_the_file(name: str, tmp_path: Path) -> None:
    function, reference, infos, calls = _CASES[name]
    executable = lazy.compile(function, args=infos)
    check_trace(executable.trace)
    runs = [executable]
    if "in this process" in name:
        with pytest.raises(
            CompileError, match="(pooling|convolutiontranspose) recorded at .*: expected an operation that StableHLO has for dynamic sizes, "
        ):
            executable.save(tmp_path / "program")
    else:
        assert "?" in executable.stablehlo.text
        check_flat_ir(executable.flat_ir)
        executable.save(tmp_path / "program")
        runs.append(lazy.Executable.load(tmp_path / "program"))
    rng = np.random.default_rng(0)
    for shapes in calls:
        args = [rng.permutation(np.prod(s)).reshape(s).astype(np.float32) / 32 + 0.25 for s in shapes]
        want = reference(*[torch.from_numpy(a.astype(np.float64)) for a in args])
        for run in runs:
            _agree(run(*args), want)


def _agree(got: Any, want: Any) -> None:
    """The longest sum has 12 products of numbers below 12, and positions below 12 have two roundings of their own."""
    bound = 12 * 12 * np.finfo(np.float32).eps
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        assert a.shape == tuple(b.shape)
        np.testing.assert_allclose(a.numpy().astype(np.float64), b.numpy(), rtol=bound, atol=bound)


def _filled(module: lazy.Module) -> lazy.Module:
    module.initialize_dummy_parameters()
    return module


_REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = [
    (
        "the padded input of convolution",
        lambda x, w: convolution(x, w),
        (_info(1, 2, _D), _info(4, 2, 3)),
        ((1, 2, 3), (4, 2, 3)),
        ((1, 2, 2), (4, 2, 3)),
    ),
    (
        "the channels of convolution",
        lambda x, w: convolution(x, w),
        (_info(1, _D, 9), _info(4, 2, 3)),
        ((1, 2, 9), (4, 2, 3)),
        ((1, 3, 9), (4, 2, 3)),
    ),
    (
        "the groups of convolution",
        lambda x, w: convolution(x, w, groups=2),
        (_info(1, 4, 9), _info(_D, 2, 3)),
        ((1, 4, 9), (4, 2, 3)),
        ((1, 4, 9), (3, 2, 3)),
    ),
    (
        "the bias of a convolution",
        lambda x, w, b: convolution(x, w, b),
        (_info(1, 2, 9), _info(4, 2, 3), _info(_D)),
        ((1, 2, 9), (4, 2, 3), (4,)),
        ((1, 2, 9), (4, 2, 3), (3,)),
    ),
    (
        "the result of convolution_transpose",
        lambda x, w: convolution_transpose(x, w, padding=((3, 3),)),
        (_info(1, 2, _D), _info(2, 4, 3)),
        ((1, 2, 4), (2, 4, 3)),
        ((1, 2, 3), (2, 4, 3)),
    ),
    (
        "the input of convolution_transpose",
        lambda x, w: convolution_transpose(x, w),
        (_info(1, 2, (0, 2, 3)), _info(2, 4, 3)),
        ((1, 2, 1), (2, 4, 3)),
        ((1, 2, 0), (2, 4, 3)),
    ),
    ("the padded input of maxpool", lambda x: x.maxpool((4,)), (_info(1, 2, _D),), ((1, 2, 4),), ((1, 2, 3),)),
    ("kernel_dims of avgpool", lambda x: x.avgpool((x.shape[2] // 4,)), (_info(1, 2, _D),), ((1, 2, 4),), ((1, 2, 3),)),
    ("the input of resize", lambda x: lazy.resize(x, (4,)), (_info((0, 2, 4)),), ((1,),), ((0,),)),
    ("the dimension of topk", lambda x: x.topk(4, 0)[0], (_info(_D),), ((4,),), ((3,),)),
    ("k of topk", lambda x: x.topk(x.shape[0] - 4, 0)[0], (_info(_D),), ((4,),), ((3,),)),
    ("a reflecting pad", lambda x: lazy.pad(x, ((2, 0),), "reflect"), (_info(_D),), ((3,),), ((2,),)),
    ("pad of pad", lambda x: lazy.pad(x, ((x.shape[0] - 3, 0),)), (_info(_D),), ((3,),), ((2,),)),
    ("the dimension of argmax", lambda x: x.argmax(0), (_info((0, 2, 4)),), ((1,),), ((0,),)),
    ("the dimensions of max", lambda x: x.max(0), (_info((0, 2, 4)),), ((1,),), ((0,),)),
    ("gather", lambda x: x.gather(0, lazy.zeros((2,), lazy.int32)), (_info((0, 2, 4)),), ((1,),), ((0,),)),
    ("repeats of repeat", lambda x: x.repeat(x.shape[0] - 2, 0), (_info(_D),), ((2,),), ((1,),)),
    (
        "the scale of quantize",
        lambda x, s: x.quantize(s, lazy.int8),
        (_info(_D, 3), _info((1, 2, 3), 3)),
        ((6, 3), (2, 3)),
        ((5, 3), (2, 3)),
    ),
    ("the input of Linear", _filled(lazy.Linear(4, 2)), (_info(2, _D),), ((2, 4),), ((2, 5),)),
    ("the input of GroupNorm", _filled(lazy.GroupNorm(2, 4)), (_info(2, _D, 3),), ((2, 4, 3),), ((2, 6, 3),)),
]


@pytest.mark.parametrize("case", _REFUSED, ids=lambda case: case[0])
def test_sizes_within_their_bounds_that_an_operation_cannot_take_are_refused_at_the_call(case: Any) -> None:
    what, function, infos, fits, misfits = case
    executable = lazy.compile(function, args=infos)
    executable(*[np.ones(s, np.float32) for s in fits])
    with pytest.raises(ShapeError, match=f"{what} at {__file__}:.*: expected .*; pass tensors whose sizes agree") as caught:
        executable(*[np.ones(s, np.float32) for s in misfits])
    assert str(caught.value).startswith(__file__)
    beyond = [tuple(n if isinstance(n, int) else n.max + 1 for n in info.shape) for info in infos]
    with pytest.raises(ShapeError, match=r"dimension \d of [xwbs] of the executable .*: expected a size from \d to \d+, got .*; pass one within"):
        executable(*[np.ones(s, np.float32) for s in beyond])


def test_sizes_that_no_call_can_give_are_refused_when_compiled() -> None:
    for kind, of, function in [
        (ShapeError, "convolution", lambda x: convolution(x, lazy.ones((4, 2, 13)))),
        (ShapeError, "maxpool", lambda x: x.maxpool((13,))),
        (ArgumentError, "k of topk", lambda x: x.topk(13, 2)),
        (ArgumentError, "k of topk", lambda x: x.topk(x.shape[2] + 1, 2)),
        (ShapeError, "a reflecting pad", lambda x: lazy.pad(x, ((0, 0), (0, 0), (0, 12)), "reflect")),
        (ArgumentError, "repeats", lambda x: x.repeat(x.shape[2] - 13, 2)),
        (ArgumentError, "the scale of a dimension", lambda x: lazy.resize(x, scales=(1, 1, 2.0**29))),
        (ArgumentError, "the scale of a dimension of 50.x.2 elements, got 0.29", lambda x: lazy.resize(x.repeat(50, 2), scales=(1, 1, 0.29))),
    ]:
        with pytest.raises(kind, match=of) as caught:
            lazy.compile(function, args=[_info(1, 2, _D)])
        assert str(caught.value).startswith(__file__), of


def test_softmax_takes_a_dynamic_dimension_that_is_empty() -> None:
    assert lazy.compile(lambda x: lazy.softmax(x, 0), args=[_info((0, 2, 4), 3)])(np.ones((0, 3), np.float32)).shape == (0, 3)
