"""``PipelineRunner``: from a module call to a plan and its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch

from fusible import nvte
from fusible.compute_pipeline import (
    ComputePipeline,
    Plan,
    PlanRequest,
    describe,
    describe_messages,
    fusion_epoch,
    route,
    sharded_rows,
)
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.ops.protocols import AttentionOperands
from fusible.pytorch.engine.arrival import arrived
from fusible.pytorch.engine.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.engine.batch import Batch, read_batch
from fusible.pytorch.engine.bound import BoundOp, changes
from fusible.pytorch.engine.call import Call, PipelineFunction, infer
from fusible.pytorch.engine.call_inputs import NO_CALL_INPUTS, CallInputs, call_input_values, of_mask, of_tokens
from fusible.pytorch.engine.chain import ChainCall, ChainPart, check_extra_inputs
from fusible.pytorch.engine.executors import make_executor
from fusible.pytorch.engine.fast_path import FastPathCall, infer_fast_path
from fusible.pytorch.engine.kv_cache import KVCache, check_cache
from fusible.pytorch.engine.main_grads import MainGrad, is_first_microbatch
from fusible.pytorch.engine.parametrized import is_missing, lacks_parameter, originals, parameter_of, tensors_of
from fusible.pytorch.engine.plan_key import PlanKey
from fusible.pytorch.engine.program import Describing, Executor
from fusible.pytorch.engine.refusals import check_dense, check_transforms, refuse, title_of, transforms_active
from fusible.pytorch.engine.repetition import current_repetition
from fusible.pytorch.engine.scaling import ScalingOwner, Snapshot
from fusible.pytorch.engine.sequence_parallel import mark
from fusible.pytorch.engine.shares import Share, gradient_sums, localized
from fusible.pytorch.engine.torch_autocast import activation_of, is_in_force_on, without_torch_autocast
from fusible.pytorch.engine.weights import PLAIN, DelayedWeights, QuantizedWeights, stored_key, stored_type
from fusible.quantized import QuantizedTensor, Recipe

__all__ = ["NOT_CALLED", "PipelineRunner"]

NOT_CALLED: frozenset[int] = frozenset()
"""For a call that gives its ops nothing but tensors."""

_ACTIVATIONS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class PipelineRunner(ChainPart):
    """Runs a list of ops on torch tensors, owns their scaling state, and hands parameters in at each call."""

    clears_padding = True
    batched = True
    """Whether an input is read as a batch of sequences (``read_batch``)."""
    sequenced = False
    """Whether a runner that is not ``batched`` reads an input as a batch all the same, because one of its ops looks at sequences."""
    argument = "x"
    """The name of the input in errors: that of the modules' parameter."""
    aside: ReferenceType[Any] | None = None
    """The module that set this runner aside when its children changed. Where they change back, ``arrange`` takes the runner back with its scales."""

    def __init__(self, bound: Sequence[BoundOp], executor: str = "eager") -> None:
        self.executor: Executor = make_executor(executor)
        self._weights = QuantizedWeights()
        self._context = OUTSIDE
        self._seen = changes()
        self._take(tuple(bound))
        self.scaling = ScalingOwner(self.pipeline.state)

    def _take(self, entries: tuple[BoundOp, ...]) -> None:
        """Run these ops from now on. ``bound`` are the same ops with their side values routed; ``sides`` and ``outputs`` name the side values that
        come from the caller, and that go to it. Raises ``ArgumentError`` for channels that do not match, and changes nothing then."""
        routing = route([(b.op, b.extras, b.block) for b in entries])
        self.sides, self.outputs = routing.inputs, routing.outputs
        self._entries = entries
        self.bound = tuple(b if b.op is op else b._replace(op=op) for b, op in zip(entries, routing.ops, strict=True))
        self.pipeline = ComputePipeline([b.op for b in self.bound])
        self._slots = tuple((tensors_of(b.module, name), name) for b in self.bound for name in b.parameters)
        self._modules = tuple(b.module for b in self.bound)
        spans = zip(self.bound, sharded_rows([b.op for b in self.bound]), strict=True)
        self._partial = [
            (b.module, name, span.group) for b, span in spans if span is not None for name in b.parameters if name not in _shares(b.module)
        ]
        self._owners = [(b.module, name) for b in self.bound for name in b.parameters]
        self._shares = _shares_of(self._owners)
        self._amax_group = next((b.module.amax_group for b in self.bound if getattr(b.module, "amax_group", None) is not None), None)
        self._accumulating = [i for i, (module, name) in enumerate(self._owners) if name in getattr(module, "accumulating_parameters", ())]
        self._keep_padding = frozenset(name for op in self.pipeline.ops if op.sides_keep_padding for name in op.side_inputs)
        named = [dict(zip(op.side_names, op.side_inputs, strict=True)) for op in self.pipeline.ops if isinstance(op, AttentionOperands)]
        self._masks = {names["mask"]: "kv" not in names for names in named if "mask" in names}
        """By the name of a mask that comes from the caller: whether its keys are those of x."""
        self._plans: dict[PlanKey, Plan] = {}
        self._own_passes = tuple(found for i, b in enumerate(self.bound) for found in b.module.local_passes(i))

    def look_again(self) -> None:
        """Use the ops that modules have made anew since the last call. The scaling state stays, unless the new ops quantize other tensors."""
        if self._seen == changes():
            return
        seen = changes()
        entries = tuple(b.now() for b in self._entries)
        if any(now is not then for now, then in zip(entries, self._entries, strict=True)):
            self._take(entries)
            if self.scaling.layout != self.pipeline.state:
                self.scaling = ScalingOwner(self.pipeline.state)
        self._seen = seen

    def __call__(
        self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None, extra_inputs: Sequence[torch.Tensor] = ()
    ) -> Any:
        """``x`` in one of the three forms of ``read_batch``; the result has the same form. ``cache``: what comes before each sequence of ``x``.
        ``extra_inputs``: of its operations in order, but for those that a channel feeds. Returns ``y``, or a tuple of it and the extra outputs."""
        self.check_extra_inputs(extra_inputs)
        try:
            outputs = self._run_batch(read_batch(x, seq_lens, cache is not None), x.shape, extra_inputs, {}, cache)
        except Exception as error:
            self.refuse(error, x, extra_inputs)
            raise
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, call.seq_lens, call.cache, extra)

    @property
    def public_extra_inputs(self) -> int:
        self.look_again()
        return len(self.sides)

    def check_extra_inputs(self, extra_inputs: Sequence[Any]) -> None:
        """Raise ``ArgumentError`` for another number of them than a call takes."""
        if len(extra_inputs) != self.public_extra_inputs:
            check_extra_inputs(len(self.sides), len(extra_inputs), self.title)

    def _run_batch(
        self, batch: Batch, shape: torch.Size, extra: Sequence[torch.Tensor], call_state: dict[Any, Any], cache: KVCache | None
    ) -> Sequence[torch.Tensor]:
        """``run`` of the tokens of a batch that came in ``shape``. Extra tensors with a row for each row of the input have the batch's form too."""
        if cache is not None:
            check_cache(cache)
        y, *outputs = self.run(batch.x, self.rows_of(extra, batch, shape, cache), call_state, batch, cache)
        if not outputs:
            return (batch.restore(y),)
        rows = batch.x.shape[:1]
        return batch.restore(y), *(batch.restore(value) if value.shape[:-1] == rows else value for value in outputs)

    @property
    def has_own_rows(self) -> bool:
        """Whether every side value is a tensor of its own, and has no row for each row of the input."""
        return self._keep_padding.issuperset(self.sides)

    def rows_of(self, extra: Sequence[torch.Tensor], batch: Batch, shape: torch.Size, cache: KVCache | None = None) -> list[torch.Tensor]:
        """The side values of a batch that came in ``shape``, as its pass takes them."""
        if not extra:
            return []
        if self._masks and batch.seq_lens is not None:
            self._check_masks(extra, batch, batch.max_seqlen if cache is None else _longest(cache, batch.seq_lens))
        values = [of_mask(value) if name in self._masks else value for name, value in zip(self.sides, extra, strict=True)]
        return [of_tokens(value, name in self._keep_padding, batch, shape) for name, value in zip(self.sides, values, strict=True)]

    def _check_masks(self, extra: Sequence[torch.Tensor], batch: Batch, keys: int) -> None:
        """Raise ``ShapeError`` for a mask with fewer queries, or keys of x's own, than the longest sequence has: a compiled program serves many
        lengths, and cannot say so. ``keys``: those of the longest, with what a cache has of it."""
        queries = batch.max_seqlen
        for name, value in zip(self.sides, extra, strict=True):
            of_own = self._masks.get(name)
            sizes = () if of_own is None or value.ndim != 4 else value.shape[2:] if of_own else value.shape[2:3]
            if any(1 < size < wanted for size, wanted in zip(sizes, (queries, keys), strict=False)):
                several = f"{queries} queries" + ("" if not of_own else " and keys" if keys == queries else f" and {keys} keys")
                of, do = f"the mask of {self.title}", "pass one for the longest sequence"
                raise ShapeError(expected(f"{several}, or 1", of=of, got=list(value.shape), do=do))

    def run(
        self,
        x: torch.Tensor,
        extra: Sequence[torch.Tensor],
        call_state: dict[Any, Any],
        batch: Batch | None = None,
        cache: KVCache | None = None,
    ) -> Sequence[torch.Tensor]:
        """y and the side values ``outputs`` for ``x [*, width]`` and the side values ``sides``. ``call_state``: of ``Call``. ``batch``: how the rows
        of ``x`` are sequences, for ops that look at it."""
        if transforms_active():
            check_transforms(self.called, (x, *extra))
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        elif x.__class__ is not torch.Tensor:
            x = arrived(x)
        if is_in_force_on(x):
            x = activation_of(x)
            with without_torch_autocast(x.device.type):
                return self.run(x, extra, call_state, batch, cache)
        if x.layout is not torch.strided:
            check_dense(x, f"{self.argument} of {self.title}")
        if extra:
            extra = [value.dequantize() if isinstance(value, QuantizedTensor) else arrived(value) for value in extra]
            for place, value in enumerate(extra):
                if value.layout is not torch.strided:
                    check_dense(value, f"extra input {place} of {self.title}")
        repeated = torch._C._current_graph_task_id() != -1
        context = self._context_of_call(repeated)
        args = self.parameters()
        grad_enabled = torch.is_grad_enabled()
        with_grad = grad_enabled and True in [tensor.requires_grad for tensor in (x, *args, *extra)]
        plan = self.plan(x, args, context, with_grad, extra, frozenset([position for _, position in call_state]) if call_state else NOT_CALLED)
        if not with_grad and (cache is not None or not (grad_enabled and plan.state)):
            return self.infer(plan, context, x, args, batch, None, extra, call_state, cache)
        if cache is not None:
            got = "a call that records gradients"
            raise ArgumentError(expected("torch.no_grad()", of="a call with a cache", got=got, do="call the model inside it"))
        call = self.begin(plan, context, x, args, batch, None, call_state)
        y: Any = x
        for index, segment in enumerate(plan.segments):
            y = PipelineFunction.apply(call, index, y, *args[segment.args], *extra)
        self.commit(call)
        return y if isinstance(y, tuple) else (y,)

    def refuse(self, error: Exception, x: Any, extra: Sequence[Any]) -> None:
        """Raise a better error than ``error``, which a call with these arguments raised; or add to ``error`` in which modules it was."""
        for module, share in [(module, _shares(module).get(name) or Share.all_of(name)) for module, name in self._owners]:
            for name in share.names:
                if is_missing(module, name):
                    raise lacks_parameter(module, name) from error
        known = {type(module).__name__ for module in (*self._modules, *self.called)} | {"seq_lens", "cache", "KVCache"}
        masks = {place for place, name in enumerate(self.sides) if name in self._masks and getattr(extra[place], "dtype", None) is torch.bool}
        others = {f"extra input {place}": value for place, value in enumerate(extra) if place not in masks}
        refuse(error, known, self.title, {self.argument: x, **others})

    @property
    def title(self) -> str:
        """The names of the modules, for a sentence."""
        return title_of(self.called)

    @property
    def called(self) -> Sequence[Any]:
        """The modules as the caller knows them."""
        return self._modules

    def infer(
        self,
        plan: Plan,
        context: autocast,
        x: torch.Tensor,
        args: Sequence[torch.Tensor],
        batch: Batch | None,
        seed: torch.Tensor | None,
        extra: Sequence[torch.Tensor],
        call_state: dict[Any, Any],
        cache: KVCache | None = None,
    ) -> Sequence[torch.Tensor]:
        """``run`` without gradients. ``seed``: what was drawn for the call, if it has been."""
        call_inputs = CallInputs.of(call_input_values(plan, x, batch, seed)) if plan.call_inputs else NO_CALL_INPUTS
        self.before_forward(plan)
        if plan.fast_path and cache is None:
            return [infer_fast_path(plan, self.executor, x, args)]
        snapshot = self._snapshot(plan, context, x.device, inference=True)
        caches = self._caches(plan, batch, cache) if cache is not None else None
        params, _ = self._weights.prepare(plan, args, snapshot, self.executor)
        outputs, grown = infer(plan, self.executor, x, params, call_inputs, snapshot, caches, extra, call_state)
        if cache is not None and caches and grown:
            cache.replace(self, caches, grown)
        return outputs

    def begin(
        self,
        plan: Plan,
        context: autocast,
        x: torch.Tensor,
        args: Sequence[torch.Tensor],
        batch: Batch | None,
        seed: torch.Tensor | None,
        call_state: dict[Any, Any],
    ) -> Call | FastPathCall:
        """A call whose segments are yet to be run, and whose amaxes are observed: one that records gradients, or, where gradients are enabled and
        nothing wants one, one under delayed scaling, so that a frozen backbone has scales too. ``seed``: of ``infer``."""
        call_inputs = CallInputs.of(call_input_values(plan, x, batch, seed)) if plan.call_inputs else NO_CALL_INPUTS
        self.before_forward(plan)
        for module, name, group in self._partial:  # each time: a module may have another parameter by now
            for parameter in originals(module, name):
                mark(parameter, group)
        accumulating = self.accumulating(args)
        first = is_first_microbatch()
        if plan.fast_path and not accumulating and not first:
            return FastPathCall(plan, args, self.executor)
        snapshot = self._snapshot(plan, context, x.device, repeated=torch._C._current_graph_task_id() != -1)
        params, amaxes = self._weights.prepare(plan, args, snapshot, self.executor)
        delayed = DelayedWeights.of(plan, args, x.device, context.amax_reduction_group or self._amax_group) if snapshot is not None else None
        if delayed is not None:
            amaxes |= delayed.amaxes()
        call = Call(plan, params, self.executor, call_inputs, self.scaling, snapshot, accumulating, amaxes, call_state=call_state)
        call.delayed_weights, call.first_microbatch = delayed, first
        return call

    def commit(self, call: Call | FastPathCall) -> None:
        """All segments of a call have been run: what they saw is observed."""
        if isinstance(call, Call) and call.snapshot is not None and not call.snapshot.repeated:
            self.scaling.commit_forward(call.snapshot, call.amaxes, recorded=bool(call.plan.backward))
            if call.delayed_weights is not None:
                call.delayed_weights.update_scales(self.scaling)

    def before_forward(self, plan: Plan) -> None:
        """Called when a plan is about to run."""

    def fused(self, recipe: Recipe | None, called: frozenset[int] = NOT_CALLED) -> tuple[tuple[int, int, Any], ...]:
        """The stretches of ops that the caller has fused itself, or written in torch (``PlanRequest.fused``). ``called``: the positions of ops that
        are called by themselves, as the call gives them more than tensors."""
        return self._own_passes

    def uncompilable(self, recipe: Recipe | None) -> str:
        """The names of the ops and fusions that no compiler sees through, as they are plain torch or have effects; empty where there are none."""
        called = [repr(b.op) for b in self.bound if b.op.direct_only]
        return ", ".join(dict.fromkeys([*called, *(fusion.name for _, _, fusion in self.fused(recipe) if fusion.opaque)]))

    def _caches(self, plan: Plan, batch: Batch | None, cache: KVCache) -> dict[int, nvte.KVCache] | None:
        """The caches of the plan's ops, with room for the batch. Raises ``ArgumentError`` for attention that cannot go on from one."""
        if plan.uncached is not None:
            do = "call it on whole sequences"
            raise ArgumentError(expected("causal attention", of="a call with a cache", got=repr(plan.uncached), do=do))
        if batch is not None and batch.x.device != cache.device:
            got = f"one on {cache.device}"
            raise ArgumentError(expected(f"a KVCache on {batch.x.device}, where x is", of="a call with a cache", got=got, do="make it there"))
        return cache.layers(self, plan, batch.seq_lens) if plan.caches and batch is not None and batch.seq_lens is not None else None

    def _context_of_call(self, repeated: bool) -> autocast:
        """The ``autocast`` in force. Activation checkpointing repeats a forward from within backward, mostly outside: then the latest call's."""
        context = current_autocast()
        if repeated and context is OUTSIDE:
            return self._context
        self._context = context
        return context

    def plan(
        self,
        x: torch.Tensor,
        args: Sequence[torch.Tensor],
        context: autocast,
        with_grad: bool,
        extra: Sequence[torch.Tensor] = (),
        called: frozenset[int] = NOT_CALLED,
    ) -> Plan:
        """The plan for an input ``[*, width]``. ``called``: of ``fused``. Raises before anything is run where the input does not fit the modules."""
        key = tuple.__new__(
            PlanKey,
            (
                context.recipe,
                x.dtype,
                x.shape[-1],
                x.device,
                with_grad and x.requires_grad,
                tuple([(arg.dtype if arg.__class__ in PLAIN else stored_key(arg), with_grad and arg.requires_grad) for arg in args]),
                args[0].device if args else None,
                tuple([module.training for module in self._modules]),
                self.executor.whole,
                fusion_epoch(),
                tuple([with_grad and value.requires_grad for value in extra]) if extra else (),
                self.fused(context.recipe, called),
            ),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self.pipeline.plan(self._request(key, args))
        return plan

    def _request(self, key: PlanKey, args: Sequence[torch.Tensor]) -> PlanRequest:
        """The request for a plan of this key. Raises where the input does not fit the modules."""
        if key.x_dtype not in _ACTIVATIONS:
            got = str(key.x_dtype).removeprefix("torch.")
            raise DTypeError(expected("fp32, fp16, bf16 or fp64", of=f"{self.argument} of {self.title}", got=got, do="cast it"))
        for arg in args:
            if arg.device != key.x_device:
                wanted, of = f"a tensor on {arg.device}, where the parameters are", f"{self.argument} of {self.title}"
                raise ArgumentError(expected(wanted, of=of, got=str(key.x_device), do="move one of them"))
        self._check_double(key.x_dtype, args)
        types = iter([(stored_type(arg), grad) for arg, (_, grad) in zip(args, key.args, strict=True)])
        return key.request(tuple(tuple(next(types) for _ in b.parameters) for b in self.bound), self.sides, self.outputs)

    def _check_double(self, dtype: torch.dtype, args: Sequence[torch.Tensor]) -> None:
        """Raise ``DTypeError`` where fp64 stands beside another dtype: rounded to it, it would be in vain."""
        double = dtype is torch.float64
        odd = next((arg.dtype for arg in args if (arg.dtype is torch.float64) is not double), None)
        if odd is not None:
            beside = f"no fp64 beside {str(dtype).removeprefix('torch.')}, that of {self.argument}"
            got, do = str(odd).removeprefix("torch."), f"cast {self.argument}, or call .double() or .float() of the modules"
            raise DTypeError(expected("fp64" if double else beside, of=f"the parameters of {self.title}", got=got if double else "fp64", do=do))

    def explain(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> str:
        """The three passes of the plan that a training call on ``x`` would use, as text; of a compiling executor what its programs call, too."""
        batch = read_batch(x, seq_lens)
        args = self.parameters()
        plan = self.plan(batch.x, args, current_autocast(), True, [batch.x] * len(self.sides))
        compiled = self.executor.describe() if isinstance(self.executor, Describing) else []
        return "\n".join([describe(plan), *describe_messages(plan, len(batch.x)), *self._describe_sums(plan), *compiled])

    def _describe_sums(self, plan: Plan) -> list[str]:
        """The lines of what is summed over the processes when the gradients are there."""
        if self._shares is None:
            return []
        found = gradient_sums(self._shares, [grad for args in plan.request.args for _, grad in args])
        return ["", "between processes, gradients", *(f"  all_reduce  {names}  {nbytes:,} bytes" for names, nbytes in found)] if found else []

    def out_width(self, width: int) -> int | None:
        """The width of the output for an input of ``width`` columns; None where it is not known before a call."""
        result: int | None = width
        for op in self.pipeline.ops:
            result = op.width(result)
        return result

    @property
    def divided(self) -> bool:
        """Whether some of its parameters are shares of this process."""
        return self._shares is not None

    def parameters(self) -> list[torch.Tensor]:
        """The tensors behind the ops' ``args``, as the modules hold them now. Every call begins with it."""
        self.look_again()
        if self._shares is not None:
            return localized(self._shares)
        try:
            return [parameters[name] for parameters, name in self._slots]  # pyright: ignore[reportReturnType]
        except KeyError:
            return [parameter_of(module, name) for module, name in self._owners]

    def registered(self) -> list[torch.Tensor | None]:
        """``parameters``, with None for one that ``torch.nn.utils.parametrize`` computes: nothing is computed here."""
        self.look_again()
        return [parameters.get(name) for parameters, name in self._slots]

    def release_weights(self) -> None:
        """Let go of what was made of the parameters as they are."""
        self._weights = QuantizedWeights()

    def accumulating(self, args: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """By their places the parameters that want a gradient and have a ``main_grad`` for it, which is checked."""
        found = {place: arg for place in self._accumulating if (arg := args[place]) is not None and arg.requires_grad}
        return {place: arg for place, arg in found.items() if MainGrad.of(arg) is not None}

    def _snapshot(self, plan: Plan, context: autocast, device: torch.device, **kind: bool) -> Snapshot | None:
        if plan.delayed is None or not plan.state:
            return None
        make = partial(self.scaling.snapshot, plan.delayed, device, context.amax_reduction_group or self._amax_group, **kind)
        repetition = current_repetition()
        return make() if repetition is None else repetition(self.scaling, make)


def _shares(module: Any) -> Mapping[str, Share]:
    return getattr(module, "shares", {})


def _shares_of(owners: Sequence[tuple[Any, str]]) -> tuple[tuple[Any, Share], ...] | None:
    """For each of a pipeline's parameters how its module holds it; None where every module holds all that its ops take."""
    if not any(name in _shares(module) for module, name in owners):
        return None
    return tuple((module, _shares(module).get(name) or Share.all_of(name)) for module, name in owners)


def _longest(cache: KVCache, seq_lens: torch.Tensor) -> int:
    """The tokens of the longest sequence of ``cache`` once it has ``seq_lens`` further ones."""
    return max((length + count for length, count in zip(cache.lengths, seq_lens.tolist(), strict=False)), default=0)
