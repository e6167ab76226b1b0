"""Counter-based random words: Squares32 (Widynski 2020, arXiv:2004.06278) under a SplitMix64 key (Steele et al. 2014).

Element ``i`` of a tensor reads words ``i * n``, ..., ``i * n + n - 1`` of its stream, whatever computes it and in whatever order. All arithmetic
is on uint64, where it wraps around as the algorithms want it.
"""

from __future__ import annotations

import math

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.op import FlatIROp, emit
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.ops.lowering.convert import convert, splat
from fusible.lazy.printing import Shape

__all__ = ["digits", "key_of", "words", "words_per_element"]

_REASON = "draw random bits"


def _u64(op: type[FlatIROp], *operands: FlatIRTensor) -> FlatIRTensor:
    return emit(op, operands, operands[0].shape, dtypes.uint64, _REASON)


def _with(op: type[FlatIROp], x: FlatIRTensor, literal: int) -> FlatIRTensor:
    return _u64(op, x, splat(literal, x, _REASON))


def key_of(seed: FlatIRTensor) -> FlatIRTensor:
    """SplitMix64 of each seed (uint64), made odd."""
    z = _with(flat.AddOp, seed, 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = _with(flat.MulOp, _u64(flat.XorOp, z, _with(flat.ShiftRightLogicalOp, z, shift)), factor)
    return _with(flat.OrOp, _u64(flat.XorOp, z, _with(flat.ShiftRightLogicalOp, z, 31)), 1)


def words(key: FlatIRTensor, counter: FlatIRTensor) -> FlatIRTensor:
    """The word of each counter: uint64 values below 2**32."""
    y = _u64(flat.MulOp, counter, key)
    z = _u64(flat.AddOp, y, key)
    x = y
    for addend in (y, z, y):
        x = _u64(flat.AddOp, _u64(flat.MulOp, x, x), addend)
        x = _u64(flat.OrOp, _with(flat.ShiftRightLogicalOp, x, 32), _with(flat.ShiftLeftOp, x, 32))
    return _with(flat.ShiftRightLogicalOp, _u64(flat.AddOp, _u64(flat.MulOp, x, x), z), 32)


def words_per_element(of: dtype) -> int:
    """How many words the ``digits`` of one element of ``of`` take."""
    return 2 if of is dtypes.float64 else 1


def digits(seed: FlatIRTensor, shape: Shape, of: dtype, count: int, draws: int = 1) -> list[FlatIRTensor]:
    """``draws`` tensors of random integers below ``2**count``, uint64, under a scalar uint64 ``seed``; ``of`` says how many words each takes."""
    size = math.prod(shape)
    each = words_per_element(of)
    index = emit(flat.IotaOp, [], (size,), dtypes.uint64, _REASON, dim=0)
    first = index if each * draws == 1 else _with(flat.MulOp, index, each * draws)
    key = flat.broadcast(key_of(convert(seed, dtypes.uint64, _REASON)), (size,), _REASON)
    drawn = []
    for draw in range(draws):
        found = [words(key, _with(flat.AddOp, first, draw * each + i) if draw * each + i else first) for i in range(each)]
        bits = found[0] if each == 1 else _u64(flat.OrOp, _with(flat.ShiftLeftOp, found[0], 32), found[1])
        spare = 32 * each - count
        bits = _with(flat.ShiftRightLogicalOp, bits, spare) if spare else bits
        drawn.append(emit(flat.ReshapeOp, [bits], shape, dtypes.uint64, _REASON))
    return drawn
