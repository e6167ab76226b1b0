"""Values on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fusible.errors import DTypeError, expected
from fusible.lazy.device import device
from fusible.lazy.dtypes import ALL
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import Tensor, TensorLike, constrained, record, stored
from fusible.lazy.locate import pointing
from fusible.lazy.trace import Storage, TraceOp

__all__ = ["Copy", "copy"]


class Copy(TraceOp):
    """The same values on ``device``. Within one program, which runs on one engine, it is the identity."""

    places: ClassVar[bool] = True

    device: device

    def place(self, common: device) -> device:
        return self.device

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.ReshapeOp(list(inputs), list(outputs))


@constrained("copy", input="T1", returns="T1", T1=ALL)
def copy(input: TensorLike, device: device) -> Tensor:
    """``input`` on ``device``. What is stored moves at once (and shares its memory where both devices are backed by the host).

    Raises ``DTypeError`` unless ``device`` is a ``fusible.lazy.device``.
    """
    if not isinstance(device, _DEVICE):
        error = DTypeError(expected("a device", of="device of copy", got=repr(device), do='pass for instance device("gpu")'))
        raise pointing(error, "device")
    if input.device is device:
        return input
    source = input.trace_tensor
    if isinstance(source.producer, Storage):
        return Tensor.from_trace_tensor(stored(source.producer.data, device, source.name))
    return record(Copy(device), input)


_DEVICE = device
