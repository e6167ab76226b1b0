"""Dropout with a bit mask. The mask is drawn from torch's generator when the call is recorded: the very one that the torch backend would draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusible import lazy
from fusible.errors import NotServedError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.kernels import LazyKernels
from fusible.tex.formulas.dropout import DropoutFormulas

__all__ = ["DropoutKernels"]


class DropoutKernels(LazyKernels, DropoutFormulas):
    def _draw_bits(self, x: Tensor, least: int) -> tuple[Tensor, Tensor]:
        if lazy.Trace([x]).tracers:
            got = "an argument of a function being compiled, whose every run would drop the same elements"
            do = "use tex.prim.dropout, which takes its seed as a tensor"
            raise NotServedError(expected("a tensor with a value", of="dropout_fwd on lazy tensors", got=got, do=do))
        random = torch.empty(x.size, dtype=torch.uint8, device="cpu").random_(0, 256).numpy()
        mask = Tensor(np.packbits(random >= least, bitorder="little"))
        return self._kept_by(mask, x.shape), mask

    def _kept_by(self, mask: Tensor, shape: Any) -> Tensor:
        bits = lazy.shift_right_logical(lazy.reshape(mask, (-1, 1)), lazy.iota((1, 8), 1, lazy.uint8)) & 1
        return lazy.reshape(bits == 1, shape)
