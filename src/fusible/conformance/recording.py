"""Moves the arguments of a call to tensors that record. The recorded program is compiled and run when the result leaves."""

from __future__ import annotations

from typing import Any

import torch

from fusible import lazy
from fusible.conformance.crossing import FIELDS, HOLDERS, Crossing
from fusible.quantized import Float8TensorStorage, QuantizedTensor
from fusible.tex.backends.xla.dtypes import FROM_TORCH

__all__ = ["RecordingCrossing"]


class RecordingCrossing(Crossing):
    """Turns torch tensors into lazy ones, and lazy results into torch tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._former: dict[int, Any] = {}
        self._left: dict[int, torch.Tensor] = {}

    def stays(self, x: Any) -> bool:
        return isinstance(x, torch.device | torch.Generator)

    def tensor(self, x: torch.Tensor) -> Any:
        if x.dtype not in FROM_TORCH:
            return x
        tensor = lazy.Tensor(x.detach().clone(memory_format=torch.contiguous_format))
        self._former[id(tensor)] = tensor.trace_tensor
        return tensor

    def leave(self, result: Any) -> Any:
        tensors: dict[int, lazy.Tensor] = {}
        self._collect(result, tensors)
        for original, twin in list(self._entered.values()):
            if isinstance(twin, lazy.Tensor):
                if self.changed(twin):
                    tensors[id(twin)] = twin
            elif not isinstance(original, torch.Tensor) or isinstance(original, QuantizedTensor):
                self._collect([twin, getattr(twin, "amax", None)], tensors)
        if tensors:
            outputs = lazy.compile(lambda: list(tensors.values()))()
            self._left = {key: torch.from_dlpack(output) for key, output in zip(tensors, outputs, strict=True)}
        return super().leave(result)

    def _collect(self, x: Any, into: dict[int, lazy.Tensor]) -> None:
        if isinstance(x, list | tuple):
            for value in x:
                self._collect(value, into)
        elif isinstance(x, Float8TensorStorage):
            self._collect([getattr(x, name) for name in FIELDS], into)
        elif isinstance(x, HOLDERS):
            self._collect([*vars(x).values()], into)
        elif isinstance(x, lazy.Tensor):
            into[id(x)] = x

    def changed(self, twin: Any) -> bool:
        return id(twin) not in self._former or twin.trace_tensor is not self._former[id(twin)]

    def left(self, x: Any) -> torch.Tensor:
        return self._left[id(x)]

    def crossed(self, x: Any) -> bool:
        return isinstance(x, lazy.Tensor)
