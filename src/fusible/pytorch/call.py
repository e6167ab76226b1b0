"""One call of a pipeline: the programs of its passes, and the autograd node of each segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fusible import nvte
from fusible.compute_pipeline import Plan, run_backward, run_forward, run_inference
from fusible.errors import NotServedError, ShapeError, expected
from fusible.nvte import (
    KVCache,
    Sequences,
    copy,
    dequantize,
    flatten,
    is_quantized_type,
    make_nvte_tensor,
    te_to_torch_dtype,
    unflatten,
)
from fusible.pytorch.executors import Executor
from fusible.pytorch.scaling import ScalingOwner, Snapshot
from fusible.pytorch.torch_autocast import is_in_force, without_torch_autocast
from fusible.pytorch.weights import DelayedWeights
from fusible.quantized import QuantizedTensor
from fusible.tex.scope import carried

__all__ = ["Call", "Given", "NOTHING_GIVEN", "PipelineFunction", "infer"]


@dataclass(frozen=True, eq=False)
class Given:
    """The values of a whole call, apart: the tensors by name, and how they are put together (hashable)."""

    tensors: dict[str, list[torch.Tensor]]
    static: dict[str, Any]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Given:
        tensors: dict[str, list[torch.Tensor]] = {}
        static: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Sequences):
                tensors[name] = [value.cu_seqlens.data]
                static[name] = (value.count, value.max_seqlen, value.uniform)
            else:
                tensors[name] = [value.data]
                static[name] = None
        return cls(tensors, static)

    def leaves(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [leaf for name in names for leaf in self.tensors[name]]

    def key(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(self.static[name] for name in names)


NOTHING_GIVEN = Given({}, {})


def _flat(plan: Plan, args: Sequence[Any], where: slice = slice(None)) -> tuple[list[Any], list[Any]]:
    """Parameters taken apart; where the plan wants none in 8 bits they are still as the modules hold them."""
    return flatten(args[where]) if plan.quantized_args else (list(args[where]), plan.plain_args[where])


def _kinds(extra: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a program may depend on of the side values that the caller gives."""
    return tuple([(value.shape, value.dtype) for value in extra])


def _put_together(names: Sequence[str], key: Sequence[Any], leaves: Sequence[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, static, leaf in zip(names, key, leaves, strict=True):
        tensor = make_nvte_tensor(leaf)
        values[name] = Sequences(tensor, *static) if static is not None else tensor
    return values


def _inside(data: Any) -> nvte.Tensor:
    """A gradient that comes from outside; a quantized one by its storage, as passes know it."""
    return make_nvte_tensor(data.storage_without_autograd() if isinstance(data, QuantizedTensor) else data)


def _read(snapshot: Snapshot | None, slots: Sequence[str]) -> dict[str, torch.Tensor]:
    return {slot: snapshot.scales[slot] for slot in slots} if snapshot is not None else {}


@dataclass(eq=False)
class Call:
    """A training call: what its segments share, and what they leave. ``args``: the parameters, by ``QuantizedWeights.prepare``."""

    plan: Plan
    args: Sequence[Any]
    executor: Executor
    given: Given
    owner: ScalingOwner
    snapshot: Snapshot | None
    main_grads: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Where the gradients of some parameters are summed up, by their places."""
    amaxes: dict[str, torch.Tensor] = field(default_factory=dict)
    contexts: dict[int, Any] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)
    """What ops leave for their backward beside tensors (``nvte.Pass.call``)."""
    delayed_weights: DelayedWeights | None = None

    def forward(
        self, index: int, x: torch.Tensor, extra: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run the forward of a segment: ``y``, the side values that the caller gets, and the tensors to save for its backward."""
        plan, segment = self.plan, self.plan.segments[index]
        state = segment.state
        scales = _read(self.snapshot, state.forward + state.backward if plan.foreign else state.forward)
        names, key, slots = segment.given, self.given.key(segment.given), tuple(scales)
        args, arg_spec = _flat(plan, self.args, segment.args)
        notes = self.notes

        def program(leaves: list[Any]) -> tuple[list[Any], Any]:
            end = 1 + len(args) + len(names)
            values = _put_together(names, key, leaves[1 + len(args) : end])
            sides = [make_nvte_tensor(leaf) for leaf in leaves[end : end + len(extra)]]
            held = dict(zip(slots, leaves[len(leaves) - len(slots) :], strict=True))
            x_ = make_nvte_tensor(leaves[0])
            result = run_forward(plan, segment, x_, unflatten(leaves[1 : 1 + len(args)], arg_spec), values, held, sides, notes)
            saved, spec = flatten([tensor for ctx in result.contexts for tensor in ctx.values()])
            y, y_spec = flatten([result.y])
            static = (tuple(tuple(ctx) for ctx in result.contexts), spec, tuple(result.amaxes), y_spec, len(y))
            return [*y, *(side.data for side in result.outputs), *saved, *result.amaxes.values()], static

        inputs = [x, *args, *self.given.leaves(names), *extra, *scales.values()]
        outputs, (keys, spec, observed, y_spec, first) = self.executor((plan, index, "forward", key, _kinds(extra)), program, inputs)
        end, got = len(outputs) - len(observed), first + len(plan.request.outputs)
        self.amaxes.update(zip(observed, outputs[end:], strict=True))
        self.contexts[index] = (keys, spec)
        return _result(outputs[:first], y_spec, plan), outputs[first:got], outputs[got:end]

    def backward(
        self, index: int, saved: list[torch.Tensor], dy: torch.Tensor, extra: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Run the backward of a segment: ``dx``, and the gradients of its parameters and of the side values that the caller gave. ``extra``: those of
        the side values that it got. The list of what forward saved is emptied, so that each tensor goes when it has been used."""
        plan, segment = self.plan, self.plan.segments[index]
        scales = _read(self.snapshot, segment.state.backward)
        names, given_key, slots = segment.given, self.given.key(segment.given), tuple(scales)
        context_keys, spec = self.contexts[index]
        places = [place for place in range(segment.args.start, segment.args.stop) if place in self.main_grads]
        count, notes = len(saved), self.notes

        def program(leaves: list[Any]) -> tuple[list[Any], Any]:
            before = 1 + count + len(names)
            values = _put_together(names, given_key, leaves[1 + count : before])
            so_far = [make_nvte_tensor(leaf) for leaf in leaves[before : before + len(places)]]
            before += len(places)
            sides = [_inside(leaf) for leaf in leaves[before : before + len(extra)]]
            sums = {plan.arg_slots[place]: x if self.executor.in_place else copy(x) for place, x in zip(places, so_far, strict=True)}
            held = dict(zip(slots, leaves[len(leaves) - len(slots) :], strict=True))
            tensors = unflatten(leaves[1 : 1 + count], spec)[::-1]
            contexts = [{name: tensors.pop() for name in ctx} for ctx in context_keys]
            dy = _inside(leaves[0])
            leaves.clear()
            result = run_backward(plan, segment, contexts, dy, values, held, sums, sides, notes)
            dx = result.dx
            if dx is not None and is_quantized_type(dx.type):
                dx = dequantize(dx, plan.activation)
            results = [dx, *(grad for grads in result.grads for grad in grads), *result.side_grads]
            present = tuple(tensor is not None for tensor in results)
            return [t.data for t in results if t is not None] + list(result.amaxes.values()), (present, tuple(result.amaxes))

        main_grads = [self.main_grads[place] for place in places]
        inputs = [dy, *saved, *self.given.leaves(names), *main_grads, *extra, *scales.values()]
        saved.clear()
        outputs, (present, observed) = self.executor((plan, index, "backward", given_key, tuple(places), _kinds(extra)), program, inputs)
        if observed:
            self.owner.commit_backward(dict(zip(observed, outputs[len(outputs) - len(observed) :], strict=True)))
        given_out = iter(outputs)
        dx, *grads = [next(given_out) if there else None for there in present]
        for place, main_grad in zip(places, main_grads, strict=True):
            summed = grads[place - segment.args.start]
            if summed is not None and summed.data_ptr() != main_grad.data_ptr():
                main_grad.copy_(summed)  # by an executor that cannot write in place
            grads[place - segment.args.start] = None
        return dx, grads


_AS_IT_IS = nullcontext()


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
        kind = next((dy.device.type for dy in dys if dy is not None), "cpu")
        if is_in_force(kind):  # backward was called inside it
            with without_torch_autocast(kind):
                return PipelineFunction.backward(ctx, *dys)
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        with _AS_IT_IS if ctx.policy is None else ctx.policy.along():
            dx, grads = ctx.call.backward(ctx.index, saved, dys[0], dys[1:])
        return None, None, dx if ctx.needs_input_grad[2] else None, *grads


def infer(
    plan: Plan,
    executor: Executor,
    x: torch.Tensor,
    params: Sequence[Any],
    given: Given,
    snapshot: Snapshot | None,
    caches: Mapping[int, KVCache] | None = None,
    extra: Sequence[torch.Tensor] = (),
    notes: dict[Any, Any] | None = None,
) -> list[torch.Tensor]:
    """The inference pass of a plan: y, and the side values that the caller gets. ``params``: by ``QuantizedWeights.prepare``, ``caches`` by the
    positions of their ops, ``extra``: the side values that the caller gives. An executor that writes in place adds to the caches as they are; for
    another the new ones come last, k and v of each in turn."""
    args, arg_spec = _flat(plan, params)
    cached, cache_key = _take_apart(caches) if caches else ([], ())
    scales = _read(snapshot, plan.state.forward)
    names, key, slots = plan.given, given.key(plan.given), tuple(scales)

    def program(leaves: list[Any]) -> tuple[list[Any], Any]:
        values = _put_together(names, key, leaves[1 + len(args) : 1 + len(args) + len(names)])
        held = dict(zip(slots, leaves[len(leaves) - len(slots) :], strict=True))
        before = 1 + len(args) + len(names)
        cache = _cache_of(cache_key, leaves[before : before + len(cached)])
        sides = [make_nvte_tensor(leaf) for leaf in leaves[before + len(cached) : before + len(cached) + len(extra)]]
        params = unflatten(leaves[1 : 1 + len(args)], arg_spec)
        y, outputs = run_inference(plan, make_nvte_tensor(leaves[0]), params, values, held, cache, sides, notes)
        leaves_of_y, spec = flatten([y])
        grown = [] if executor.in_place else [tensor.data for held in cache.values() for tensor in (held.k, held.v)]
        return [*leaves_of_y, *(output.data for output in outputs), *grown], (spec, len(leaves_of_y))

    inputs = [x, *args, *given.leaves(names), *cached, *extra, *scales.values()]
    results, (y_spec, first) = executor((plan, "inference", key, cache_key, _kinds(extra)), program, inputs)
    return [_result(results[:first], y_spec, plan), *results[first:]]


def _result(leaves: Sequence[torch.Tensor], spec: Any, plan: Plan) -> torch.Tensor:
    """What a pass gives the caller: a torch tensor, of a quantized class where the last op quantizes."""
    if spec[0][1] is None:
        return leaves[0]
    if spec[0][0].logical:
        got, do = f"{list(spec[0][0].logical)}", "pad what goes in, or leave out what quantizes it"
        raise ShapeError(expected("whole blocks", of="a quantized output", got=got, do=do))
    return QuantizedTensor.over(unflatten(leaves, spec)[0].data, te_to_torch_dtype(plan.activation))


def _take_apart(caches: Mapping[int, KVCache]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
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
