"""Counter-based random words: Squares32 and Squares64 (Widynski 2020, arXiv:2004.06278) under a SplitMix64 key (Steele et al. 2014).

Element ``i`` of a tensor reads words ``i * n``, ..., ``i * n + n - 1`` of its stream, on every engine and in any order of evaluation. All arithmetic
is on uint64 and wraps around, as the algorithms require.
"""

from __future__ import annotations

import math

from fusible.lazy import dtypes
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIRTensor, emit
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.ops.lowering.convert import convert
from fusible.lazy.ops.lowering.expression import Expression
from fusible.lazy.printing import Shape

__all__ = ["digits", "key_of", "words", "words_per_element"]

_REASON = "draw random bits"


def key_of(seed: FlatIRTensor) -> FlatIRTensor:
    """SplitMix64 of each seed (uint64), made odd."""
    z = Expression(seed, _REASON) + 0x9E3779B97F4A7C15
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor
    return ((z ^ (z >> 31)) | 1).tensor


def words(key: FlatIRTensor, counter: Expression, bits: int = 32) -> Expression:
    """The word of each counter: uint64 values below ``2**bits``, of 32 or 64 bits."""
    y = counter * key
    z = y + key
    x = y
    for addend in (y, z, y):
        x = _rotated(x * x + addend)
    x = x * x + z
    if bits == 32:
        return x >> 32
    last = _rotated(x)
    return x ^ ((last * last + y) >> 32)


def _rotated(x: Expression) -> Expression:
    return (x >> 32) | (x << 32)


def words_per_element(of: dtype) -> int:
    """How many words the ``digits`` of one element of ``of`` take."""
    return 2 if of is dtypes.float64 else 1


def digits(seed: FlatIRTensor, shape: Shape, of: dtype, count: int, draws: int = 1) -> list[FlatIRTensor]:
    """``draws`` tensors of random integers below ``2**count``, uint64, under a scalar uint64 ``seed``; ``of`` says how many words each takes."""
    size = math.prod(shape)
    each = words_per_element(of)
    index = Expression(emit(flat.IotaOp, [], (size,), dtypes.uint64, _REASON, dim=0), _REASON)
    first = index if each * draws == 1 else index * (each * draws)
    key = flat.broadcast(key_of(convert(seed, dtypes.uint64, _REASON)), (size,), _REASON)
    drawn = []
    for draw in range(draws):
        found = [words(key, first + n if n else first) for n in range(draw * each, (draw + 1) * each)]
        bits = found[0] if each == 1 else (found[0] << 32) | found[1]
        spare = 32 * each - count
        bits = bits >> spare if spare else bits
        drawn.append(emit(flat.ReshapeOp, [bits.tensor], shape, dtypes.uint64, _REASON))
    return drawn
