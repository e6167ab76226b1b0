"""Operations whose attributes are sizes, rewritten to the ones that take those sizes as operands.

Lowering writes a program of symbolic sizes as it writes a static one: a broadcast to ``(n, 4)``, a literal of value ``2 * n``. Here each such
operation becomes its dynamic form, and the sizes are computed at the place of their first use from the sizes of the program's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusible.errors import CompileError, expected
from fusible.lazy.dims import Atom, Size, SizeLike, Symbol, bounds, is_static, plain, symbols
from fusible.lazy.dtypes import int32
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.source import describe

__all__ = ["make_dynamic"]

_FUNCTIONS: dict[str, type[FlatIROp]] = {"//": flat.DivideOp, "min": flat.MinOp, "max": flat.MaxOp}


def make_dynamic(program: FlatIR, scalars: Mapping[Symbol, FlatIRTensor], counter: list[int]) -> FlatIR:
    """``program`` with dynamic operations where sizes are symbolic; ``program`` itself where none is.

    ``scalars`` are the inputs whose value is a size. ``counter`` numbers the tensors that lowering introduces. Raises ``CompileError`` for a size
    that no input determines, and for an operation that has no dynamic form in StableHLO.
    """
    if all(_is_plain(op) for op in program.ops):
        return program
    rewriter = _Rewriter(program, scalars, counter)
    for op in program.ops:
        rewriter.add(op)
    return FlatIR(program.inputs, rewriter.ops, program.outputs)


def _is_plain(op: FlatIROp) -> bool:
    return all(is_static(t.shape) for t in (*op.outputs, *op.inputs)) and not _symbolic_attributes(op)


def _symbolic_attributes(op: FlatIROp) -> set[Symbol]:
    return {found for name, value in vars(op).items() if name not in op.HIDDEN for found in symbols(value)}


class _Rewriter:
    """The program so far, and the sizes that it has computed."""

    def __init__(self, program: FlatIR, scalars: Mapping[Symbol, FlatIRTensor], counter: list[int]) -> None:
        self.ops: list[FlatIROp] = []
        self._counter = counter
        self._scalars = dict(scalars)
        self._sizes: dict[tuple[SizeLike, ...] | SizeLike, FlatIRTensor] = {}
        self._dims: dict[Symbol, tuple[FlatIRTensor, int]] = {}
        for tensor in program.inputs:
            for dim, n in enumerate(tensor.shape):
                for found in symbols(n):
                    self._dims.setdefault(found, (tensor, dim))

    def add(self, op: FlatIROp) -> None:
        """Append ``op``, rewritten where it has to be."""
        if not _is_plain(op):
            self._op = op
            rewrite = _REWRITES.get(type(op))
            if rewrite is not None:
                op = rewrite(self, op)
            elif _symbolic_attributes(op):
                got = f"{type(op).__name__}({', '.join(op.attributes())})"
                of = f"{op.label} recorded at {describe(op.outputs[0].source)}"
                do = "keep the executable in this process, or give it fixed sizes"
                raise CompileError(expected("an operation that StableHLO has for dynamic sizes", of=of, got=got, do=do))
            op.label = self._op.label
        self.ops.append(op)

    def emit(self, op: type[FlatIROp], inputs: Sequence[FlatIRTensor], shape: tuple[int, ...], **attributes: Any) -> FlatIRTensor:
        """An int32 tensor of sizes."""
        self._counter[0] += 1
        served = self._op.outputs[0]
        name = f"t_inter{self._counter[0]}"
        out = FlatIRTensor(shape, int32, name=name, device=served.device, source=served.source, reason="compute the sizes of tensors")
        made = op(list(inputs), [out], **attributes)
        made.label = self._op.label
        self.ops.append(made)
        return out

    def size(self, of: SizeLike) -> FlatIRTensor:
        """A size as a scalar."""
        (of,) = plain((of,))
        found = self._sizes.get(of)
        if found is None:
            found = self._sizes[of] = self._sum(of) if isinstance(of, Size) else self.emit(flat.ConstantOp, [], (), data=of, dtype=int32)
        return found

    def shape(self, of: Sequence[SizeLike]) -> FlatIRTensor:
        """Sizes as a vector."""
        key = plain(of)
        found = self._sizes.get(key)
        if found is None:
            if len(key) == 1:
                found = self.emit(flat.ReshapeOp, [self.size(key[0])], (1,))
            else:
                found = self.emit(flat.ConcatenateOp, [self.shape((n,)) for n in key], (len(key),), dim=0)
            self._sizes[key] = found
        return found

    def _sum(self, of: Size) -> FlatIRTensor:
        total: FlatIRTensor | None = None
        for monomial, factor in of.terms:
            parts = [self._atom(atom) for atom in monomial]
            if factor != 1 or not parts:
                parts.append(self.size(factor))
            part = parts[0]
            for other in parts[1:]:
                part = self.emit(flat.MulOp, [part, other], ())
            total = part if total is None else self.emit(flat.AddOp, [total, part], ())
        assert total is not None
        return total

    def _atom(self, atom: Atom) -> FlatIRTensor:
        if not isinstance(atom, Symbol):
            return self._function(atom.kind, atom.operands)
        if atom in self._scalars:
            return self._scalars[atom]
        if atom not in self._dims:
            got = f"{atom}, a size of an argument of a function being compiled"
            do = "use it to record operations of that function, and not its value"
            raise CompileError(expected("sizes of its own inputs", of="a recorded program", got=got, do=do))
        tensor, dim = self._dims[atom]
        self._scalars[atom] = self.emit(flat.GetDimensionSizeOp, [tensor], (), dim=dim)
        return self._scalars[atom]

    def _function(self, kind: str, operands: tuple[SizeLike, ...]) -> FlatIRTensor:
        if kind == "%":
            a, b = operands
            return self._sum(a - a // b * b)  # type: ignore[arg-type] - a symbolic remainder
        if kind == "//":
            # Division rounds towards zero: a dividend that may be negative is moved up by whole divisors first.
            a, b = operands
            lift = max(-(bounds(a)[0] // bounds(b)[0]), 0)
            quotient = self.emit(flat.DivideOp, [self.size(a + b * lift), self.size(b)], ())
            return quotient if not lift else self.emit(flat.AddOp, [quotient, self.size(-lift)], ())
        result = self.size(operands[0])
        for other in operands[1:]:
            result = self.emit(_FUNCTIONS[kind], [result, self.size(other)], ())
        return result


def _constant(to: _Rewriter, op: flat.ConstantOp) -> FlatIROp:
    value = to.size(op.data)
    return flat.ConvertOp([value], op.outputs)


def _broadcast(to: _Rewriter, op: flat.BroadcastOp) -> FlatIROp:
    return flat.DynamicBroadcastOp([op.inputs[0], to.shape(op.outputs[0].shape)], op.outputs, broadcast_dim=op.broadcast_dim)


def _reshape(to: _Rewriter, op: flat.ReshapeOp) -> FlatIROp:
    shape = op.outputs[0].shape
    return flat.DynamicReshapeOp([op.inputs[0], to.shape(shape)], op.outputs) if shape else op


def _iota(to: _Rewriter, op: flat.IotaOp) -> FlatIROp:
    return flat.DynamicIotaOp([to.shape(op.outputs[0].shape)], op.outputs, dim=op.dim)


def _slice(to: _Rewriter, op: flat.SliceOp) -> FlatIROp:
    return flat.DynamicSliceOp([op.inputs[0], *map(to.shape, (op.start, op.limit, op.stride))], op.outputs)


def _pad(to: _Rewriter, op: flat.PadOp) -> FlatIROp:
    if not _symbolic_attributes(op):
        return op
    return flat.DynamicPadOp([*op.inputs, *map(to.shape, (op.low, op.high, [0] * len(op.low)))], op.outputs)


def _gather(to: _Rewriter, op: flat.GatherOp) -> FlatIROp:
    sizes = [1 if d == op.dim else n for d, n in enumerate(op.inputs[0].shape)]
    return op if is_static(sizes) else flat.DynamicGatherOp([*op.inputs, to.shape(sizes)], op.outputs, dim=op.dim)


_REWRITES: dict[type[FlatIROp], Callable[[_Rewriter, Any], FlatIROp]] = {
    flat.BroadcastOp: _broadcast,
    flat.ConstantOp: _constant,
    flat.GatherOp: _gather,
    flat.IotaOp: _iota,
    flat.PadOp: _pad,
    flat.ReshapeOp: _reshape,
    flat.SliceOp: _slice,
}
