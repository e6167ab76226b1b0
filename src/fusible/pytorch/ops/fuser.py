"""``OperationFuser``: a list of operations as one pipeline, with the tensors that pass beside its input."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fusible.compute_pipeline import Plan, describe, describe_misses, describe_quantizers, fusion_epoch, group_ops
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.fusions import Fusion, registered
from fusible.nvte import PassKind, Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.engine.autocast import autocast, current_autocast
from fusible.pytorch.engine.batch import read_batch
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.runner import NOT_CALLED, PipelineRunner
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.ops.fused_names import by_name
from fusible.pytorch.ops.keywords import Passes, check_keywords, passes_with_keywords
from fusible.pytorch.ops.op import BasicOperation, FusedOperation, FusibleOperation, runs_operations
from fusible.pytorch.ops.ran_in import RanIn
from fusible.pytorch.ops.registration import Kind, fusions, registration_epoch
from fusible.pytorch.ops.torch_operation import pass_of
from fusible.quantized import Recipe
from fusible.tex.calls.argument_kinds import shown

__all__ = ["OperationFuser"]


_MULTIPLES = 128
"""The multiples of a width that are tried: two interleaved blocks of a gated activation have 64 columns."""


@runs_operations
class OperationFuser(PipelineRunner):
    """Runs operations as one pipeline: the plans, the autograd node and the scaling state are those of ``fusible.Sequential``.

    ``fuser(x, *extra_inputs, basic_op_kwargs=None, seq_lens=None, cache=None)``: the extra inputs of all its operations in order, but for those that
    a channel feeds; for each basic operation a dict of keyword arguments for its ``op_forward``; and what ``read_batch`` takes, for attention.
    Returns ``y``, or a tuple of it and the extra outputs. Raises ``ArgumentError`` for channels that do not match, and for a wrong number of extra
    inputs.
    """

    batched = False
    argument = "input"

    def __init__(self, ops: Sequence[BaseModule], *, executor: str = "eager", blocks: Sequence[tuple[int, ...]] | None = None) -> None:
        """``blocks``: of each of ``ops`` the containers in which it stands, as of ``BoundOp``; by default all are in one."""
        placed = list(zip(ops, blocks if blocks is not None else [()] * len(ops), strict=True))
        parts = [(part, block) for op, block in placed for part in _operations(op)]
        self.operations = tuple(part for part, _ in parts)
        self._called = tuple(_as_called(op) for op in self.operations)
        self.basic_ops = tuple(basic for op in self.operations for basic in op.basic_operations())
        super().__init__([basic.bound_op.within(block) for part, block in parts for basic in part.basic_operations()], executor)
        own = FusibleOperation.pre_fuser_forward
        self._prepared = [(i, op) for i, op in enumerate(self.basic_ops) if type(op).pre_fuser_forward is not own]
        self._first = True
        self._own_ref = weakref.ref(self)

    def _take(self, entries: tuple[BoundOp, ...]) -> None:
        super()._take(entries)
        self.sequenced = any("sequences" in b.op.call_inputs for b in self.bound)
        self._fused: tuple[tuple[Any, ...], dict[frozenset[int], Passes]] | None = None

    @property
    def called(self) -> Sequence[Any]:
        return self._called

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The operations that the latest call's forward was fused to, each with the positions of its basic operations. NVIDIA's examples read this
        attribute."""
        return self._fused_groups("forward")

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """As ``_forward_ops``, in the order of the operations."""
        return self._fused_groups("backward")

    def _fused_groups(self, kind: Kind) -> list[tuple[FusibleOperation, list[int]]]:
        placed, position = [], 0
        for op in by_name(kind, _registered(self.operations, self._context.recipe)[kind == "backward"]):
            stop = position + len(list(op.basic_operations()))
            placed.append((op, list(range(position, stop))))
            position = stop
        return placed

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None,
        seq_lens: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        self.check_extra_inputs(extra_inputs)
        if self._first:
            for op in self.basic_ops:
                op.pre_first_fuser_forward()
            self._first = False
        call_state: dict[Any, Any] = {}
        if basic_op_kwargs is not None:
            titles = [type(_as_called(op)).__name__ for op in self.basic_ops]
            check_keywords(basic_op_kwargs, self.basic_ops, titles, self.fused(current_autocast().recipe))
            call_state = {("kwargs", position): dict(kwargs) for position, kwargs in enumerate(basic_op_kwargs) if kwargs}
        try:
            if self.sequenced or seq_lens is not None or cache is not None:
                outputs = self._run_batch(read_batch(x, seq_lens, cache is not None), x.shape, extra_inputs, call_state, cache)
            else:
                outputs = self.run(x, extra_inputs, call_state)
        except Exception as error:
            self.refuse(error, x, extra_inputs)
            raise
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        each = [call.keywords.get(id(op), {}) for op in self.basic_ops] if call.keywords else None
        return self(x, *extra, basic_op_kwargs=each, seq_lens=call.seq_lens, cache=call.cache)

    def explain(self, x: torch.Tensor | None = None, recipe: Recipe | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a training call would do under a recipe: the fused passes with the type on every edge, the quantizers, what each registered fusion put
        together, and why others did not match.

        ``x``: an input like those to come; by default one of the type of the first parameter.
        """
        args, recipe = self.parameters(), None if recipe is None else recipe.immutable()
        if x is None:
            like = args[0] if args else torch.empty(0, device="cpu")
            x = torch.empty(0, self._width(), dtype=like.dtype, device=like.device, requires_grad=True)
        sides = [x] * len(self.sides)
        plan = self.plan(x, args, autocast(enabled=recipe is not None, recipe=recipe), True, sides)
        asked: list[str] = []
        _fuse(self.operations, self.pipeline.ops, recipe, asked.append)
        registered = ["\n".join(["registered fusions", *asked])] if asked else []
        return "\n\n".join([describe(plan), describe_quantizers(plan), *registered, describe_misses(plan)])

    def _width(self) -> int:
        """A width that all operations accept: that of the first parameter, or a multiple of it (a gated activation before it takes two halves, or two
        blocks)."""
        columns = next((arg.shape[-1] for op in self.pipeline.ops for arg in op.args), 1)
        for width in range(columns, _MULTIPLES * columns + 1, columns):
            try:
                self.out_width(width)
            except ShapeError:
                continue
            return width
        return columns

    def fused(self, recipe: Recipe | None, called: frozenset[int] = NOT_CALLED) -> Passes:
        """The stretches that registered fusions, and fused operations that the user has placed, cover under a recipe; and the operations ``called``
        by themselves, because the call gives them keywords."""
        seen = (recipe, registration_epoch(), fusion_epoch())
        known = self._fused  # read once: another thread may follow another recipe
        if known is None or known[0] != seen:
            for op in self.basic_ops:
                op.reset_recipe_state(recipe=recipe)
            known = self._fused = seen, {NOT_CALLED: _fuse(self.operations, self.pipeline.ops, recipe)}
        passes = known[1]
        if called not in passes:
            passes[called] = passes_with_keywords(called, self.basic_ops, passes[NOT_CALLED])
        return passes[called]

    def before_forward(self, plan: Plan) -> None:
        if plan.delayed is not None:
            for position, op in enumerate(self.basic_ops):
                vars(op)["_ran_in"] = RanIn(self._own_ref, position, plan.delayed)
        if self._prepared:
            for position, op in self._prepared:
                op.pre_fuser_forward(requires_grad=position >= plan.first_backward)

    def resolved(self, x: Any, extra: Sequence[torch.Tensor] = ()) -> list[Op]:
        """The ops of the operations as they are resolved for an input and extra inputs without neighbours, with their parameters."""
        args = self.parameters()
        plan = self.plan(x, args, self._context_of_call(False), torch.is_grad_enabled(), extra)
        params, _ = self._weights.prepare(plan, args, None, self.executor)
        values = iter([param if isinstance(param, Tensor) else make_nvte_tensor(param) for param in params])
        return [op.with_(**{name: next(values) for name in names}) for op, names in zip(plan.ops, plan.arg_names, strict=True)]


class _OpOf(BasicOperation):
    """One op of a module that is no operation itself, so that it can stand among operations."""

    def __init__(self, bound_op: BoundOp) -> None:
        super().__init__()
        self._of = bound_op

    @property
    def bound_op(self) -> BoundOp:
        return self._of

    def _get_name(self) -> str:
        return type(self._of.op).__name__


def _as_called(operation: FusibleOperation) -> BaseModule:
    """The module that a caller knows an operation as."""
    return operation.bound_op.module if isinstance(operation, _OpOf) else operation


def _operations(module: BaseModule) -> list[FusibleOperation]:
    return [module] if isinstance(module, FusibleOperation) else [_OpOf(bound_op) for bound_op in module.bound_ops()]


def _fuse(
    operations: Sequence[FusibleOperation], ops: Sequence[Op], recipe: Recipe | None, note: Callable[[str], Any] = str
) -> tuple[tuple[int, int, Fusion], ...]:
    """Joint fusions first, on the basic operations and those that the user has fused; forward and backward each go on from there. ``ops``: the
    basic operations' own. ``note`` gets a line for each fusion that is asked."""
    found: list[tuple[int, int, Fusion]] = []
    for backward, parts in enumerate(_registered(operations, recipe, note)):
        position = 0
        for op in parts:
            count = len(list(op.basic_operations()))
            if op.fuses[backward]:
                members = ops[position : position + count]
                kinds: tuple[PassKind, ...] = ("backward",) if backward else ("forward", "inference")
                for each in kinds:
                    found += [(position + start, position + stop, fusion) for start, stop, fusion in _steps(op, each, members, backward)]
            position += count
    return tuple(found)


def _registered(
    operations: Sequence[FusibleOperation], recipe: Recipe | None, note: Callable[[str], Any] = str
) -> tuple[list[FusibleOperation], list[FusibleOperation]]:
    """The operations after registered fusions and with those that the user has fused: for forward, and for backward."""
    start = [part for op in operations for part in ([op] if isinstance(op, FusedOperation) and any(op.fuses) else op.basic_operations())]
    joint = _applied("forward_backward", start, recipe, note)
    # What fuses the other pass alone is no operation in this one.
    forward, backward = (
        [part for op in joint for part in (op.basic_operations() if isinstance(op, FusedOperation) and not op.fuses[place] else [op])]
        for place in (0, 1)
    )
    return _applied("forward", forward, recipe, note), _applied("backward", backward, recipe, note)


def _steps(op: FusibleOperation, kind: PassKind, members: Sequence[Op], backward: int) -> list[tuple[int, int, Fusion]]:
    """The fusions by which an operation runs in a pass: its own code, or the engine's fused passes that it adapts, which can be replayed."""
    if isinstance(op, FusedOperation) and op.adapts[backward]:
        return [(group.start, group.stop, group.fusion) for group in group_ops(members, registered(kind)) if group.fusion is not None]
    return [(0, len(members), Fusion(kind, pass_of(op, kind, len(members)), ()))]


def _applied(kind: Kind, ops: Sequence[FusibleOperation], recipe: Recipe | None, note: Callable[[str], Any]) -> list[FusibleOperation]:
    now = list(ops)
    for function in fusions(kind):
        result = _operations_of(function(list(now), recipe=recipe), f"what the fusion {function.__qualname__} returns")
        basic = [id(part) for op in result for part in op.basic_operations()]
        if basic != [id(part) for op in now for part in op.basic_operations()]:
            of, do = f"what the fusion {function.__qualname__} returns", "put operations together, and leave none out"
            raise ArgumentError(expected("the basic operations that it was given, in their order", of=of, got="others", do=do))
        note(f"  {kind}: {function.__name__}: {_what_is_new(now, result)}")
        now = result
    return now


def _operations_of(result: Any, of: str) -> list[FusibleOperation]:
    """What a fusion function has returned, as a list. Raises ``ArgumentError`` for what is no list of operations; ``of``: in a sentence."""
    found = list(result) if isinstance(result, Iterable) else []
    others = [f"one with {shown(op)}" for op in found if not isinstance(op, FusibleOperation)]
    if others or not isinstance(result, Iterable):
        do = "return what it was given where there is nothing to put together"
        raise ArgumentError(expected("a list of operations", of=of, got=others[0] if others else shown(result), do=do))
    return found


def _what_is_new(before: Sequence[FusibleOperation], after: Sequence[FusibleOperation]) -> str:
    known, position, found = {id(op) for op in before}, 0, []
    for op in after:
        last = position + len(list(op.basic_operations())) - 1
        if id(op) not in known:
            found.append(f"{type(op).__name__} at {position}" + (f"-{last}" if last > position else ""))
        position = last + 1
    return ", ".join(found) or f"nothing among {', '.join(op._get_name() for op in before)}"
