"""Recording an operation: its output is inferred, and nothing is computed."""

from __future__ import annotations

from fusible.errors import ArgumentError, expected
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dims import plain
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.source import user_line
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["record", "record_all"]

_new = object.__new__


def record(op: TraceOp, *tensors: Tensor) -> Tensor:
    """Record ``op`` on ``tensors`` and return its output.

    Raises ``ShapeError`` or ``DTypeError`` where the operands are illegal, and ``ArgumentError`` where they live on two devices.
    """
    inputs = tuple([t.trace_tensor for t in tensors])
    shape, of = op.infer(*inputs)
    for n in shape:
        if type(n) is not int:
            shape = plain(shape)
            break
    place = inputs[0].device if inputs else DEFAULT
    for t in inputs:
        if t.device is not place:
            place = _one_device(op, inputs)
    output = TraceTensor(shape, of, op.place(place), op, user_line())
    op.bind(inputs, (output,))
    tensor = _new(Tensor)
    tensor.trace_tensor = output
    return tensor


def record_all(op: TraceOp, *tensors: Tensor) -> list[Tensor]:
    """``record`` of an operation with any number of outputs. They are evaluated together."""
    inputs = tuple([t.trace_tensor for t in tensors])
    types = op.infer_all(*inputs)
    place = inputs[0].device if inputs else DEFAULT
    if any(t.device is not place for t in inputs):
        place = _one_device(op, inputs)
    source = user_line()
    outputs = tuple([TraceTensor(shape, of, op.place(place), op, source) for shape, of in types])
    op.bind(inputs, outputs)
    return [Tensor.from_trace_tensor(output) for output in outputs]


def _one_device(op: TraceOp, inputs: tuple[TraceTensor, ...]) -> device:
    """The device of the operands that are placed. Values computed from literals alone (``ones``, ``iota``) are made on the device of the others."""
    placed = [t for t in inputs if _is_placed(t)]
    if any(t.device is not placed[0].device for t in placed):
        got = " and ".join(f"{t} on {t.device}" for t in placed)
        of = f"the operands of {type(op).__name__.lower()}"
        raise ArgumentError(expected("one device", of=of, got=got, do="copy one of them to the other's device"))
    return placed[0].device if placed else DEFAULT


def _is_placed(tensor: TraceTensor) -> bool:
    """Whether the value depends on stored data, an argument or an explicit copy."""
    seen: set[int] = set()
    stack = [tensor]
    while stack:
        producer = stack.pop().producer
        if producer.is_input or producer.places:
            return True
        if id(producer) not in seen:
            seen.add(id(producer))
            stack.extend(producer.inputs)
    return False
