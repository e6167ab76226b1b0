"""Moves the arguments of one call to the side of a backend, and its result back: to another device, or to tensors that record.

Objects keep their identity. An argument that a call returns comes back as the same object, and what the call wrote is copied back into the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from fusible.quantized import BlockScaledStorage, Float8Tensor, Float8TensorStorage, GroupedTensorStorage, QuantizedTensor, Quantizer

__all__ = ["Crossing", "FIELDS", "HOLDERS"]

FIELDS = ("_data", "_transpose", "_scale_inv")
"""The tensors of a per-tensor FP8 tensor."""

HOLDERS = BlockScaledStorage, GroupedTensorStorage
"""Classes that hold tensors as attributes, which a call may replace."""


class Crossing:
    """Moves torch tensors to ``device``, and back to the CPU."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._entered: dict[int, tuple[Any, Any]] = {}

    def enter(self, x: Any) -> Any:
        """``x``, a tree of lists, dicts, tensors and quantizers, on the other side; the same object enters once."""
        if self.stays(x):
            return x
        if isinstance(x, dict):
            return {name: self.enter(value) for name, value in x.items()}
        if isinstance(x, list | tuple):
            return type(x)(self.enter(value) for value in x)
        if not isinstance(x, (torch.Tensor, Float8TensorStorage, Quantizer, torch.device, torch.Generator, *HOLDERS)):
            return x
        if id(x) not in self._entered:
            self._entered[id(x)] = (x, self.converted(x))
        return self._entered[id(x)][1]

    def stays(self, x: Any) -> bool:
        """Whether ``x`` is on the right side already."""
        return self._device.type == "cpu"

    def converted(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return self._device
        if isinstance(x, torch.Generator):
            return torch.Generator(self._device).manual_seed(x.initial_seed())
        if isinstance(x, Quantizer):
            twin = copy(x)
            for name in ("scale", "amax"):
                if isinstance(getattr(x, name, None), torch.Tensor):
                    setattr(twin, name, self.enter(getattr(x, name)))
            return twin
        if isinstance(x, Float8TensorStorage):
            return self._storage(x)
        if isinstance(x, QuantizedTensor):
            x = x.storage_without_autograd()  # whose device is that of its tensors
        if isinstance(x, HOLDERS):
            return _with_attributes(copy(x), x, self.enter)
        return self.tensor(x)

    def _storage(self, x: Any) -> Float8TensorStorage:
        data, transpose, scale_inv = (self.enter(getattr(x, name)) for name in FIELDS)
        twin = Float8TensorStorage(
            data=data, fp8_scale_inv=scale_inv, fp8_dtype=x._fp8_dtype, fake_dtype=x._dtype, data_transpose=transpose,
            quantizer=self.enter(x._quantizer),
        )  # fmt: skip
        twin._transpose_invalid = x._transpose_invalid
        return twin

    def tensor(self, x: torch.Tensor) -> Any:
        """One tensor on the other side. A view of a part of its storage stays such a view."""
        if x.is_contiguous():
            return x.to(self._device)
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return whole.to(self._device).as_strided(x.shape, x.stride(), x.storage_offset())

    def leave(self, result: Any) -> Any:
        """``result`` on this side. What the call wrote is copied back first."""
        for original, twin in list(self._entered.values()):
            self._write_back(original, twin)
        return self._result(result)

    def changed(self, twin: Any) -> bool:
        """Whether the call may have written to this tensor, which entered."""
        return True

    def left(self, x: Any) -> torch.Tensor:
        """A tensor of the other side on this one. ``placed_at``: its address there."""
        here = x.cpu()
        here.placed_at = x.data_ptr()  # type: ignore[attr-defined]
        return here

    def crossed(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of the other side."""
        return isinstance(x, torch.Tensor) and not isinstance(x, QuantizedTensor)

    def _write_back(self, original: Any, twin: Any) -> None:
        if self.crossed(twin):
            if self.changed(twin):
                original.copy_(self.left(twin).view(original.shape))
        elif isinstance(twin, Float8TensorStorage):
            for name in FIELDS:
                setattr(original, name, self._result(getattr(twin, name)))
            original._transpose_invalid = twin._transpose_invalid
        elif isinstance(twin, HOLDERS):
            _with_attributes(original, twin, self._result)
        elif self.crossed(getattr(twin, "amax", None)) and self.changed(twin.amax):
            if original.amax is None:
                original.amax = self.left(twin.amax)
            else:
                original.amax.copy_(self.left(twin.amax))

    def _result(self, x: Any) -> Any:
        for original, twin in self._entered.values():
            if twin is x and x is not None:
                return original
        if isinstance(x, list | tuple):
            return type(x)(self._result(value) for value in x)
        if self.crossed(x):
            return self.left(x)
        if isinstance(x, HOLDERS):
            bare = x.storage_without_autograd() if isinstance(x, QuantizedTensor) else x
            return _with_attributes(copy(bare), bare, self._result)
        if not isinstance(x, Float8TensorStorage):
            return x
        fields = {
            "data": self._result(x._data), "data_transpose": self._result(x._transpose), "fp8_scale_inv": self._result(x._scale_inv),
            "fp8_dtype": x._fp8_dtype, "quantizer": self._result(x._quantizer),
        }  # fmt: skip
        bare = x._quantizer.internal
        return Float8TensorStorage(fake_dtype=x._dtype, **fields) if bare else Float8Tensor(tuple(x.shape), x._dtype, **fields)


def _with_attributes(into: Any, x: Any, move: Callable[[Any], Any]) -> Any:
    """``into`` with the attributes of ``x``, moved."""
    for name, value in vars(x).items():
        setattr(into, name, move(value))
    return into
