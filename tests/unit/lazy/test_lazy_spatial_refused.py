"""What windows, resize, pad, topk and cuts refuse when recorded, with carets under the argument at fault."""

from __future__ import annotations

import pytest

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.frontend.interface import FUNCTIONS
from fusible.lazy.ops.convolution import convolution, convolution_transpose

_X, _W = lazy.zeros((2, 4, 5)), lazy.zeros((6, 4, 3))
_I, _F8 = lazy.zeros((2, 4, 5), lazy.int32), lazy.zeros((2, 4, 5), lazy.float8)

_REFUSED = [
    (ShapeError, "_W", lambda: convolution(_X, _W, groups=2)),
    (ShapeError, "lazy.zeros((5, 2, 3))", lambda: convolution(_X, lazy.zeros((5, 2, 3)), groups=2)),
    (ShapeError, "_X", lambda: convolution(_X, lazy.zeros((6, 4, 6)))),
    (ShapeError, "_X", lambda: convolution(_X, _W, dilation=(3,))),
    (ShapeError, "_X", lambda: convolution(_X, lazy.zeros((6, 4)))),
    (ShapeError, "lazy.zeros((4, 2))", lambda: convolution(lazy.zeros((4, 2)), lazy.zeros((6, 4)))),
    (ShapeError, "lazy.zeros(4)", lambda: convolution(_X, _W, lazy.zeros(4))),
    (ArgumentError, "(0,)", lambda: convolution(_X, _W, stride=(0,))),
    (ArgumentError, "(1, 1)", lambda: convolution(_X, _W, stride=(1, 1))),
    (ArgumentError, "2", lambda: convolution(_X, _W, stride=2)),
    (ArgumentError, "(1,)", lambda: convolution(_X, _W, padding=(1,))),
    (ArgumentError, "((1, -1),)", lambda: convolution(_X, _W, padding=((1, -1),))),
    (ArgumentError, "(1.5,)", lambda: convolution(_X, _W, dilation=(1.5,))),
    (ArgumentError, "0", lambda: convolution(_X, _W, groups=0)),
    (DTypeError, "_I", lambda: convolution(_I, _I)),
    (DTypeError, "_I", lambda: convolution(_X, _I)),
    (ShapeError, "_W", lambda: convolution_transpose(_X, _W)),
    (ShapeError, "lazy.zeros((4, 2, 3))", lambda: convolution_transpose(_X, lazy.zeros((4, 2, 3)), groups=3)),
    (ShapeError, "_X", lambda: convolution_transpose(_X, lazy.zeros((4, 2, 1)), padding=((3, 3),))),
    (ShapeError, "lazy.zeros(3)", lambda: convolution_transpose(_X, lazy.zeros((4, 2, 3)), lazy.zeros(3))),
    (ShapeError, "lazy.maxpool(_X, (6,))", lambda: lazy.maxpool(_X, (6,))),
    (ShapeError, "lazy.zeros(3)", lambda: lazy.maxpool(lazy.zeros(3), (1,))),
    (ArgumentError, "(2, 2)", lambda: lazy.maxpool(_X, (2, 2))),
    (ArgumentError, "((1, 1), (1, 1))", lambda: lazy.avgpool(_X, (2,), padding=((1, 1), (1, 1)))),
    (DTypeError, "_I", lambda: lazy.avgpool(_I, (2,))),
    (DTypeError, "_F8", lambda: lazy.maxpool(_F8, (2,))),
    (ShapeError, "(2, 4)", lambda: lazy.resize(_X, (2, 4))),
    (ShapeError, "lazy.resize(lazy.zeros((0, 2)), (1, 2))", lambda: lazy.resize(lazy.zeros((0, 2)), (1, 2))),
    (ArgumentError, "lazy.resize(_X)", lambda: lazy.resize(_X)),
    (ArgumentError, "lazy.resize(_X, (2, 4, 5), scales=(1, 1, 1))", lambda: lazy.resize(_X, (2, 4, 5), scales=(1, 1, 1))),
    (ArgumentError, '"area"', lambda: lazy.resize(_X, (2, 4, 5), "area")),
    (ArgumentError, "True", lambda: lazy.resize(_X, (2, 4, 5), "nearest", True)),
    (ArgumentError, "(1, 1, -2.0)", lambda: lazy.resize(_X, scales=(1, 1, -2.0))),
    (ArgumentError, "(1, 1)", lambda: lazy.resize(_X, scales=(1, 1))),
    (DTypeError, "_I", lambda: lazy.resize(_I, (2, 4, 5))),
    (ArgumentError, "((1, 1),)", lambda: lazy.pad(_X, ((1, 1),))),
    (ArgumentError, '"edge"', lambda: lazy.pad(_X, ((0, 0), (0, 0), (1, 1)), "edge")),
    (ShapeError, "((2, 0), (0, 0))", lambda: lazy.pad(lazy.zeros((0, 2)), ((2, 0), (0, 0)), "reflect")),
    (ShapeError, "((1, 0),)", lambda: lazy.pad(lazy.zeros(0), ((1, 0),), "reflect")),
    (ArgumentError, "6", lambda: lazy.topk(_X, 6, 2)),
    (ArgumentError, "-1", lambda: lazy.topk(_X, -1, 2)),
    (ArgumentError, "1.5", lambda: lazy.topk(_X, 1.5, 2)),
    (ArgumentError, "_X.topk(1, 3)", lambda: _X.topk(1, 3)),
    (DTypeError, "_F8", lambda: lazy.topk(_F8, 1, 0)),
    (ArgumentError, "lazy.stack([])", lambda: lazy.stack([])),
    (ShapeError, "lazy.stack([_X, _W])", lambda: lazy.stack([_X, _W])),
    (ShapeError, "lazy.stack([_X, lazy.zeros((2, 4))])", lambda: lazy.stack([_X, lazy.zeros((2, 4))])),
    (ArgumentError, "lazy.flip(_X, (0, -3))", lambda: lazy.flip(_X, (0, -3))),
    (ShapeError, "lazy.split(_X, [-1, 3])", lambda: lazy.split(_X, [-1, 3])),
]


@pytest.mark.parametrize("case", range(len(_REFUSED)))
def test_a_wrong_argument_is_refused_and_marked(case: int) -> None:
    kind, marked, record = _REFUSED[case]
    before = CACHE.compiled
    with pytest.raises(kind) as caught:
        record()
    assert type(caught.value) is kind and CACHE.compiled == before
    place, code, carets, sentence = str(caught.value).split("\n")
    assert place.startswith(__file__) and ": expected " in sentence and sentence.endswith(".")
    assert code[carets.index("^") : carets.rindex("^") + 1] == marked


def test_functions_are_methods_and_tell_their_dtypes() -> None:
    for name in ("maxpool", "avgpool", "resize", "pad", "topk", "flip", "split"):
        assert getattr(lazy.Tensor, name) is getattr(lazy, name) is FUNCTIONS[name].call
        assert "Dtypes:\n    T1 (input, " in (FUNCTIONS[name].call.__doc__ or "")
    assert "T1 (input, weight, bias, the result)" in (convolution.__doc__ or "")
