"""Convolutions over any number of spatial dimensions, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.assumptions import holds
from fusible.lazy.dims import SizeLike
from fusible.lazy.dtypes import FLOATS, dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Padding, Tensor, TensorLike, constrained, padding_of, record, steps
from fusible.lazy.locate import pointing
from fusible.lazy.ops.lowering.convert import bind
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Convolution", "ConvolutionTranspose", "convolution", "convolution_transpose"]


class Convolution(TraceOp):
    """``[N, C, *spatial]`` with a kernel ``[O, C / groups, *kernel]``, and a bias ``[O]`` where there is a third operand."""

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        x, weight = inputs[:2]
        if not _pairs(x.shape[1], weight.shape[1] * self.groups, "convolution") or not _divides(self.groups, weight.shape[0], "convolution"):
            wanted = f"[O, {x.shape[1]} / groups, *kernel], with O a multiple of groups={self.groups}"
            raise _misfit(wanted, "the weight of convolution", f"{weight} for {x}", "weight")
        _check_bias(inputs, weight.shape[0])
        spatial = []
        geometry = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        for n, k, stride, (before, after), dilation in geometry:
            room = n + before + after - _reach(k, dilation)
            if not holds(room, ">=", 0, "the padded input of convolution"):
                raise _misfit("a padded input at least as large as the dilated kernel", "convolution", f"{x} and {weight}", "input")
            spatial.append(room // stride + 1)
        return (x.shape[0], weight.shape[0], *spatial), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        x, weight, *bias = _widened(inputs)
        window = {"stride": list(self.stride), "padding": list(self.padding), "lhs_dilation": [1] * len(self.stride)}
        _convolve(x, weight, bias, outputs[0], **window, rhs_dilation=list(self.dilation), groups=self.groups)


class ConvolutionTranspose(TraceOp):
    """The transpose of a convolution: ``[N, C, *spatial]`` with a kernel ``[C, O / groups, *kernel]``, and a bias ``[O]``."""

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        x, weight = inputs[:2]
        what = "convolution_transpose"
        if not _pairs(x.shape[1], weight.shape[0], what) or not _divides(self.groups, weight.shape[0], what):
            wanted = f"[{x.shape[1]}, O / groups, *kernel], with {x.shape[1]} a multiple of groups={self.groups}"
            raise _misfit(wanted, "the weight of convolution_transpose", f"{weight} for {x}", "weight")
        _check_bias(inputs, weight.shape[1] * self.groups)
        spatial = []
        geometry = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        for n, k, stride, (before, after), dilation in geometry:
            size = (n - 1) * stride + _reach(k, dilation) - before - after
            if not holds(n, ">=", 1, f"the input of {what}") or not holds(size, ">=", 0, f"the result of {what}"):
                raise _misfit("a result that is not smaller than its padding", "convolution_transpose", f"{x} and {weight}", "input")
            spatial.append(size)
        return (x.shape[0], weight.shape[1] * self.groups, *spatial), x.dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        """A convolution of the input, with ``stride - 1`` zeros between its elements, by the kernel turned around."""
        x, weight, *bias = _widened(inputs)
        kernel = _turned(weight, self.groups)
        reach = [_reach(k, dilation) - 1 for k, dilation in zip(weight.shape[2:], self.dilation, strict=True)]
        padding = [(r - before, r - after) for r, (before, after) in zip(reach, self.padding, strict=True)]
        window = {"stride": [1] * len(self.stride), "padding": padding, "lhs_dilation": list(self.stride)}
        _convolve(x, kernel, bias, outputs[0], **window, rhs_dilation=list(self.dilation), groups=self.groups)


def _pairs(channels: SizeLike, wanted: SizeLike, what: str) -> bool:
    return holds(channels, "==", wanted, f"the channels of {what}")


def _divides(groups: int, channels: SizeLike, what: str) -> bool:
    return holds(channels % groups, "==", 0, f"the groups of {what}")


def _reach(kernel: SizeLike, dilation: int) -> SizeLike:
    """The elements that a dilated kernel spans."""
    return dilation * (kernel - 1) + 1


def _misfit(wanted: str, of: str, got: str, argument: str) -> ShapeError:
    return pointing(ShapeError(expected(wanted, of=of, got=got, do="change one of them")), argument)


def _check_bias(inputs: Sequence[TraceTensor], channels: SizeLike) -> None:
    if len(inputs) > 2 and not (len(inputs[2].shape) == 1 and holds(inputs[2].shape[0], "==", channels, "the bias of a convolution")):
        raise _misfit(f"shape [{channels}]", "the bias of a convolution", str(inputs[2]), "bias")


def _widened(inputs: Sequence[FlatIRTensor]) -> list[FlatIRTensor]:
    """16-bit operands in float32, which hold their products exactly and accumulate them."""
    if inputs[0].dtype.itemsize != 2:
        return list(inputs)
    return [emit(flat.ConvertOp, [t], t.shape, dtypes.float32, "accumulate in float32") for t in inputs]


def _turned(weight: FlatIRTensor, groups: int) -> FlatIRTensor:
    """``[C, O / groups, *kernel]`` as ``[O, C / groups, *kernel]`` with the kernel reversed."""
    reason = "transpose the kernel of a convolution"
    inward, outward, *kernel = weight.shape
    spatial = range(2, len(weight.shape))
    flipped = emit(flat.FlipOp, [weight], weight.shape, weight.dtype, reason, dims=list(spatial))
    per_group = emit(flat.ReshapeOp, [flipped], (groups, inward // groups, outward, *kernel), weight.dtype, reason)
    perm = [0, 2, 1, *(d + 1 for d in spatial)]
    swapped = emit(flat.TransposeOp, [per_group], (groups, outward, inward // groups, *kernel), weight.dtype, reason, perm=perm)
    return emit(flat.ReshapeOp, [swapped], (groups * outward, inward // groups, *kernel), weight.dtype, reason)


def _convolve(x: FlatIRTensor, weight: FlatIRTensor, bias: Sequence[FlatIRTensor], out: FlatIRTensor, **attributes: Any) -> None:
    """Bind ``out``: the convolution in the operands' dtype, the bias added, rounded once."""
    reason = "add the bias of a convolution" if bias else "round a convolution once"
    result = emit(flat.ConvolutionOp, [x, weight], out.shape, x.dtype, reason, **attributes)
    if bias:
        spread = emit(flat.BroadcastOp, [bias[0]], out.shape, x.dtype, reason, broadcast_dim=[1])
        result = emit(flat.AddOp, [result, spread], out.shape, x.dtype, reason)
    bind(result, out)


def _record(
    kind: type[Convolution | ConvolutionTranspose],
    what: str,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    window: tuple[Sequence[int] | None, Sequence[Sequence[int]] | None, Sequence[int] | None],
    groups: int | None,
) -> Tensor:
    x, weight, bias = tensors
    rank = x.ndim - 2
    if rank < 1 or weight.ndim != x.ndim:
        raise _misfit("shapes [N, C, *spatial] of equal rank", f"input and weight of {what}", f"{x.trace_tensor} and {weight.trace_tensor}", "input")
    groups = 1 if groups is None else groups
    if groups < 1:
        error = ArgumentError(expected("an int of at least 1", of=f"groups of {what}", got=groups, do="pass 1 for a plain convolution"))
        raise pointing(error, "groups")
    stride, padding, dilation = window
    op = kind(steps(stride, rank, "stride", what), padding_of(padding, rank, "padding", what), steps(dilation, rank, "dilation", what), groups)
    return record(op, x, weight) if bias is None else record(op, x, weight, bias)


@constrained(input="T1", weight="T1", bias="T1?", returns="T1", T1=FLOATS)
def convolution(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[Sequence[int]] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int | None = None,
) -> Tensor:
    """The cross-correlation ``out[n, o, i] = bias[o] + sum over c, k of input[n, c, stride i + dilation k - before] weight[o, c, k]``.

    ``input`` ``[N, C, *spatial]``, ``weight`` ``[O, C / groups, *kernel]`` and ``bias`` ``[O]`` give ``[N, O, *out]`` with
    ``out = (spatial + before + after - dilation (kernel - 1) - 1) // stride + 1``, over any number of spatial dimensions. ``stride`` and
    ``dilation`` (1 by default) are one int, ``padding`` (zeros, none by default) is one pair ``(before, after)`` for each. Output channels of
    group ``g`` see the input channels of group ``g`` only. 16-bit floats accumulate in float32, bias included, and round once.

    Raises ``ShapeError`` where channels do not pair or the kernel is larger than the padded input, ``ArgumentError`` for an illegal window.
    """
    return _record(Convolution, "convolution", (input, weight, bias), (stride, padding, dilation), groups)


@constrained(input="T1", weight="T1", bias="T1?", returns="T1", T1=FLOATS)
def convolution_transpose(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[Sequence[int]] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int | None = None,
) -> Tensor:
    """The gradient of ``convolution`` with respect to its input, as an operation of its own: every input element adds a scaled kernel.

    ``input`` ``[N, C, *spatial]``, ``weight`` ``[C, O / groups, *kernel]`` and ``bias`` ``[O]`` give ``[N, O, *out]`` with
    ``out = stride (spatial - 1) + dilation (kernel - 1) + 1 - before - after``: ``padding`` is cut off the result. Other arguments, dtypes and
    errors are those of ``convolution``.
    """
    return _record(ConvolutionTranspose, "convolution_transpose", (input, weight, bias), (stride, padding, dilation), groups)
