"""The tensors that an operation of ours saves in its context, by name and in the form of NVIDIA's package.

Code in torch may replace one pass of an operation, and then shares the context with our other pass. A forward in torch saves tensors in the order in
which the package's operation saves them. A backward in torch finds them in that order, beside the attributes that the package's operation sets. Each
operation says here where its own context differs from that; most differ in the order alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fusible import nvte
from fusible.errors import ArgumentError, expected
from fusible.nvte import Tensor, te_to_torch_dtype
from fusible.ops import Op
from fusible.ops.protocols import OpaqueCode
from fusible.pytorch.ops.context import OperationContext, not_cleared
from fusible.pytorch.ops.protocols import FusibleOperationLike
from fusible.pytorch.ops.tensors import wrapped
from fusible.quantized import QuantizedTensorStorage, Quantizer

__all__ = ["SavedContext", "check_saved", "tell"]


class SavedContext:
    """Mixin of a basic operation: its context in the form of NVIDIA's package."""

    keeps_unnamed: ClassVar[bool] = False
    """Whether its op saves more than the parameters of ``Op.context`` name, so that no other forward than its own can save it."""

    if TYPE_CHECKING:  # the module's, whose part this is

        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]: ...

    def save_for_backward(self, ctx: OperationContext, **tensors: torch.Tensor | QuantizedTensorStorage) -> None:
        """Leave in ``ctx`` what the operation's own backward needs: for a ``fuser_forward`` that computes the output of an operation of ours itself.

        The names are those of the parameters of its op's ``context``: ``x`` of ``BasicLinear`` and of an activation, ``x, mu, rsigma`` of
        ``LayerNorm``, ``x, rsigma`` of ``RMSNorm``; none of ``Bias``, ``ConstantScale`` and other operations whose backward needs nothing, for which
        nothing need be left. Tensors ``[*, columns]`` are cast, or quantized, as the op would have; what is quantized already is taken as it is.
        The operation's parameters need not be given. To be called in forward, once. Raises ``ArgumentError`` for other names.
        """
        op, of = ctx._op, f"{type(self).__name__}.save_for_backward"
        if op is None:
            do = "call ctx.save_for_backward(*tensors)"
            raise ArgumentError(expected("a context that a fuser gave, of an operation of ours", of=of, got="another", do=do))
        names = _context_names(type(op))
        own = {name: getattr(op, name) for name in op.arg_names if name in names}
        parameters = dict(zip(op.arg_names, self.parameters(recurse=False), strict=True))
        saved = {name: value for name, value in tensors.items() if name not in parameters or value is not parameters[name]}
        missing = [name for name in names if name not in saved and name not in own]
        if missing or not saved.keys() <= set(names):
            wanted = ", ".join(name for name in names if name not in own) or "no tensors"
            raise ArgumentError(expected(f"tensors by the names {wanted}", of=of, got=", ".join(tensors) or "none", do="give these"))
        made = {name: _made(op, name, value) for name, value in saved.items()}
        ctx._tensors = op.context(**{**own, **made})

    def saved_for_backward(self, ctx: OperationContext) -> dict[str, Any]:
        """What the operation's own forward left in ``ctx``, by those names: for a ``fuser_backward`` that computes the gradients of an operation of
        ours itself. What no gradient needs is not there; what is quantized can be read by ``maybe_dequantize``. Raises ``ArgumentError``."""
        if ctx._op is None or ctx._tensors is None:
            of, do = f"{type(self).__name__}.saved_for_backward", "read ctx.saved_tensors"
            raise ArgumentError(expected("what the forward of an operation of ours saved", of=of, got="a context without", do=do))
        return {name: nvte.unpadded(tensor).data for name, tensor in ctx._tensors.items()}

    def kept_names(self, op: Op) -> tuple[str, ...]:
        """The names of what the package's operation saves, in its order: what the op's backward needs but for the operation's own parameters."""
        return tuple(name for name in _context_names(type(op)) if name not in op.arg_names)

    def unneeded(self, op: Op, name: str) -> bool:
        """Whether no gradient that is wanted of ``op`` needs what it keeps by that name."""
        return False

    def from_theirs(self, op: Op, saved: Sequence[Any] | None, context: OperationContext) -> Mapping[str, Any] | None:
        """By our names, the tensors that a forward written for the package's operation has saved. None where these are not in its form."""
        names, saved = self.kept_names(op), saved or ()
        for wanted in (names, _context_names(type(op))):
            if len(saved) == len(wanted) and all(x is not None or self.unneeded(op, name) for name, x in zip(wanted, saved, strict=True)):
                return dict(zip(wanted, saved, strict=True))
        return None

    def as_theirs(self, op: Op, kept: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tensors that our own forward has saved, in the form of the package's ``saved_tensors``; None for what no gradient needs."""
        return tuple(kept.get(name) for name in self.kept_names(op))

    def told(self, op: Op, kept: Mapping[str, Any], lent: Quantizer | None) -> dict[str, Any]:
        """The attributes that the package's operation sets on its context. ``lent``: the quantizer by which the operation before it wants the
        gradient that it is handed, or None."""
        sides = {"extra_input_requires_grad": op.wants(op.side_inputs[-1])} if op.side_inputs else {}
        grads = {f"{name}_requires_grad": op.wants(name) for name in op.arg_names}
        quantizers = {"prev_op_grad_output_quantizer": lent, "grad_input_quantizer": lent}
        return {"dtype": te_to_torch_dtype(op.activation), "input_requires_grad": op.wants("x"), **grads, **sides, **quantizers}


@functools.cache
def _context_names(op: type[Op]) -> tuple[str, ...]:
    """The names of what an op's backward needs, of ``Op.context``."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(name for name, p in inspect.signature(op.context).parameters.items() if name != "self" and p.kind not in kinds)


def check_saved(module: FusibleOperationLike, members: Sequence[Op], contexts: Sequence[OperationContext]) -> None:
    """Raise ``ArgumentError`` unless a forward in torch has saved what the backward of our ops needs: by name, or in the order in which NVIDIA's
    operation of that kind saves it."""
    for index, (basic, member, context) in enumerate(zip(module.basic_operations(), members, contexts, strict=True)):
        done = isinstance(member, OpaqueCode) or not context.requires_grad or context._tensors is not None or module.fuses[1]
        if done or _named(basic, member, context):
            continue
        place = f"basic_ops[{index}]" if module.is_fused_op else "self"
        names = [name for name in _context_names(type(member)) if name not in member.arg_names]
        written = f"{type(module).__name__}.{'fuser_forward' if module.is_fused_op else 'op_forward'}"
        of = f"the context of {place} ({type(basic).__name__}) after {written}"
        got = "nothing" if context.to_save is None else "tensors without names"
        do = f"call {place}.save_for_backward(ctx, {', '.join(f'{name}=...' for name in names)})"
        if basic.keeps_unnamed:
            do = f"call {place}.fuser_forward with that context"
        wanted = f" ({', '.join(_context_names(type(member)))})" if names else ""
        raise ArgumentError(expected(f"what its own backward needs{wanted}", of=of, got=got, do=do))


def _named(basic: SavedContext, member: Op, context: OperationContext) -> bool:
    """Name tensors that were saved without names, where they are in the form of NVIDIA's operation of that kind; whether they were."""
    found = None if basic.keeps_unnamed else basic.from_theirs(member, context.to_save, context)
    if found:
        basic.save_for_backward(context, **found)
    if found is not None:
        context.to_save = None
    return found is not None


def tell(context: OperationContext, basic: SavedContext, member: Op, lent: Quantizer | None) -> None:
    """After an op's own forward, set on its context what a backward that is written for NVIDIA's operation reads."""
    if context._tensors is None:
        return
    kept = {name: nvte.unpadded(tensor).data for name, tensor in context._tensors.items()}
    context.saved_tensors = not_cleared(basic.as_theirs(member, kept))
    for name, value in basic.told(member, kept, lent).items():
        if not hasattr(context, name):
            setattr(context, name, value)


def _made(op: Op, name: str, value: Any) -> Tensor | None:
    return None if value is None else nvte.cast_checked(wrapped(value, op.type_of(name)), op.type_of(name))
