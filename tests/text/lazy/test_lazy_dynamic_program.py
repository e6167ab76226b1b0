"""The printed form of a program whose sizes a call determines, frozen, and that of one of its specialisations."""

from __future__ import annotations

import pytest

from fusible import lazy
from fusible.errors import CompileError, ShapeError
from fusible.lazy.dims import Symbol
from fusible.lazy.trace.specialize import specialize

_TRACE = """\
==== Trace IR ====
inputs:
    x: [shape=(batch, 4,), dtype=(float32), loc=(gpu:0)]
    n: [shape=(), dtype=(int32), loc=(gpu:0)]
t2 = dimensionvalue(expression=2*batch, dtype=float32)
t3 = binaryelementwise(x, t2, kind=Kind.ADD)
t4 = slice(t3, start=(0, 0), limit=(n, 4), stride=(1, 1))
outputs:
    t4: [shape=(n, 4,), dtype=(float32), loc=(gpu:0)]"""

_FLAT = """\
==== Flat IR ====
inputs:
    x: [shape=(batch, 4,), dtype=(float32), loc=(gpu:0)]
    n: [shape=(), dtype=(int32), loc=(gpu:0)]
t_inter2: [shape=(), dtype=(int32), loc=(gpu:0)] = GetDimensionSizeOp(x, dim=0)
t_inter3: [shape=(), dtype=(int32), loc=(gpu:0)] = ConstantOp(data=2, dtype=int32, device=gpu:0)
t_inter4: [shape=(), dtype=(int32), loc=(gpu:0)] = MulOp(t_inter2, t_inter3)
t2: [shape=(), dtype=(float32), loc=(gpu:0)] = ConvertOp(t_inter4)
t_inter5: [shape=(1,), dtype=(int32), loc=(gpu:0)] = ReshapeOp(t_inter2)
t_inter6: [shape=(), dtype=(int32), loc=(gpu:0)] = ConstantOp(data=4, dtype=int32, device=gpu:0)
t_inter7: [shape=(1,), dtype=(int32), loc=(gpu:0)] = ReshapeOp(t_inter6)
t_inter8: [shape=(2,), dtype=(int32), loc=(gpu:0)] = ConcatenateOp(t_inter5, t_inter7, dim=0)
t_inter1: [shape=(batch, 4,), dtype=(float32), loc=(gpu:0)] = DynamicBroadcastOp(t2, t_inter8, broadcast_dim=[])
t3: [shape=(batch, 4,), dtype=(float32), loc=(gpu:0)] = AddOp(x, t_inter1)
t_inter9: [shape=(), dtype=(int32), loc=(gpu:0)] = ConstantOp(data=0, dtype=int32, device=gpu:0)
t_inter10: [shape=(1,), dtype=(int32), loc=(gpu:0)] = ReshapeOp(t_inter9)
t_inter11: [shape=(2,), dtype=(int32), loc=(gpu:0)] = ConcatenateOp(t_inter10, t_inter10, dim=0)
t_inter12: [shape=(1,), dtype=(int32), loc=(gpu:0)] = ReshapeOp(n)
t_inter13: [shape=(2,), dtype=(int32), loc=(gpu:0)] = ConcatenateOp(t_inter12, t_inter7, dim=0)
t_inter14: [shape=(), dtype=(int32), loc=(gpu:0)] = ConstantOp(data=1, dtype=int32, device=gpu:0)
t_inter15: [shape=(1,), dtype=(int32), loc=(gpu:0)] = ReshapeOp(t_inter14)
t_inter16: [shape=(2,), dtype=(int32), loc=(gpu:0)] = ConcatenateOp(t_inter15, t_inter15, dim=0)
t4: [shape=(n, 4,), dtype=(float32), loc=(gpu:0)] = DynamicSliceOp(t3, t_inter11, t_inter13, t_inter16)
outputs:
    t4: [shape=(n, 4,), dtype=(float32), loc=(gpu:0)]"""

_STABLEHLO = """\
==== StableHLO IR ====
1: module {
2:   func.func @main(%arg0: tensor<?x4xf32>, %arg1: tensor<i32>) -> tensor<?x4xf32> {
3:     %0 = stablehlo.get_dimension_size %arg0, dim = 0 : (tensor<?x4xf32>) -> tensor<i32>
4:     %c = stablehlo.constant dense<2> : tensor<i32>
5:     %1 = stablehlo.multiply %0, %c : tensor<i32>
6:     %2 = stablehlo.convert %1 : (tensor<i32>) -> tensor<f32>
7:     %3 = stablehlo.reshape %0 : (tensor<i32>) -> tensor<1xi32>
8:     %c_0 = stablehlo.constant dense<4> : tensor<i32>
9:     %4 = stablehlo.reshape %c_0 : (tensor<i32>) -> tensor<1xi32>
10:     %5 = stablehlo.concatenate %3, %4, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
11:     %6 = stablehlo.dynamic_broadcast_in_dim %2, %5, dims = [] : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
12:     %7 = stablehlo.add %arg0, %6 : tensor<?x4xf32>
13:     %c_1 = stablehlo.constant dense<0> : tensor<i32>
14:     %8 = stablehlo.reshape %c_1 : (tensor<i32>) -> tensor<1xi32>
15:     %9 = stablehlo.concatenate %8, %8, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
16:     %10 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
17:     %11 = stablehlo.concatenate %10, %4, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
18:     %c_2 = stablehlo.constant dense<1> : tensor<i32>
19:     %12 = stablehlo.reshape %c_2 : (tensor<i32>) -> tensor<1xi32>
20:     %13 = stablehlo.concatenate %12, %12, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
21:     %14 = stablehlo.real_dynamic_slice %7, %9, %11, %13 : (tensor<?x4xf32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<?x4xf32>
22:     return %14 : tensor<?x4xf32>
23:   }
24: }
25:"""

_SPECIALISED = """\
==== Trace IR ====
inputs:
    x: [shape=(6, 4,), dtype=(float32), loc=(gpu:0)]
    n: [shape=(), dtype=(int32), loc=(gpu:0)]
t2 = dimensionvalue(expression=12, dtype=float32)
t3 = binaryelementwise(x, t2, kind=Kind.ADD)
t4 = slice(t3, start=(0, 0), limit=(3, 4), stride=(1, 1))
outputs:
    t4: [shape=(3, 4,), dtype=(float32), loc=(gpu:0)]"""

_BATCH = lazy.NamedDimension("batch", 4, 5, 8)


def _program() -> lazy.Executable:
    infos = [lazy.InputInfo((_BATCH, 4), lazy.float32), lazy.DimensionInputInfo((1, 2, 4))]
    return lazy.compile(lambda x, n: (x + x.shape[0] * 2)[:n], args=infos)


def test_every_ir_prints_its_sizes() -> None:
    executable = _program()
    assert str(executable.trace) == _TRACE
    assert str(executable.flat_ir) == _FLAT
    assert str(executable.stablehlo) == _STABLEHLO


def test_the_trace_of_given_sizes_is_static() -> None:
    trace = specialize(_program().trace, {Symbol("batch", 4, 5, 8): 6, Symbol("n", 1, 2, 4): 3})
    assert str(trace) == _SPECIALISED
    assert "?" not in trace.to_flat_ir().to_stablehlo().text and "Dynamic" not in str(trace.to_flat_ir())


def test_errors_about_sizes_are_one_sentence_that_names_the_line() -> None:
    info = lazy.InputInfo(((1, 2, 8),), lazy.float32)
    add = lazy.compile(lambda x, y: x + y, args=[info, info])
    with pytest.raises(ShapeError) as caught:
        add(lazy.zeros((2,)), lazy.zeros((3,)))
    line = test_errors_about_sizes_are_one_sentence_that_names_the_line.__code__.co_firstlineno + 2
    assert str(caught.value).replace(__file__, "user.py") == (
        f"user.py:{line + 2}, in test_errors_about_sizes_are_one_sentence_that_names_the_line\n"
        "    add(lazy.zeros((2,)), lazy.zeros((3,)))\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"the operands of add at user.py:{line}: expected x.0 == y.0 (of dimension 0 of x, dimension 0 of y), "
        "got 2 and 3; pass tensors whose sizes agree."
    )
    with pytest.raises(CompileError) as compiling:
        lazy.compile(lambda x: x.reshape((int(x.shape[0]), 1)), args=[info])
    assert str(compiling.value).split("\n")[-1] == (
        "int() of the size x.0: expected a size known when the function is compiled, got one that each call determines; "
        "record operations that are right for every size, or compile for a fixed size."
    )
