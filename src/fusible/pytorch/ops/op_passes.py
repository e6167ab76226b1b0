"""``fuser_forward`` and ``fuser_backward`` of operations of ours: they run the passes of the ops on torch tensors, for callers that are written in
torch.

The opposite direction, a plan that calls code in torch, is ``torch_operation``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fusible import nvte
from fusible.compute_pipeline import outer_sides, run_ops, run_ops_backward
from fusible.errors import ArgumentError, expected
from fusible.nvte import QuantizedType, Tensor, make_nvte_tensor, pass_
from fusible.ops import Op
from fusible.pytorch.ops.context import OperationContext
from fusible.pytorch.ops.protocols import FusibleOperationLike
from fusible.pytorch.ops.tensors import wrapped
from fusible.quantized import Quantizer

__all__ = ["fuser_backward", "fuser_forward"]


def fuser_forward(
    module: FusibleOperationLike,
    basic_op_ctxs: Sequence[OperationContext],
    input_: Any,
    *,
    basic_op_extra_inputs: Sequence[Iterable[Any]],
    next_op_input_quantizer: Quantizer | None,
    **unused: Any,
) -> tuple[Any, list[tuple[Any, ...]]]:
    """``(output, extra outputs of each basic operation)``, by the engine's fused passes where it has some.

    The output is quantized where ``next_op_input_quantizer`` is given and the plan foresaw it. Extra tensors that one of the operations gives to
    another pass inside; they are None in ``basic_op_extra_inputs`` and in what is returned.
    """
    ctxs, extra = basic_op_ctxs, [tuple(values) for values in basic_op_extra_inputs]
    ops = _resolved(module, ctxs, input_, extra)
    if next_op_input_quantizer is None and isinstance(ops[-1].y_dtype, QuantizedType):
        ops[-1] = ops[-1].with_(y_dtype=ops[-1].activation)
    inference = pass_() == "inference" and not any(ctx.requires_grad for ctx in ctxs)
    sides = [_named(module, op, outer, values) for op, outer, values in zip(ops, outer_sides(ops)[0], extra, strict=True)]
    y, contexts, outputs = run_ops(ops, wrapped(input_, ops[0].x_dtype), sides, _call_inputs(ctxs), inference=inference)
    for ctx, tensors in zip(ctxs, contexts, strict=True):
        ctx._tensors = tensors
    found = zip(ops, outputs, strict=True)
    return nvte.unpadded(y).data, [tuple(_first(values, route) for route in op.routes) for op, values in found]


def fuser_backward(
    module: FusibleOperationLike, basic_op_ctxs: Sequence[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Sequence[Iterable[Any]]
) -> tuple[Any, list[list[Any]], list[tuple[Any, ...]]]:
    """``(gradient of the input, of each operation's parameters, of its extra inputs)``, of what forward
    left in the contexts."""
    ops, contexts = [], []
    for ctx in basic_op_ctxs:
        assert ctx._op is not None and ctx._tensors is not None, "a backward without a forward"
        ops.append(ctx._op)
        contexts.append(ctx._tensors)
        ctx._let_go()
    sides = []
    for op, outer, values in zip(ops, outer_sides(ops)[1], basic_op_grad_extra_outputs, strict=True):
        names = [next((name for name in route if name in outer), "") for route in op.routes]
        sides.append({name: make_nvte_tensor(grad) for name, grad in zip(names, values, strict=False) if name and grad is not None})
    dx, grads, found = run_ops_backward(ops, contexts, wrapped(grad_output, ops[-1].dy_dtype), sides, _call_inputs(basic_op_ctxs))
    extra = [tuple(_data(values.get(name)) for name in op.side_inputs) for op, values in zip(ops, found, strict=True)]
    return _data(dx), [[_data(grad) for grad in of_op] for of_op in grads], extra


def _resolved(module: FusibleOperationLike, ctxs: Sequence[OperationContext], x: Any, extra: Sequence[tuple[Any, ...]]) -> list[Op]:
    if any(ctx._op is None for ctx in ctxs):
        for ctx, op in zip(ctxs, module._fuser().resolved(x, [value for values in extra for value in values if value is not None]), strict=True):
            ctx._op = op
    ops = [ctx._op for ctx in ctxs if ctx._op is not None]
    for op, ctx in zip(ops, ctxs, strict=True):
        if op.call_inputs and not ctx._call_inputs:
            of, wanted = f"{op!r} outside of a pipeline", f"nothing but its input (it takes {', '.join(op.call_inputs)})"
            raise ArgumentError(expected(wanted, of=of, got="a call of its own", do="call it in a Sequential, or by a fused operation in one"))
    return ops


def _named(module: FusibleOperationLike, op: Op, outer: Sequence[str], values: tuple[Any, ...]) -> dict[str, Tensor]:
    there = {name: value for name, value in zip(op.side_inputs, values, strict=False) if value is not None}
    if len(values) != len(op.side_inputs) or not set(outer) <= there.keys():
        of, do = f"{op!r} in {type(module).__name__}.fuser_forward", "give them as basic_op_extra_inputs"
        raise ArgumentError(expected(f"{len(op.side_inputs)} extra inputs", of=of, got=len(there), do=do))
    return {name: make_nvte_tensor(there[name]) for name in outer}


def _call_inputs(ctxs: Sequence[OperationContext]) -> dict[str, Any]:
    return {name: value for ctx in ctxs for name, value in ctx._call_inputs.items()}


def _first(values: dict[str, Tensor], route: Sequence[str]) -> Any:
    return next((values[name].data for name in route if name in values), None)


def _data(tensor: Tensor | None) -> Any:
    return None if tensor is None else nvte.unpadded(tensor).data
