"""The operands of products, laid out as XLA's fast kernels want them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

from fusible.lazy.dims import is_static
from fusible.lazy.flat_ir.flat_ir import Change, FlatIR
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.ops import DotOp, ReshapeOp, TransposeOp
from fusible.lazy.flat_ir.passes.rewrite import Rewrite, rebuild
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["MIN_PRODUCTS", "dot_layout"]

MIN_PRODUCTS = 2**16
"""A product of fewer multiplications is not worth the rearrangement of an operand."""

_REASON = "lay out an operand of a product with the contracted dimensions last"


class _Operand(NamedTuple):
    """An operand of a product with its batch, free and contracted dimensions, each in the order of the product."""

    tensor: FlatIRTensor
    batch: list[int]
    free: list[int]
    contracted: list[int]

    @classmethod
    def of(cls, tensor: FlatIRTensor, batch: Sequence[int], contracted: Sequence[int]) -> Self:
        free = [d for d in range(len(tensor.shape)) if d not in batch and d not in contracted]
        return cls(tensor, list(batch), free, list(contracted))

    @property
    def order(self) -> list[int]:
        return [*self.batch, *self.free, *self.contracted]

    @property
    def is_ordered(self) -> bool:
        return self.order == list(range(len(self.order)))

    def untransposed(self) -> _Operand:
        """The operand before its transposes; itself where it has none."""
        op = self.tensor.producer
        if not isinstance(op, TransposeOp):
            return self
        return _Operand(op.inputs[0], *([op.perm[d] for d in dims] for dims in self[1:])).untransposed()

    @property
    def usable(self) -> bool:
        """Whether the product keeps the order of the free dimensions."""
        return self.free == sorted(self.free)


def dot_layout(flat: FlatIR) -> FlatIR:
    """Multiply tensors instead of their transposes, and lay the left operand out with its batch dimensions first, the contracted ones last.

    XLA's matrix kernels for the CPU take a left operand whose rows are contiguous, and none that was transposed; every other product is computed
    in fp32, by slower loops. A transpose alone does not help: XLA only relabels dimensions, and folds the transpose into the product. With a
    dimension of size 1 between, and a reshape that drops it, XLA copies the operand to new memory. A product of bf16 ``[1024, 2048]^T`` and
    ``[1024, 512]`` took 6.3 instead of 15.8 ms of processor time, a training step of a GPT in bf16 140 instead of 209. The sums have the same terms,
    in an order that the kernel chooses.
    """
    rewrite = Rewrite(flat)
    for op in flat.ops:
        if not isinstance(op, DotOp) or (operands := _operands(op)) is None:
            rewrite.keep(op, rewrite.operands(op))
            continue
        left, right = (operand._replace(tensor=rewrite.now(operand.tensor)) for operand in operands)
        if _moves(op, left):
            left = _laid_out(rewrite, op, left)
        made = rebuild(op, [left.tensor, right.tensor])
        assert isinstance(made, DotOp)
        made.batch, made.contracting = (left.batch, right.batch), (left.contracted, right.contracted)
        rewrite.ops.append(made)
        rewrite.replace(op.outputs, made.outputs, Change("multiplies", tuple([t.name for t in op.outputs]), (left.tensor.name, right.tensor.name)))
    return rewrite.done()


def _operands(op: DotOp) -> list[_Operand] | None:
    """The operands that ``op`` should multiply; ``None`` where it multiplies these already."""
    operands = [_Operand.of(*parts) for parts in zip(op.inputs, op.batch, op.contracting, strict=True)]
    sources = [operand.untransposed() for operand in operands]
    left = next(x for x in (sources[0], operands[0]) if x.usable or _moves(op, x))
    right = sources[1] if sources[1].usable else operands[1]
    return None if [left, right] == operands and not _moves(op, left) else [left, right]


def _moves(op: DotOp, left: _Operand) -> bool:
    """Whether the left operand has to be copied to another layout."""
    sizes = left.tensor.shape
    if left.is_ordered or not left.free or not is_static(sizes) or not is_static(op.outputs[0].shape):
        return False
    return math.prod(op.outputs[0].shape) * math.prod(sizes[d] for d in left.contracted) >= MIN_PRODUCTS


def _laid_out(rewrite: Rewrite, op: FlatIROp, left: _Operand) -> _Operand:
    x, order = left.tensor, left.order
    shape = tuple(x.shape[d] for d in order)
    wider = emit(ReshapeOp, [x], (*x.shape, 1), x.dtype, _REASON)
    turned = emit(TransposeOp, [wider], (*shape[:-1], 1, shape[-1]), x.dtype, _REASON, perm=[*order[:-1], len(order), order[-1]])
    result = emit(ReshapeOp, [turned], shape, x.dtype, _REASON)
    for i, tensor in enumerate((wider, turned, result)):
        made = tensor.producer
        assert made is not None
        tensor.name, tensor.device, tensor.source = f"{op.outputs[0].name}_left{i}", x.device, op.outputs[0].source
        made.label, made.origin = op.label, op.origin
        rewrite.ops.append(made)
    return _Operand.of(result, range(len(left.batch)), range(len(order) - len(left.contracted), len(order)))
