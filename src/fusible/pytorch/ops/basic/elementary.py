"""Operations without parameters that do little: extra tensors in and out, a factor, a shape, a cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusible import ops
from fusible.nvte import is_quantized_type
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation, OperationContext
from fusible.quantized import Quantizer, QuantizerRole

__all__ = ["AddExtraInput", "ConstantScale", "Identity", "L2Normalization", "MakeExtraOutput", "Quantize", "Reshape"]


class _InPlace(BasicOperation):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place


class AddExtraInput(_InPlace):
    """``y = x + extra`` with the extra input of x's shape; both have the gradient ``dy``. ``in_place`` is taken for compatibility: it allows the sum
    to take the extra input's memory, and here the extra input stays as it is."""

    num_extra_inputs = 1

    def make_op(self) -> Op:
        return ops.AddExtra("extra")


class MakeExtraOutput(_InPlace):
    """``y = x``, and x is an extra output too; ``dx = dy`` + its gradient. ``in_place`` is taken for compatibility: it allows the sum to take that
    gradient's memory, and here the gradient stays as it is."""

    num_extra_outputs = 1

    def make_op(self) -> Op:
        return ops.MakeExtra("extra")


class ConstantScale(BasicOperation):
    """``y = scale * x``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.make_op()  # refuses what the operation refuses

    def make_op(self) -> Op:
        return ops.ConstantScale(self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class Identity(BasicOperation):
    """``y = x``."""

    def make_op(self) -> Op:
        return ops.Identity()


class Reshape(BasicOperation):
    """``y`` = x in ``shape``, of which one entry may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def make_op(self) -> Op:
        return ops.Reshape(self._shape)

    def from_theirs(self, op: Op, saved: Sequence[Any] | None, context: OperationContext) -> Mapping[str, Any] | None:
        shape = getattr(context, "input_shape", None)
        return super().from_theirs(op, saved, context) if shape is None else {"x": torch.empty((), device="cpu").expand(shape)}

    def told(self, op: Op, kept: Mapping[str, Any], lent: Quantizer | None) -> dict[str, Any]:
        return {**super().told(op, kept, lent), "input_shape": kept["shape"].shape[:-1]}

    def extra_repr(self) -> str:
        return f"shape={self._shape}"


class L2Normalization(BasicOperation):
    """``y = x / sqrt(sum(x^2) + eps)`` over the last dimension. ``seq_length`` and ``micro_batch_size`` are taken for compatibility: they size a
    warm-up that is not needed here."""

    def __init__(self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None) -> None:
        super().__init__()
        self.eps, self.seq_length, self.micro_batch_size = eps, seq_length, micro_batch_size

    def make_op(self) -> Op:
        return ops.L2Normalization(eps=self.eps)

    def from_theirs(self, op: Op, saved: Sequence[Any] | None, context: OperationContext) -> Mapping[str, Any] | None:
        found = super().from_theirs(op, saved, context)
        return found if found is None else {"x": found["x"], "rsigma": found["rsigma"].float().reshape(-1) * found["x"].shape[-1] ** 0.5}

    def as_theirs(self, op: Op, kept: Mapping[str, Any]) -> tuple[Any, ...]:
        x, rsigma = super().as_theirs(op, kept)  # rsigma is of the mean of squares, theirs of their sum
        return x, (rsigma * x.shape[-1] ** -0.5).reshape(*x.shape[:-1], 1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"


class Quantize(BasicOperation):
    """``y`` = x quantized where ``forward``, ``dx`` = dy quantized where ``backward``, as the recipe says; without one, unchanged."""

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantizes = {"forward": forward, "backward": backward}

    def told(self, op: Op, kept: Mapping[str, Any], lent: Quantizer | None) -> dict[str, Any]:
        return {**super().told(op, kept, lent), "quantize_backward": is_quantized_type(op.dy_dtype)}

    def make_op(self) -> Op:
        return ops.Quantize(self._quantizes["forward"], self._quantizes["backward"])

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantizes[mode])

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        return [QuantizerRole("linear", "input" if mode == "forward" else "grad_output")] * self.num_quantizers(mode)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._quantizes.items())
