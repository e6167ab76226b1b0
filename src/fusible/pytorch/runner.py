"""``PipelineRunner``: from a module call to a plan and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusible import nvte
from fusible.compute_pipeline import ComputePipeline, Plan, PlanRequest, describe, fusion_epoch
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.nvte import DType, Tensor, nvte_dtype
from fusible.ops import Op
from fusible.pytorch.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.batch import Batch, read_batch
from fusible.pytorch.call import NOTHING_GIVEN, Call, Given, PipelineFunction, infer
from fusible.pytorch.executors import Executor, make_executor
from fusible.pytorch.kv_cache import KVCache
from fusible.pytorch.scaling import ScalingOwner, Snapshot
from fusible.pytorch.weights import QuantizedWeights, held_type

__all__ = ["BoundOp", "PipelineRunner"]

_ACTIVATIONS = frozenset({torch.float32, torch.float16, torch.bfloat16})


class BoundOp(NamedTuple):
    """An op, the module that it belongs to, and the module's names of the parameters behind ``op.args``."""

    op: Op
    module: torch.nn.Module
    parameters: tuple[str, ...]


class PipelineRunner:
    """Runs a list of ops on torch tensors, owns their scaling state, and hands parameters in at each call."""

    def __init__(self, bound: Sequence[BoundOp], executor: str = "eager") -> None:
        self.bound = tuple(bound)
        self.pipeline = ComputePipeline([b.op for b in bound])
        self.scaling = ScalingOwner(self.pipeline.state)
        self.executor: Executor = make_executor(executor)
        self._slots = tuple((module._parameters, name) for _, module, names in self.bound for name in names)
        self._modules = tuple(b.module for b in self.bound)
        owners = [(b.module, name) for b in self.bound for name in b.parameters]
        self._accumulating = [i for i, (module, name) in enumerate(owners) if name in getattr(module, "accumulating_parameters", ())]
        self._weights = QuantizedWeights()
        self._plans: dict[Any, Plan] = {}
        self._context = OUTSIDE

    def __call__(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None) -> torch.Tensor:
        """``x`` in one of the three forms of ``read_batch``; the result has the same form. ``cache``: what comes before each sequence of ``x``."""
        batch = read_batch(x, seq_lens, cache is not None)
        repeated = torch._C._current_graph_task_id() != -1
        context = self._context_of_call(repeated)
        args = self._parameters()
        with_grad = torch.is_grad_enabled() and (batch.x.requires_grad or any(arg.requires_grad for arg in args))
        plan = self.plan(batch.x, args, context, with_grad)
        given = Given.of(_given(plan, batch)) if plan.given else NOTHING_GIVEN
        if not with_grad:
            snapshot = self._snapshot(plan, context, batch.x.device, inference=True)
            caches = self._caches(plan, batch, cache) if cache is not None else None
            params, _ = self._weights.prepare(plan, args, snapshot, self.executor)
            return batch.restore(infer(plan, self.executor, batch.x, params, given, snapshot, caches))
        if cache is not None:
            got = "a call that records gradients"
            raise ArgumentError(expected("torch.no_grad()", of="a call with a cache", got=got, do="call the model inside it"))
        snapshot = self._snapshot(plan, context, batch.x.device, repeated=repeated)
        return batch.restore(self._train(plan, batch.x, args, given, snapshot))

    def _caches(self, plan: Plan, batch: Batch, cache: KVCache) -> dict[int, nvte.KVCache] | None:
        """The caches of the plan's ops, with room for the batch. Raises ``ArgumentError`` for attention that cannot go on from one."""
        if plan.uncached is not None:
            raise ArgumentError(expected("causal attention", of="a call with a cache", got=repr(plan.uncached), do="call it on whole sequences"))
        if plan.caches and not self.executor.in_place:
            wanted, got = "the executor 'eager' (others cannot write in place)", repr(self.executor.name)
            raise ArgumentError(expected(wanted, of="a call with a cache", got=got, do="compile no part of the model"))
        return cache.layers(self, plan, batch.seq_lens) if plan.caches and batch.seq_lens is not None else None

    def _context_of_call(self, repeated: bool) -> autocast:
        """The ``autocast`` in force. Activation checkpointing repeats a forward from within backward, mostly outside: then the latest call's."""
        context = current_autocast()
        if repeated and context is OUTSIDE:
            return self._context
        self._context = context
        return context

    def plan(self, x: torch.Tensor, args: Sequence[torch.Tensor], context: autocast, with_grad: bool) -> Plan:
        """The plan for an input ``[tokens, hidden]``. Raises before anything is run where the input does not fit the modules."""
        key = (
            context.recipe,
            x.dtype,
            x.shape[-1],
            x.device,
            with_grad and x.requires_grad,
            tuple([(held_type(arg), with_grad and arg.requires_grad) for arg in args]),
            args[0].device if args else None,
            tuple([module.training for module in self._modules]),
            self.executor.whole,
            fusion_epoch(),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self.pipeline.plan(self._request(x, args, *key))
        return plan

    def _request(
        self, x: torch.Tensor, args: Sequence[torch.Tensor], recipe: Any, dtype: Any, width: int, device: Any, x_grad: bool,
        signatures: Any, _: Any, training: tuple[bool, ...], whole: bool, fusions: int,
    ) -> PlanRequest:  # fmt: skip
        if dtype not in _ACTIVATIONS:
            raise DTypeError(expected("fp32, fp16 or bf16", of="a module's input", got=str(dtype).removeprefix("torch."), do="cast it"))
        for arg in args:
            if arg.device != device:
                raise ArgumentError(
                    expected(f"a tensor on {arg.device}, where the parameters are", of="a module's input", got=str(device), do="move one of them")
                )
        types = iter(signatures)
        arg_types = tuple(tuple(next(types) for _ in b.parameters) for b in self.bound)
        return PlanRequest(recipe, nvte_dtype(dtype), width, x_grad, arg_types, training, whole, fusions)

    def explain(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> str:
        """The three passes of the plan that a training call on ``x`` would use, as text."""
        batch = read_batch(x, seq_lens)
        return describe(self.plan(batch.x, self._parameters(), current_autocast(), with_grad=True))

    def out_width(self, width: int) -> int:
        """The width of the output for an input of ``width`` columns."""
        for op in self.pipeline.ops:
            width = op.width(width)
        return width

    def _parameters(self) -> list[torch.Tensor]:
        return [parameters[name] for parameters, name in self._slots]  # pyright: ignore[reportReturnType]

    def _main_grads(self, args: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Where the gradients of parameters are to be added up, by their places."""
        found = {place: getattr(args[place], "main_grad", None) for place in self._accumulating if args[place].requires_grad}
        return {place: main_grad for place, main_grad in found.items() if main_grad is not None}

    def _snapshot(self, plan: Plan, context: autocast, device: torch.device, **kind: bool) -> Snapshot | None:
        if not plan.state:
            return None
        return self.scaling.snapshot(context.recipe, device, context.amax_reduction_group, **kind)  # pyright: ignore[reportArgumentType]

    def _train(self, plan: Plan, x: torch.Tensor, args: Sequence[torch.Tensor], given: Given, snapshot: Snapshot | None) -> torch.Tensor:
        params, amaxes = self._weights.prepare(plan, args, snapshot, self.executor)
        call = Call(plan, params, self.executor, given, self.scaling, snapshot, self._main_grads(args), amaxes)
        for index, segment in enumerate(plan.segments):
            x = PipelineFunction.apply(call, index, x, *args[segment.args])  # pyright: ignore[reportAssignmentType]
        if snapshot is not None:
            self.scaling.commit_forward(snapshot, call.amaxes)
        return x


def _given(plan: Plan, batch: Batch) -> dict[str, Any]:
    """The values of the whole call that the plan's ops take: ``seed`` is drawn from torch's default generator."""
    given: dict[str, Any] = {}
    if "sequences" in plan.given:
        given["sequences"] = batch.sequences()
    if "seed" in plan.given:
        given["seed"] = Tensor(torch.randint(2**62, (1,)).to(batch.x.device), DType.Int64)
    return given
