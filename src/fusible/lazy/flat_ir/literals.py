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
"""Operations that give the same bits, whichever of their operands are constants of the program."""

_EXACT_OF_INTEGERS: tuple[type[FlatIROp], ...] = (*_EXACT, *_CHAINS, flat_ops.AbsOp, flat_ops.RemainderOp, flat_ops.SignOp)
"""The same for integers, whose arithmetic does not round.

Operations in none of these tables are not exact in this sense: a power or a remainder has a special formula for some constants, and the compiler
computes a function of a constant itself, and rounds it differently than a program does.
"""


_CHOICES: tuple[type[FlatIROp], ...] = (flat_ops.ClampOp, flat_ops.MaxOp, flat_ops.MinOp, flat_ops.SelectOp)
"""Operations into which LLVM moves later arithmetic where both have a constant operand: ``where(m, 3, x * y) + 5`` is compiled as
``where(m, 8, x * y + 5)``, whose product is then not rounded before the addition."""


@functools.cache
def _smallest_normal(of: dtype) -> float:
    return float(ml_dtypes.finfo(of.numpy).smallest_normal)


def is_special(value: float, of: dtype) -> bool:
    """Whether compilers treat a float constant specially: 0, 1 and -1 (a multiplication by 1 is dropped, where a program that runs it flushes a
    subnormal), subnormals, infinities and NaN."""
    size = abs(value)
    return not _smallest_normal(of) <= size < math.inf or size == 1.0


def readable(flat: FlatIR, literals: Sequence[FlatIRTensor]) -> list[bool]:
    """Which of ``literals``, inputs of ``flat`` that stand for literals, may stay inputs. The caller passes no special floats in them.

    A literal may stay an input where every operation that it reaches gives the same bits as with a constant in its place (see ``_EXACT``). Refused
    are two literals in one sum or one product, a literal that is chosen where another is added to the choice, and a literal in a sum of two products.
    """
    graph = _Graph(flat, literals)
    return [graph.is_readable(t) for t in literals]


class _Graph:
    """A program with its literals: ``users`` by tensor, and the tensors that would be constants, ``known``, if the literals were."""

    def __init__(self, flat: FlatIR, literals: Sequence[FlatIRTensor]) -> None:
        self.users: dict[FlatIRTensor, list[FlatIROp]] = {}
        self.known: set[FlatIRTensor] = set(literals)
        for op in flat.ops:
            if op.is_pure and self.known.issuperset(op.inputs):
                self.known.update(op.outputs)
            for t in dict.fromkeys(op.inputs):
                self.users.setdefault(t, []).append(op)

    def is_readable(self, literal: FlatIRTensor) -> bool:
        literals = [literal]
        for t in literals:
            for op in self.users.get(t, ()):
                if not self._is_fine(op, t):
                    return False
                if op.outputs[0] in self.known:
                    literals.append(op.outputs[0])
        return True

    def _is_fine(self, op: FlatIROp, literal: FlatIRTensor) -> bool:
        """Whether ``op`` gives the same bits where ``literal`` is an input. Float arithmetic on constants alone does not: the compiler would compute
        it."""
        if isinstance(op, _MOVES):
            return True
        if _is_whole(op):
            return isinstance(op, _EXACT_OF_INTEGERS)
        if op.outputs[0] in self.known:
            return False
        if type(op) in _CHAINS:
            return self._is_alone(op, literal)
        return isinstance(op, _EXACT) and not (isinstance(op, _CHOICES) and self._is_computed_with(op))

    def _is_alone(self, op: FlatIROp, literal: FlatIRTensor) -> bool:
        """Whether ``literal`` is the only known operand in the chain of sums (or products) that ``op`` is part of, and the engine can join the chain
        with nothing else: a choice or a power with a known operand, the quotient ``1 / (1 + exp(-x))`` that it makes of a logistic, another
        product."""
        chain = _CHAINS[type(op)]
        links = [op]
        for link in links:
            if any(t in self.known and (link is not op or t is not literal) for t in link.inputs):
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
        """Whether an operand is known."""
        return not self.known.isdisjoint(op.inputs)

    def _is_computed_with(self, op: FlatIROp) -> bool:
        """Whether arithmetic with a known operand follows a choice, at once or after further choices."""
        choices = [op]
        for choice in choices:
            for taker in self._takers(choice):
                if isinstance(taker, _CHOICES):
                    choices.append(taker)
                elif type(taker) in _CHAINS and self._is_told(taker):
                    return True
        return False

    def _is_of_products(self, op: FlatIROp) -> bool:
        """Whether ``op`` adds two products. LLVM fuses one of them with the addition, without rounding it; which one depends on what it knows of
        them."""
        makers = [self._maker(t, "product") for t in op.inputs]
        return _CHAINS.get(type(op)) == "sum" and all(made is not None and _CHAINS.get(type(made)) == "product" for made in makers)

    def _maker(self, tensor: FlatIRTensor, chain: str) -> FlatIROp | None:
        """The operation that computes the elements of a tensor, before they are moved or passed on."""
        made = tensor.producer
        while made is not None and (passed := self._passed(made, chain)) is not None:
            made = passed.producer
        return made

    def _takers(self, op: FlatIROp, chain: str | None = None) -> Iterator[FlatIROp]:
        """The operations that compute with the elements of a result, wherever these are moved or passed on."""
        moved = [op.outputs[0]]
        for t in moved:
            for user in self.users.get(t, ()):
                if self._passed(user, chain) is None:
                    yield user
                else:
                    moved.append(user.outputs[0])

    def _passed(self, op: FlatIROp, chain: str | None) -> FlatIRTensor | None:
        """The operand whose elements ``op`` moves; or passes on within ``chain``, where the engine may drop ``op``, as a sum with 0 within a
        product."""
        if isinstance(op, _MOVES):
            return op.inputs[0]
        if chain is None or _CHAINS.get(type(op), chain) == chain or not any(map(_is_special, op.inputs)):
            return None
        return next((t for t in op.inputs if t not in self.known), None)


def _is_special(tensor: FlatIRTensor) -> bool:
    """Whether a tensor is a special float constant, possibly moved."""
    made = tensor.producer
    while isinstance(made, _MOVES):
        made = made.inputs[0].producer
    if not isinstance(made, flat_ops.ConstantOp) or not (made.dtype.is_floating or made.dtype.is_float8):
        return False
    return any(is_special(float(value), made.dtype) for value in made.array().ravel())


def _is_whole(op: FlatIROp) -> bool:
    """Whether an operation has integers and bools alone as operands and results."""
    return not any(t.dtype.is_floating or t.dtype.is_float8 for t in [*op.inputs, *op.outputs])
