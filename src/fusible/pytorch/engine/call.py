"""One call of a pipeline: the programs of its passes, and the autograd node of each segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusible import nvte
from fusible.compute_pipeline import Plan, Region, run_backward, run_forward, run_inference
from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.nvte import (
    KVCache,
    Leaf,
    QuantizedType,
    copy,
    dequantize,
    flatten,
    is_quantized_type,
    make_nvte_tensor,
    te_to_torch_dtype,
    unflatten,
)
from fusible.pytorch.engine.arrival import arrived
from fusible.pytorch.engine.borders import Border, OnTheWay, leaf_count, packed, spec_key
from fusible.pytorch.engine.call_inputs import CallInputs, unflatten_call_inputs
from fusible.pytorch.engine.executors import DIRECT
from fusible.pytorch.engine.main_grads import MainGrad, end_sums, first_microbatch, sums_so_far
from fusible.pytorch.engine.pass_tensors import Places, pack, places_of, unpack
from fusible.pytorch.engine.program import Executor
from fusible.pytorch.engine.scaling import ScalingOwner, Snapshot
from fusible.pytorch.engine.torch_autocast import is_in_force_on, without_torch_autocast
from fusible.pytorch.engine.weights import DelayedWeights
from fusible.quantized import QuantizedTensor
from fusible.tex.selection.scope import carried

__all__ = ["Call", "PipelineFunction", "infer"]

_AS_IT_IS = nullcontext()


def _flat(plan: Plan, args: Sequence[Any], where: slice = slice(None)) -> tuple[list[Any], list[Any]]:
    """Parameters taken apart; where the plan wants none in 8 bits they are still as the modules hold them."""
    return flatten(args[where]) if plan.quantized_args else (list(args[where]), plan.plain_args[where])


def _for(region: Region, executor: Executor) -> Executor:
    """Who runs a region."""
    return executor if region.called is None else DIRECT


def _left(sides: Mapping[str, Sequence[nvte.Tensor | None]]) -> list[tuple[str, nvte.Tensor | None]]:
    return [(name, value) for name, values in sides.items() for value in values]


def _note(amaxes: dict[str, torch.Tensor], observed: Mapping[str, torch.Tensor], region: Region) -> None:
    """Add what a region observed. As within one pass, what is called as it stands may quantize again what came to it in 8 bits, and nobody else."""
    if not amaxes.keys().isdisjoint(observed):
        twice = next(slot for slot in observed if slot in amaxes)
        if region.called is None:
            of, do = f"what is quantized by the scale {twice!r} in a pass", "hand on what was quantized, or do not quantize it"
            raise ArgumentError(expected("one tensor", of=of, got="another", do=do))
        observed = {slot: amax for slot, amax in observed.items() if slot not in amaxes}
    amaxes.update(observed)


def _read(snapshot: Snapshot | None, slots: Sequence[str]) -> dict[str, torch.Tensor]:
    return {slot: snapshot.scales[slot] for slot in slots} if snapshot is not None else {}


def _taken_from_end(saved: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The last ``count``, which are in the list no more."""
    begin = len(saved) - count
    own = saved[begin:]
    del saved[begin:]
    return own


class _ForwardStatic(NamedTuple):
    """What is known of a region's forward without running it: where its results are, what passes on, the slots whose amaxes it saw, per op the
    names of what it leaves for backward, and how that was taken apart."""

    places: Places
    sent: Border
    observed: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    spec: list[Leaf]


class _BackwardStatic(NamedTuple):
    """The same of a backward. ``there``: for each parameter, whether it has a gradient."""

    places: Places
    sent: Border
    observed: tuple[str, ...]
    there: tuple[bool, ...]


@dataclass(eq=False)
class Call:
    """A training call: what its segments share, and what they leave. ``args``: the parameters, by ``QuantizedWeights.prepare``."""

    plan: Plan
    args: Sequence[Any]
    executor: Executor
    call_inputs: CallInputs
    owner: ScalingOwner
    snapshot: Snapshot | None
    accumulating: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """By their places the parameters whose gradients go to their ``main_grad``."""
    amaxes: dict[str, torch.Tensor] = field(default_factory=dict)
    contexts: dict[int, Any] = field(default_factory=dict)
    call_state: dict[Any, Any] = field(default_factory=dict)
    """What ops leave for their backward beside tensors (``nvte.Pass.call``)."""
    delayed_weights: DelayedWeights | None = None
    first_microbatch: bool = False
    """Whether ``main_grads.first_microbatch`` was open in forward. It is open in backward, too, for operations that leave products for later."""

    def forward(self, index: int, x: torch.Tensor, extra: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run the forward of a segment: ``y``, the side values that the caller gets, and the tensors to save for its backward."""
        plan, segment = self.plan, self.plan.segments[index]
        way = OnTheWay(x, [name for name, _ in plan.request.sides], extra)
        keys: list[tuple[str, ...]] = []
        spec: list[Leaf] = []
        saved: list[torch.Tensor] = []
        amaxes: dict[str, torch.Tensor] = {}
        for region in segment.forward:
            of_ops, of_tensors, tensors = self._forward(region, way, amaxes)
            keys += of_ops
            spec += of_tensors
            saved += tensors
        self.amaxes.update(amaxes)
        self.contexts[index] = (keys, spec)
        return _result(way, plan), _outputs(way, plan), saved

    def _forward(
        self, region: Region, way: OnTheWay, amaxes: dict[str, torch.Tensor]
    ) -> tuple[tuple[tuple[str, ...], ...], list[Leaf], list[torch.Tensor]]:
        """Run the forward of a region: per op the names of what it leaves for backward, how that was taken apart, and the tensors."""
        plan = self.plan
        scales = _read(self.snapshot, region.scales)
        names, key, slots = region.call_inputs, self.call_inputs.key(region.call_inputs), tuple(scales)
        args, arg_spec = _flat(plan, self.args, region.args)
        taken, border = way.into(region)
        call_state = self.call_state
        inputs, sizes = pack(taken, args=args, call_inputs=self.call_inputs.leaves(names), scaling=[*scales.values()])

        def program(leaves: list[Any]) -> tuple[list[Any], _ForwardStatic]:
            came = unpack(leaves, sizes)
            values = unflatten_call_inputs(names, key, came.call_inputs)
            scales = dict(zip(slots, came.scaling, strict=True))
            x, *sides = border.opened(came.passing)
            assert x is not None
            result = run_forward(plan, region, x, unflatten(came.args, arg_spec), values, scales, sides, call_state)
            passed, sent = packed(result.y, _left(result.sides))
            saved, spec = flatten([tensor for ctx in result.contexts for tensor in ctx.values()])
            results, sizes_out = pack(passed, saved=saved, scaling=[*result.amaxes.values()])
            return results, _ForwardStatic(places_of(sizes_out), sent, tuple(result.amaxes), tuple(tuple(ctx) for ctx in result.contexts), spec)

        program_key = (region, "forward", key, border.key(taken))
        outputs, known = _for(region, self.executor)(program_key, program, inputs)
        if known.observed:
            _note(amaxes, dict(zip(known.observed, outputs[known.places.scaling], strict=True)), region)
        way.out_of(known.sent, outputs[known.places.passing])
        return known.keys, known.spec, outputs[known.places.saved]

    def backward(
        self, index: int, saved: list[torch.Tensor], dy: torch.Tensor, extra: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Run the backward of a segment: ``dx``, and the gradients of its parameters and of the side values that the caller gave. ``extra``: those of
        the side values that it got. The list of what forward saved is emptied, so that each tensor goes when it has been used."""
        plan, segment = self.plan, self.plan.segments[index]
        way = OnTheWay(dy, plan.request.outputs, extra)
        keys, spec = self.contexts[index]
        amaxes: dict[str, torch.Tensor] = {}
        grads: list[torch.Tensor | None] = []
        end = len(spec)
        for region in reversed(segment.backward):
            of_ops = keys[region.start - segment.start : region.stop - segment.start]
            begin = end - sum([len(names) for names in of_ops])
            with first_microbatch() if self.first_microbatch else _AS_IT_IS:
                grads[:0] = self._backward(region, way, of_ops, spec[begin:end], saved, amaxes, last=region is segment.backward[0])
            end = begin
        if amaxes:
            self.owner.commit_backward(amaxes)
        sides = [way.take(name) for name, _ in plan.request.sides]
        return way.data, [*grads, *(side.data if side is not None else None for side in sides)]

    def _backward(
        self,
        region: Region,
        way: OnTheWay,
        context_keys: Sequence[tuple[str, ...]],
        spec: Sequence[Leaf],
        saved: list[torch.Tensor],
        amaxes: dict[str, torch.Tensor],
        *,
        last: bool,
    ) -> list[torch.Tensor | None]:
        """Run the backward of a region: the gradients of its parameters. ``saved``: what forward saved, from whose end it takes what is its own.
        ``last``: whether what comes out is the gradient of the segment's x, which leaves it in high precision."""
        plan, executor = self.plan, _for(region, self.executor)
        scales = _read(self.snapshot, region.scales)
        names, call_inputs_key, slots = region.call_inputs, self.call_inputs.key(region.call_inputs), tuple(scales)
        found = {place: MainGrad.of(own) for place, own in self.accumulating.items() if region.args.start <= place < region.args.stop}
        going = {place: main_grad for place, main_grad in found.items() if main_grad is not None}
        places, main_grads = list(going), list(going.values())
        taken, border = way.into(region)
        call_state, in_place = self.call_state, executor.in_place
        own = _taken_from_end(saved, len(saved) if last else sum(map(leaf_count, spec)))
        sums_begun = sums_so_far(main_grads, in_place=in_place)
        inputs, sizes = pack(taken, saved=own, call_inputs=self.call_inputs.leaves(names), grads=sums_begun, scaling=[*scales.values()])

        def program(leaves: list[Any]) -> tuple[list[Any], _BackwardStatic]:
            came = unpack(leaves, sizes)
            leaves.clear()
            values = unflatten_call_inputs(names, call_inputs_key, came.call_inputs)
            so_far = [make_nvte_tensor(leaf) for leaf in came.grads]
            sums = {plan.arg_slots[place]: x if in_place else copy(x) for place, x in zip(places, so_far, strict=True)}
            scales = dict(zip(slots, came.scaling, strict=True))
            tensors = unflatten(came.saved, spec)[::-1]
            contexts = [{name: tensors.pop() for name in ctx} for ctx in context_keys]
            dy, *sides = border.opened(came.passing)
            assert dy is not None
            del came  # each tensor goes when the pass has used it
            result = run_backward(plan, region, contexts, dy, values, scales, sums, sides, call_state)
            dx = result.dx
            if last and dx is not None and is_quantized_type(dx.type):
                dx = dequantize(dx, plan.activation)
            passed, sent = packed(dx, _left(result.sides))
            grads = [grad for grads in result.grads for grad in grads]
            present = [grad.data for grad in grads if grad is not None]
            results, sizes_out = pack(passed, grads=present, scaling=[*result.amaxes.values()])
            return results, _BackwardStatic(places_of(sizes_out), sent, tuple(result.amaxes), tuple(grad is not None for grad in grads))

        program_key = (region, "backward", call_inputs_key, tuple(places), border.key(taken), self._left_by(context_keys, spec))
        del own, taken
        outputs, known = executor(program_key, program, inputs)
        if known.observed:
            _note(amaxes, dict(zip(known.observed, outputs[known.places.scaling], strict=True)), region)
        way.out_of(known.sent, outputs[known.places.passing])
        present = iter(outputs[known.places.grads])
        grads = [next(present) if there else None for there in known.there]
        end_sums(main_grads, [grads[place - region.args.start] for place in places])
        for place in places:
            grads[place - region.args.start] = None
        return grads

    def _left_by(self, context_keys: Sequence[tuple[str, ...]], spec: Sequence[Leaf]) -> Any:
        """What forward saved, as part of a backward program's key: nothing, as the plan decides that, unless the caller's own code saved it."""
        return (tuple(context_keys), spec_key(spec)) if self.plan.opaque else ()


def _came(dys: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The gradient of y and those of the extra outputs, each waited for where it is on its way."""
    dy, *extra = [dy if dy.__class__ is torch.Tensor else arrived(dy) for dy in dys]
    return dy, extra


class PipelineFunction(torch.autograd.Function):
    """The autograd node of one segment: ``apply(call, index, x, *args, *extra) -> y``, or ``(y, *extra outputs)`` where the caller gets side values.
    Quantized storages stay inside: what leaves quantized is a ``QuantizedTensor``."""

    @staticmethod
    def forward(ctx: Any, call: Call, index: int, x: torch.Tensor, *args: torch.Tensor) -> Any:
        extra = args[len(args) - len(call.plan.request.sides) :]
        y, outputs, saved = call.forward(index, x, extra)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.index, ctx.policy = call, index, carried()
        return (y, *(output.detach() for output in outputs)) if outputs else y

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            do = "use plain torch modules for second derivatives"
            raise NotServedError(expected("create_graph=False", of="a backward through a pipeline", got="True", do=do))
        if is_in_force_on(dys[0]):  # backward was called inside it
            with without_torch_autocast(dys[0].device.type):
                return PipelineFunction.backward(ctx, *dys)
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        with _AS_IT_IS if ctx.policy is None else ctx.policy.along():
            dx, grads = ctx.call.backward(ctx.index, saved, *_came(dys))
        return None, None, dx if ctx.needs_input_grad[2] else None, *grads


def infer(
    plan: Plan,
    executor: Executor,
    x: torch.Tensor,
    params: Sequence[Any],
    call_inputs: CallInputs,
    snapshot: Snapshot | None,
    caches: Mapping[int, KVCache] | None = None,
    extra: Sequence[torch.Tensor] = (),
    call_state: dict[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inference pass of a plan: y and the side values that the caller gets; and the new caches, k and v of each in turn, of an executor that does
    not write in place, as another adds to the caches as they are. ``params``: by ``QuantizedWeights.prepare``, ``caches`` by the positions of their
    ops, ``extra``: the side values that the caller gives."""
    way = OnTheWay(x, [name for name, _ in plan.request.sides], extra)
    grown: list[torch.Tensor] = []
    for region in plan.inferred:
        own = {position: cache for position, cache in caches.items() if region.start <= position < region.stop} if caches else {}
        grown += _infer(plan, region, _for(region, executor), way, params, call_inputs, snapshot, own, call_state)
    return [_result(way, plan), *_outputs(way, plan)], [] if executor.in_place else grown


def _infer(
    plan: Plan,
    region: Region,
    executor: Executor,
    way: OnTheWay,
    params: Sequence[Any],
    call_inputs: CallInputs,
    snapshot: Snapshot | None,
    caches: Mapping[int, KVCache],
    call_state: dict[Any, Any] | None,
) -> list[torch.Tensor]:
    """Run the inference of a region: the tensors of its caches with what it has added, k and v of each in turn."""
    args, arg_spec = _flat(plan, params, region.args)
    cached, cache_key = _flatten_caches(caches) if caches else ([], ())
    scales = _read(snapshot, region.scales)
    names, key, slots, in_place = region.call_inputs, call_inputs.key(region.call_inputs), tuple(scales), executor.in_place
    taken, border = way.into(region)
    inputs, sizes = pack(taken, args=args, call_inputs=call_inputs.leaves(names), caches=cached, scaling=[*scales.values()])

    def program(leaves: list[Any]) -> tuple[list[Any], tuple[Places, Border]]:
        came = unpack(leaves, sizes)
        values = unflatten_call_inputs(names, key, came.call_inputs)
        cache = _cache_of(cache_key, came.caches)
        scales = dict(zip(slots, came.scaling, strict=True))
        x, *sides = border.opened(came.passing)
        assert x is not None
        y, left = run_inference(plan, region, x, unflatten(came.args, arg_spec), values, scales, cache, sides, call_state)
        passed, sent = packed(y, _left(left))
        grown = [] if in_place else [tensor.data for entry in cache.values() for tensor in (entry.k, entry.v)]
        results, sizes_out = pack(passed, caches=grown)
        return results, (places_of(sizes_out), sent)

    results, (places, sent) = executor((region, "inference", key, cache_key, border.key(taken)), program, inputs)
    way.out_of(sent, results[places.passing])
    return [tensor.data for cache in caches.values() for tensor in (cache.k, cache.v)] if in_place else results[places.caches]


def _result(way: OnTheWay, plan: Plan) -> torch.Tensor:
    """The output that the caller gets: a torch tensor, a ``QuantizedTensor`` where the last op quantizes."""
    y, type = way.data, way.type
    assert y is not None, "a forward gives a value"
    if not isinstance(type, QuantizedType):
        base: Any = y._base
        return y if base is None or base.numel() == y.numel() else y.clone()  # what was padded goes, and the caller may write to it
    if type.logical:
        got, do = f"{list(type.logical)}", "pad what goes in, or leave out what quantizes it"
        raise ShapeError(expected("whole blocks", of="a quantized output", got=got, do=do))
    return QuantizedTensor.over(y, te_to_torch_dtype(plan.activation))


def _outputs(way: OnTheWay, plan: Plan) -> list[torch.Tensor]:
    """The side values that the caller gets."""
    if not plan.request.outputs:
        return []
    sides = [way.take(name) for name in plan.request.outputs]
    assert None not in sides, "a plan is checked to give all of them"
    return [side.data for side in sides if side is not None]


def _flatten_caches(caches: Mapping[int, KVCache]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """The tensors of caches that share their page table and lengths, and what they are known by: the positions, and the shape of the pages."""
    one = next(iter(caches.values()))
    leaves = [one.page_table.data, one.starts.data, one.cu_lengths.data]
    for cache in caches.values():
        leaves += [cache.k.data, cache.v.data]
    return leaves, (tuple(caches), one.k.shape[:2], one.page_table.shape)


def _cache_of(key: tuple[Any, ...], leaves: Sequence[Any]) -> dict[int, KVCache]:
    if not key:
        return {}
    tensors = [make_nvte_tensor(leaf) for leaf in leaves]
    shared, pairs = tensors[:3], zip(tensors[3::2], tensors[4::2], strict=True)
    return {position: KVCache(k, v, *shared) for position, (k, v) in zip(key[0], pairs, strict=True)}
