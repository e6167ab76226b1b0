"""Which literals a program may read from inputs without a bit of its results changing."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import ml_dtypes

from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import ops as flat_ops
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor

__all__ = ["is_special", "readable"]

_MOVES: tuple[type[FlatIROp], ...] = (
    flat_ops.BroadcastOp,
    flat_ops.FlipOp,
    flat_ops.NegateOp,
    flat_ops.ReshapeOp,
    flat_ops.SliceOp,
    flat_ops.TransposeOp,
)
"""Operations of one operand whose result holds its elements, or their negatives."""

_CHAINS: dict[type[FlatIROp], str] = {
    flat_ops.AddOp: "sum",
    flat_ops.SubtractOp: "sum",
    flat_ops.MulOp: "product",
    flat_ops.DivideOp: "product",
}
"""Operations whose constant float operands XLA joins where several follow one another: ``(x * 3) * 5`` is compiled as ``x * 15``."""

_EXACT: tuple[type[FlatIROp], ...] = (
    flat_ops.AndOp,
    flat_ops.CompareOp,
    flat_ops.ConcatenateOp,
    flat_ops.MaxOp,
    flat_ops.MinOp,
    flat_ops.NotOp,
    flat_ops.OrOp,
    flat_ops.PadOp,
    flat_ops.SelectOp,
    flat_ops.ShiftLeftOp,
    flat_ops.ShiftRightLogicalOp,
    flat_ops.SliceAtOp,
    flat_ops.XorOp,
)
"""Operations that give the same bits whatever of their operands is known when they are compiled."""

_EXACT_OF_INTEGERS: tuple[type[FlatIROp], ...] = (*_EXACT, *_CHAINS, flat_ops.AbsOp, flat_ops.RemainderOp, flat_ops.SignOp)
"""What integers have beside these: their arithmetic does not round.

What is in none of these tables is not: a power or a remainder has a formula of its own for some constants, a function of a constant is computed by
the compiler, which rounds it otherwise than a program does.
"""


_CHOICES: tuple[type[FlatIROp], ...] = (flat_ops.ClampOp, flat_ops.MaxOp, flat_ops.MinOp, flat_ops.SelectOp)
"""Operations that LLVM draws later arithmetic into where it knows an operand of both: ``where(m, 3, x * y) + 5`` is compiled as
``where(m, 8, x * y + 5)``, whose product is then not rounded before the addition."""


@functools.cache
def _smallest_normal(of: dtype) -> float:
    return float(ml_dtypes.finfo(of.numpy).smallest_normal)


def is_special(value: float, of: dtype) -> bool:
    """Whether compilers have shortcuts for a float: 0, 1 and -1, which they drop (in a program a multiplication by 1 flushes a subnormal), other
    subnormals, infinities and NaN."""
    size = abs(value)
    return not _smallest_normal(of) <= size < math.inf or size == 1.0


def readable(flat: FlatIR, literals: Sequence[FlatIRTensor]) -> list[bool]:
    """Which of ``literals``, inputs of ``flat`` that stand for literals, may stay inputs. Floats among them will not be special.

    One may where every operation that it comes to would give the same bits with the literal in its place, as ``_EXACT`` says. Two literals in one sum
    or in one product may not, nor two of which one is chosen and the other is added to the choice, nor one in a sum of two products.
    """
    graph = _Graph(flat, literals)
    return [graph.is_readable(t) for t in literals]


class _Graph:
    """A program with its literals: ``users`` by tensor, and the tensors that are ``known`` when it is compiled with literals for constants."""

    def __init__(self, flat: FlatIR, literals: Sequence[FlatIRTensor]) -> None:
        self.users: dict[FlatIRTensor, list[FlatIROp]] = {}
        self.known: set[FlatIRTensor] = set(literals)
        for op in flat.ops:
            if op.is_pure and self.known.issuperset(op.inputs):
                self.known.update(op.outputs)
            for t in dict.fromkeys(op.inputs):
                self.users.setdefault(t, []).append(op)

    def is_readable(self, literal: FlatIRTensor) -> bool:
        held = [literal]
        for t in held:
            for op in self.users.get(t, ()):
                if not self._is_fine(op, t):
                    return False
                if op.outputs[0] in self.known:
                    held.append(op.outputs[0])
        return True

    def _is_fine(self, op: FlatIROp, held: FlatIRTensor) -> bool:
        """Whether ``op`` gives the same bits when ``held`` is read. What makes a known result must, of floats, be no arithmetic."""
        if isinstance(op, _MOVES):
            return True
        if _is_whole(op):
            return isinstance(op, _EXACT_OF_INTEGERS)
        if op.outputs[0] in self.known:
            return False
        if type(op) in _CHAINS:
            return self._is_alone(op, held)
        return isinstance(op, _EXACT) and not (isinstance(op, _CHOICES) and self._is_computed_with(op))

    def _is_alone(self, op: FlatIROp, held: FlatIRTensor) -> bool:
        """Whether ``held`` is the only known operand of ``op`` and of the links that it hangs together with, and the engine can join these with
        nothing else: a choice or a power of which it knows something, the quotient ``1 / (1 + exp(-x))`` that it makes of a logistic, another
        product."""
        chain = _CHAINS[type(op)]
        links = [op]
        for link in links:
            if any(t in self.known and (link is not op or t is not held) for t in link.inputs):
                return False
            makers = [made for t in link.inputs if (made := self._maker(t, chain)) is not None]
            takers = list(self._takers(link, chain))
            if any(map(self._is_told, (near for near in makers if isinstance(near, _CHOICES)))):
                return False
            if any(self._is_told(near) and self._is_computed_with(near) for near in takers if isinstance(near, _CHOICES)):
                return False
            if any(self._is_told(near) and isinstance(near, flat_ops.PowOp) for near in [*makers, *takers]):
                return False
            if any(isinstance(made, flat_ops.LogisticOp) for made in makers) or any(map(self._is_of_products, takers)):
                return False
            links += [n for n in dict.fromkeys([*makers, *takers]) if _CHAINS.get(type(n)) == chain and n not in links]
        return True

    def _is_told(self, op: FlatIROp) -> bool:
        """Whether the engine knows an operand."""
        return not self.known.isdisjoint(op.inputs)

    def _is_computed_with(self, op: FlatIROp) -> bool:
        """Whether arithmetic with a known operand follows a choice, or a choice among others and it."""
        choices = [op]
        for choice in choices:
            for taker in self._takers(choice):
                if isinstance(taker, _CHOICES):
                    choices.append(taker)
                elif type(taker) in _CHAINS and self._is_told(taker):
                    return True
        return False

    def _is_of_products(self, op: FlatIROp) -> bool:
        """Whether ``op`` adds two products. One of them is rounded before and the other is not: which, LLVM decides by what it knows of them."""
        makers = [self._maker(t, "product") for t in op.inputs]
        return _CHAINS.get(type(op)) == "sum" and all(made is not None and _CHAINS.get(type(made)) == "product" for made in makers)

    def _maker(self, tensor: FlatIRTensor, chain: str) -> FlatIROp | None:
        """The operation that computes a tensor's elements, from which they are moved or passed."""
        made = tensor.producer
        while made is not None and (passed := self._passed(made, chain)) is not None:
            made = passed.producer
        return made

    def _takers(self, op: FlatIROp, chain: str | None = None) -> Iterator[FlatIROp]:
        """The users of a result, wherever its elements are moved or passed."""
        moved = [op.outputs[0]]
        for t in moved:
            for user in self.users.get(t, ()):
                if self._passed(user, chain) is None:
                    yield user
                else:
                    moved.append(user.outputs[0])

    def _passed(self, op: FlatIROp, chain: str | None) -> FlatIRTensor | None:
        """The operand whose elements ``op`` moves, or passes on within ``chain`` because the engine may drop it: a sum with 0 within a product."""
        if isinstance(op, _MOVES):
            return op.inputs[0]
        if chain is None or _CHAINS.get(type(op), chain) == chain or not any(map(_is_special, op.inputs)):
            return None
        return next((t for t in op.inputs if t not in self.known), None)


def _is_special(tensor: FlatIRTensor) -> bool:
    """Whether a float constant is special, wherever it has been moved."""
    made = tensor.producer
    while isinstance(made, _MOVES):
        made = made.inputs[0].producer
    if not isinstance(made, flat_ops.ConstantOp) or not (made.dtype.is_floating or made.dtype.is_float8):
        return False
    return any(is_special(float(value), made.dtype) for value in made.array().ravel())


def _is_whole(op: FlatIROp) -> bool:
    """Whether an operation is one of integers and bools."""
    return not any(t.dtype.is_floating or t.dtype.is_float8 for t in [*op.inputs, *op.outputs])
