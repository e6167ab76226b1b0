"""The printed form of operations with several outputs and of windows, frozen."""

from __future__ import annotations

from fusible import lazy
from fusible.lazy.ops.convolution import convolution

_TRACE = """\
==== Trace IR ====
inputs:
    x: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]
t1, t2 = topk(x, k=1, dim=1)
outputs:
    t1: [shape=(2, 1,), dtype=(float32), loc=(gpu:0)]
    t2: [shape=(2, 1,), dtype=(int32), loc=(gpu:0)]"""

_FLAT = """\
==== Flat IR ====
inputs:
    x: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]
t_inter1: [shape=(2, 3,), dtype=(int32), loc=(gpu:0)] = IotaOp(dim=1)
t_inter2: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)], t_inter3: [shape=(2, 3,), dtype=(int32), loc=(gpu:0)] = SortOp(x, t_inter1, dim=1)
t1: [shape=(2, 1,), dtype=(float32), loc=(gpu:0)] = SliceOp(t_inter2, start=[0, 0], limit=[2, 1], stride=[1, 1])
t2: [shape=(2, 1,), dtype=(int32), loc=(gpu:0)] = SliceOp(t_inter3, start=[0, 0], limit=[2, 1], stride=[1, 1])
outputs:
    t1: [shape=(2, 1,), dtype=(float32), loc=(gpu:0)]
    t2: [shape=(2, 1,), dtype=(int32), loc=(gpu:0)]"""


def test_several_outputs_print_on_one_line() -> None:
    executable = lazy.compile(lambda x: x.topk(1, -1), args=[lazy.InputInfo((2, 3), lazy.float32)])
    assert str(executable.trace) == _TRACE
    assert str(executable.flat_ir) == _FLAT
    assert '"stablehlo.sort"(%arg0, %0) <{dimension = 1 : i64, is_stable = true}>' in executable.stablehlo.text


_WINDOWS = """\
==== Trace IR ====
inputs:
    x: [shape=(1, 2, 5,), dtype=(bfloat16), loc=(gpu:0)]
    w: [shape=(4, 1, 3,), dtype=(bfloat16), loc=(gpu:0)]
t2 = convolution(x, w, stride=(2,), padding=((1, 0),), dilation=(1,), groups=2)
t3 = pooling(t2, kind=Kind.MAX, kernel_dims=(2,), stride=(1,), padding=((0, 0),), count_include_pad=True)
t4 = resize(t3, mode=Mode.NEAREST, shape=(1, 4, 3), scales=None, align_corners=False)
t5 = pad(t4, low=(0, 0, 1), high=(0, 0, 0), mode=Mode.REFLECT, value=0.0)
outputs:
    t5: [shape=(1, 4, 4,), dtype=(bfloat16), loc=(gpu:0)]"""

_CONVOLVED = """\
t_inter1: [shape=(1, 2, 5,), dtype=(float32), loc=(gpu:0)] = ConvertOp(x)
t_inter2: [shape=(4, 1, 3,), dtype=(float32), loc=(gpu:0)] = ConvertOp(w)
t_inter3: [shape=(1, 4, 2,), dtype=(float32), loc=(gpu:0)] = \
ConvolutionOp(t_inter1, t_inter2, stride=[2], padding=[(1, 0)], lhs_dilation=[1], rhs_dilation=[1], groups=2)
t2: [shape=(1, 4, 2,), dtype=(bfloat16), loc=(gpu:0)] = ConvertOp(t_inter3)
"""


def test_windows_print_their_geometry() -> None:
    def program(x: lazy.Tensor, w: lazy.Tensor) -> lazy.Tensor:
        pooled = convolution(x, w, stride=(2,), padding=((1, 0),), groups=2).maxpool((2,))
        return pooled.resize((1, 4, 3), "nearest").pad(((0, 0), (0, 0), (1, 0)), "reflect")

    executable = lazy.compile(program, args=[lazy.InputInfo((1, 2, 5), lazy.bfloat16), lazy.InputInfo((4, 1, 3), lazy.bfloat16)])
    assert str(executable.trace) == _WINDOWS
    assert _CONVOLVED in str(executable.flat_ir)
