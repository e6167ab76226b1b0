"""Rewriting a program of symbolic sizes for padded tensors, so that no result depends on padding.

Every tensor of the new program keeps its symbolic shape, in which a padded size now stands for its bucket. The first elements along each dimension,
as many as the true size, are those of the original program; the rest has no meaning. The program reads the true sizes as int32 scalars. The rule of
each operation keeps this invariant. Rules are declared above, beside the operations (``fusible.lazy.ops.padding``); an operation without a rule is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusible.errors import CompileError, expected
from fusible.lazy import dtypes
from fusible.lazy.device import DEFAULT
from fusible.lazy.dims import Atom, SizeLike, Symbol, assembled, evaluate, symbols
from fusible.lazy.frontend import Tensor
from fusible.lazy.operation import attribute_names
from fusible.lazy.source import UNKNOWN, describe
from fusible.lazy.trace import Input, Trace, TraceOp, TraceTensor

__all__ = ["Masking", "PADDING_RULES", "again", "masked", "padding_rule"]

Rule = Callable[["Masking", Any, list[Tensor]], Tensor | list[Tensor]]
"""Records the replacement of an operation, on padded operands, which it is given. Raises ``Masking.refusal`` where there is none."""

PADDING_RULES: dict[type[TraceOp], Rule] = {}
"""By operation the rule for padded operands or results. An operation without a rule is refused."""

_TRIED = 4096
"""For how many values of one size an expression is tried out."""


def padding_rule(*kinds: type[TraceOp]) -> Callable[[Rule], Rule]:
    """Declare the function below to be the rule of some operations."""

    def declare(rule: Rule) -> Rule:
        for kind in kinds:
            assert kind not in PADDING_RULES, f"{kind.__name__} has two rules for padding"
            PADDING_RULES[kind] = rule
        return rule

    return declare


def masked(trace: Trace, padded: Sequence[Symbol]) -> Trace:
    """``trace`` on tensors that are padded where their sizes depend on the symbols ``padded``, whose true values it reads after its other inputs.

    Raises ``CompileError`` for an operation whose results would depend on what is beyond the true sizes, or for a size that may shrink as they grow.
    """
    return Masking(trace, padded).trace


class Masking:
    """The new program under construction. ``now`` maps each tensor of the original program to its replacement."""

    def __init__(self, trace: Trace, padded: Sequence[Symbol]) -> None:
        self.padded = frozenset(padded)
        self.now: dict[TraceTensor, Tensor] = {t: Tensor.from_trace_tensor(t) for t in trace.inputs}
        self.true: dict[Symbol, Tensor] = {}
        for i, size in enumerate(padded):
            read = Input(len(trace.inputs) + i, (), dtypes.int32).output(DEFAULT, UNKNOWN, f"true_{size.name}")
            self.true[size] = Tensor.from_trace_tensor(read)
        for op in trace.ops:
            if not all(out in self.now for out in op.outputs):
                self._rewrite(op)
        inputs = [*trace.inputs, *(t.trace_tensor for t in self.true.values())]
        self.trace = Trace([self.now[t].trace_tensor for t in trace.outputs], inputs)

    def _rewrite(self, op: TraceOp) -> None:
        if op.is_input:  # a stored tensor
            self.now[op.outputs[0]] = Tensor.from_trace_tensor(op.outputs[0])
            return
        inputs = [self.now[t] for t in op.inputs]
        touched = self.pads([t.shape for t in (*op.inputs, *op.outputs)]) or self.pads([getattr(op, name) for name in attribute_names(type(op))])
        if not touched:
            self.now.update(zip(op.outputs, again(op, inputs), strict=True))
            return
        for t in op.outputs:
            if not all(self._grows(n) for n in t.shape):
                raise self.refusal(op, f"sizes {list(t.shape)}, of which one may shrink as the dimension grows")
        rule = next((PADDING_RULES[kind] for kind in type(op).__mro__ if kind in PADDING_RULES), None)
        if rule is None:
            raise self.refusal(op, "one that cannot tell padding from elements")
        made = rule(self, op, inputs)
        for old, new in zip(op.outputs, made if isinstance(made, list) else [made], strict=True):
            self.now[old] = new
            new.trace_tensor.name = new.trace_tensor.name or old.name

    def refusal(self, op: TraceOp, got: str) -> CompileError:
        names = " and ".join(repr(s.name) for s in self.padded)
        of = f"{type(op).__name__.lower()} at {describe(op.outputs[0].source)}, in a function with buckets for {names}"
        do = "compile without buckets, or pad and mask yourself"
        return CompileError(expected("an operation that is right on padded tensors", of=of, got=got, do=do))

    def pads(self, sizes: Any) -> bool:
        """Whether a size, or one in nested lists, depends on a padded one."""
        return not self.padded.isdisjoint(symbols(list(sizes) if isinstance(sizes, Iterable) else sizes))

    def _grows(self, n: SizeLike) -> bool:
        """Whether a size never shrinks where padded sizes grow: known by its signs, or by trying all values where it depends on one size alone."""
        if not self.pads(n):
            return True
        if len(found := symbols(n)) == 1 and (one := next(iter(found))).max - one.min < _TRIED:
            tried = [evaluate(n, {one: value}) for value in range(one.min, one.max + 1)]
            return tried == sorted(tried)
        return all(factor > 0 and all(self._atom_grows(atom) for atom in monomial) for monomial, factor in n.terms if self._in(monomial))

    def _in(self, monomial: tuple[Atom, ...]) -> bool:
        return any(self.pads(assembled({(atom,): 1})) for atom in monomial)

    def _atom_grows(self, atom: Atom) -> bool:
        if isinstance(atom, Symbol):
            return True
        whole, *rest = atom.operands
        if atom.kind == "//":
            return self._grows(whole) and not self.pads(rest)
        return all(map(self._grows, atom.operands)) if atom.kind in ("min", "max") else not self.pads(atom.operands)


def again(op: TraceOp, inputs: Sequence[Tensor], **attributes: Any) -> list[Tensor]:
    """``op`` on other operands of the same shapes, recorded at the same line; ``attributes`` replace its own."""
    made = copy.copy(op)
    for name, value in attributes.items():
        setattr(made, name, value)
    types = made.infer_all(*[t.trace_tensor for t in inputs])
    outputs = []
    for old, (shape, of) in zip(op.outputs, types, strict=True):
        new = TraceTensor(shape if attributes else old.shape, of, old.device, made, old.source)
        new.name = old.name
        outputs.append(new)
    made.bind(tuple([t.trace_tensor for t in inputs]), tuple(outputs))
    return [Tensor.from_trace_tensor(t) for t in outputs]
