"""Pipelines inside ``torch.compile``: one operator for a pipeline's forward, and one for its backward.

The compiler sees an operator from the input, the parameters and the values of the call to the output. What goes on inside (plans, quantized tensors,
scaling state, kernels) stays there and is done when the operator runs. Which gradients are wanted, the modes of the modules and the recipe in force
are read when the call is traced; the compiler guards them.

What forward keeps for backward stays inside too. The operator gives a *ticket*, a tensor whose very memory owns what is kept. So that lives as long
as autograd keeps the ticket: until backward, longer where the graph is retained, and under activation checkpointing it goes and is made again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch.utils._mode_utils import no_dispatch

from fusible.compute_pipeline import Plan
from fusible.errors import ArgumentError, expected
from fusible.nvte import element, te_to_torch_dtype
from fusible.pytorch.engine.autocast import autocast_of, current_autocast, trace_constant
from fusible.pytorch.engine.batch import Batch, read_batch
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.call import Call
from fusible.pytorch.engine.call_inputs import draw_seed
from fusible.pytorch.engine.fast_path import FastPathCall
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.parametrized import parameter_of
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.torch_autocast import activation_of
from fusible.quantized import QuantizedTensor

__all__ = ["breaks_graph", "handle_of", "holders_of", "traced_call", "trains_quantized"]

_modules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_traced: weakref.WeakValueDictionary[str, PipelineRunner] = weakref.WeakValueDictionary()
_tickets: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = count()


def handle_of(module: Any) -> str:
    """A new name by which a call that is being traced finds ``module``, which has ``pipeline(part) -> PipelineRunner``."""
    handle = uuid4().hex
    _modules[handle] = module
    return handle


def holders_of(bound: Iterable[BoundOp]) -> list[tuple[torch.nn.Module, Sequence[str]]]:
    """For each op the module that holds its parameters, and their names there."""
    return [(b.module, b.parameters) for b in bound]


@trace_constant
def _begin(handle: str, part: int, changes: Sequence[int] = ()) -> str:
    """A name for a call that is being traced, by which the operators find its pipeline. A new one each time: two calls on one input are two calls,
    and compilers keep programs on disk, where one of another process must not be taken for this one's. ``changes``: of each op's module, for the
    compiler to guard."""
    with no_dispatch():
        runner = _modules[handle].pipeline(part)
        runner.look_again()
    name = uuid4().hex
    _traced[name] = runner
    return name


@trace_constant
def breaks_graph(handle: str, part: int, context: str) -> bool:
    """Whether a pipeline is called as it is, with a break of the graph around it, under an ``autocast``: no compiler knows what the caller's own code
    in plain torch gives, and the operators here have no extra outputs, and take no shares of parameters."""
    with no_dispatch():
        runner = _modules[handle].pipeline(part)
        runner.look_again()
        return bool(runner.uncompilable(autocast_of(context).recipe) or runner.outputs or runner.divided)


def trains_quantized(holders: Sequence[tuple[torch.nn.Module, Sequence[str]]]) -> bool:
    """Whether gradients are wanted of parameters that are held in 8 bits, of which the operators here give none: such a call breaks the graph, too.
    For the compiler to trace, as ``traced_call``. A program that ``torch.export`` writes has no gradients."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return False
    parameters = [holder._parameters.get(name) for holder, names in holders for name in names]  # a parametrization is computed once a call
    return any([isinstance(parameter, QuantizedTensor) and parameter.requires_grad for parameter in parameters])


@trace_constant
def _draws_seed(name: str, training: Sequence[bool]) -> bool:
    """Whether the call draws a random seed."""
    bound = _runner_of(name).bound
    return any("seed" in b.op.with_(training=mode).call_inputs for b, mode in zip(bound, training, strict=True))


@trace_constant
def _observes(name: str, context: str) -> bool:
    """Whether a call for which gradients are enabled observes amaxes under an ``autocast``, though nothing wants a gradient."""
    with no_dispatch():
        return _runner_of(name).pipeline.observes(autocast_of(context).recipe)


def traced_call(
    module: Any,
    part: int,
    holders: Sequence[tuple[torch.nn.Module, Sequence[str]]],
    x: torch.Tensor,
    extra: Sequence[torch.Tensor] = (),
    seq_lens: torch.Tensor | None = None,
    cache: KVCache | None = None,
    context: str | None = None,
) -> Sequence[torch.Tensor]:
    """Call the ``part``-th pipeline of ``module`` on ``x``: y, and the side values that the caller gets. ``holders``: for each of its ops the module
    that holds its parameters, and their names there. ``context``: the key of an ``autocast``, if not of the one in force. For the compiler to trace:
    what is read here is what the compiled program depends on. Raises ``ArgumentError`` for a cache."""
    if cache is not None:
        raise ArgumentError(expected("no cache", of="a call that torch.compile traces", got="a KVCache", do="call the model as it is"))
    x = activation_of(x)
    parameters = [parameter_of(holder, name) for holder, names in holders for name in names]
    args = [tensor for tensor in parameters if not isinstance(tensor, QuantizedTensor)]
    training = [holder.training for holder, _ in holders]
    wanted = [t.requires_grad for t in (x, *args, *extra)] if torch.is_grad_enabled() else []  # pyright: ignore[reportOptionalMemberAccess]
    name = _begin(module._handle, part, [holder._changes for holder, _ in holders])  # pyright: ignore[reportArgumentType]
    key = context or current_autocast().key
    if True not in wanted and (torch.compiler.is_exporting() or not _observes(name, key)):
        wanted = []
    seed = torch.ops.fusible.pipeline_seed(name, device=torch.device("cpu")).to(x.device) if _draws_seed(name, training) else None
    outputs = torch.ops.fusible.pipeline_forward(x, args, extra, seq_lens, seed, name, key, wanted)
    return outputs[:-1] if wanted else outputs


class _Like(NamedTuple):
    """The properties of a tensor on which a plan depends."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: torch.Tensor, requires_grad: bool) -> Any:
        return cls(x.dtype, (int(x.shape[-1]),) if x.ndim else (), x.device, requires_grad)


class _Kept(bytearray):
    """What a call keeps for its backward. It is a ``bytearray``, whose bytes are the memory of the call's ticket."""

    call: Call | FastPathCall
    batch: Batch | None
    saved: list[list[torch.Tensor]]
    passed: list[bool]
    """For each gradient of the plan after x's: whether its tensor came through the compiled program."""
    versions: list[tuple[torch.Tensor, int]]
    """The parameters among what is saved (of quantized ones their data), and their versions when they were."""


def _runner_of(name: str) -> PipelineRunner:
    runner = _traced.get(name)
    if runner is None:
        got, do = "one that is gone, has changed or was traced in another process", "compile it again, or write it by fusible.export_program"
        raise ArgumentError(expected("the module that was traced", of="a compiled call", got=got, do=do))
    owner = runner.aside() if runner.aside is not None else None
    if owner is not None:
        owner.arrange()
    return runner


def _plan_of(
    runner: PipelineRunner, x: torch.Tensor, args: Sequence[torch.Tensor], extra: Sequence[torch.Tensor], context: str, wanted: Sequence[bool]
) -> Plan:
    """The plan of a call, by what was traced: tensors inside a compiled program know nothing of gradients."""
    flags, plain_args = iter(wanted or [False] * (1 + len(args) + len(extra))), iter(args)
    like = _Like.of(x, next(flags))
    registered = runner.registered()
    likes = [own if isinstance(own, QuantizedTensor) else _Like.of(next(plain_args), next(flags)) for own in registered]
    sides = [_Like.of(value, next(flags)) for value in extra]
    with no_dispatch():
        plan = runner.plan(like, likes, autocast_of(context), bool(wanted), sides)
    if plan.out_width is None:
        got = ", ".join(repr(op) for op in plan.ops)
        do = "give the op a width method that says so"
        raise ArgumentError(expected("a known width of the output", of="what torch.compile can trace", got=got, do=do))
    if wanted and runner.accumulating(registered):
        do = "leave main_grad unset, or the module out of the compiled part"
        raise ArgumentError(expected("gradients that autograd sums up", of="a compiled call", got="a parameter with a main_grad", do=do))
    return plan


@torch.library.custom_op("fusible::pipeline_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _seed(name: str, *, device: torch.device) -> torch.Tensor:
    """The random seed of a call, drawn from torch's default generator, which is a CPU's."""
    return draw_seed(device)


@_seed.register_fake
def _(name: str, *, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


@torch.library.custom_op("fusible::pipeline_forward", mutates_args=())
def _forward(
    x: torch.Tensor,
    args: list[torch.Tensor],
    extra: list[torch.Tensor],
    seq_lens: torch.Tensor | None,
    seed: torch.Tensor | None,
    name: str,
    context: str,
    wanted: list[bool],
) -> list[torch.Tensor]:
    """y, and where ``wanted`` says of which of x, ``args`` and ``extra`` gradients are wanted, the ticket of what is kept for backward. It is empty
    for an inference, and all False for a call that observes alone (``PipelineRunner.begin``)."""
    runner = _runner_of(name)
    plan = _plan_of(runner, x, args, extra, context, wanted)
    plain_args = iter(args)
    params = [own if isinstance(own, QuantizedTensor) else _own(own, next(plain_args)) for own in runner.registered()]
    batch = read_batch(x, seq_lens) if runner.batched or runner.sequenced or seq_lens is not None else None
    rows = x if batch is None else batch.x
    if batch is not None and extra:
        if batch.index is not None and not runner.has_own_rows:
            of, do = "a padded batch that torch.compile traces", "leave the padding out, or the call out of the compiled part"
            raise ArgumentError(expected("no extra inputs", of=of, got=len(extra), do=do))
        extra = runner.rows_of(extra, batch, x.shape)
    if not wanted:
        y = runner.infer(plan, autocast_of(context), rows, params, batch, seed, extra, {})[0]
        return _deduplicate([y if batch is None else batch.restore(y)], (x, *args, *extra))
    call = runner.begin(plan, autocast_of(context), rows, params, batch, seed, {})
    kept = _Kept(8)
    kept.call, kept.batch, kept.saved = call, batch, []
    kept.passed = [not isinstance(own, QuantizedTensor) for own in params] + [True] * len(extra)
    y = rows
    for index in range(len(plan.segments)):
        y, _, saved = call.forward(index, y, extra)
        kept.saved.append(saved)
    runner.commit(call)
    result = _deduplicate([y if batch is None else batch.restore(y)], (x, *args, *extra))
    _protect(kept, params, (x, *args, *extra, *result))
    return [*result, _ticket(kept)]


def _own(own: torch.Tensor | None, arg: torch.Tensor) -> torch.Tensor:
    """The module's own parameter where the compiled program was given that very one: its 8-bit copy is found by it. Else ``arg``."""
    if own is None:
        return arg
    same = own.data_ptr() == arg.data_ptr() and own.shape == arg.shape and own.stride() == arg.stride() and own.dtype is arg.dtype
    return own if same else arg


def _deduplicate(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, contiguous and with memory of their own: an operator may not give back an input, nor one tensor twice."""
    taken = {value.untyped_storage().data_ptr() for value in inputs}
    distinct = []
    for result in results:
        result = result.detach().contiguous()
        if result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        distinct.append(result)
    return distinct


def _protect(kept: _Kept, params: Sequence[torch.Tensor], seen: Sequence[torch.Tensor]) -> None:
    """Copy what is kept of the operator's inputs and outputs: the compiler knows nothing of it, and uses their memory again. Parameters stay."""
    memories = [tensor for param in params if param.is_leaf for tensor in _memories(param)]
    own = {tensor.untyped_storage().data_ptr(): tensor for tensor in memories}
    theirs = {value.untyped_storage().data_ptr() for value in seen}.difference(own)
    kept.versions = []
    for saved in kept.saved:
        for i, tensor in enumerate(saved):
            memory = tensor.untyped_storage().data_ptr()
            if memory in theirs:
                saved[i] = tensor.clone()
            elif memory in own:
                kept.versions.append((own[memory], own[memory]._version))


def _memories(param: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a parameter's values."""
    return [tensor for tensor in param.get_data_tensors() if tensor is not None] if isinstance(param, QuantizedTensor) else [param]


def _ticket(kept: _Kept) -> torch.Tensor:
    number = next(_numbers)
    kept[:] = number.to_bytes(8, sys.byteorder)
    _tickets[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


@_forward.register_fake
def _(x: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    args, extra, _, _, name, context, wanted = arguments
    plan = _plan_of(_runner_of(name), x, args, extra, context, wanted)
    assert plan.out_width is not None
    dtype = te_to_torch_dtype(element(plan.ops[-1].y_dtype)) if plan.ops else x.dtype
    y = x.new_empty((*x.shape[:-1], plan.out_width), dtype=dtype)
    return [y, torch.empty(1, dtype=torch.int64, device="cpu")] if wanted else [y]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, args, extra, *_, wanted = inputs
    ctx.save_for_backward(output[-1])
    ctx.set_materialize_grads(True)
    ctx.wanted, ctx.counts = list(wanted), (len(args), len(extra))
    asked = [value for value, asked in zip((x, *args, *extra), wanted, strict=True) if asked]
    ctx.shapes = [[*value.shape] for value in asked]
    ctx.dtypes = " ".join(str(value.dtype).removeprefix("torch.") for value in asked)


def _through(ctx: Any, grads: Sequence[torch.Tensor | None]) -> Any:
    (ticket,) = ctx.saved_tensors
    sizes = [size for shape in ctx.shapes for size in (len(shape), *shape)]
    found = iter(torch.ops.fusible.pipeline_backward(ticket, grads[0], ctx.wanted, sizes, ctx.dtypes))
    gradients = [next(found) if wanted else None for wanted in ctx.wanted]
    count = 1 + ctx.counts[0]
    return gradients[0], gradients[1:count], gradients[count:], *[None] * 5


_forward.register_autograd(_through, setup_context=_setup_context)


@torch.library.custom_op("fusible::pipeline_backward", mutates_args=())
def _backward(ticket: torch.Tensor, dy: torch.Tensor, wanted: list[bool], sizes: list[int], dtypes: str) -> list[torch.Tensor]:
    """The gradients that are ``wanted``; ``sizes`` are their ranks and shapes one after another."""
    kept = _tickets.get(int(ticket.item()))
    if kept is None:
        do = "leave tensors that autograd saves where they are"
        raise ArgumentError(expected("the tensor that forward left", of="the backward of a compiled call", got="a copy", do=do))
    if any(param._version != version for param, version in kept.versions):
        do = "write to them after backward"
        raise ArgumentError(expected("parameters as they were", of="the backward of a compiled call", got="one that was written to", do=do))
    call, plan = kept.call, kept.call.plan
    keeps = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]
    retained = torch._C._current_graph_task_id() == -1 or keeps()
    d: torch.Tensor | None = kept.batch.tokens(dy) if kept.batch is not None else dy
    grads: list[torch.Tensor | None] = []
    for index in reversed(range(len(plan.segments))):
        assert d is not None
        saved = list(kept.saved[index])
        if not retained:
            kept.saved[index].clear()
        d, found = call.backward(index, saved, d)
        grads[:0] = found
    if d is not None and kept.batch is not None:
        d = kept.batch.restore(d)
    results = [d, *(grad for grad, passed in zip(grads, kept.passed, strict=True) if passed)]
    asked = zip([result for result, there in zip(results, wanted, strict=True) if there], _layouts(sizes, dtypes), strict=True)
    return _deduplicate([dy.new_zeros(shape, dtype=dtype) if g is None else g.to(dtype).view(shape) for g, (shape, dtype) in asked], (dy, ticket))


@_backward.register_fake
def _(ticket: torch.Tensor, dy: torch.Tensor, wanted: list[bool], sizes: list[int], dtypes: str) -> list[torch.Tensor]:
    return [dy.new_empty(shape, dtype=dtype) for shape, dtype in _layouts(sizes, dtypes)]


def _layouts(sizes: Sequence[int], dtypes: str) -> list[tuple[list[int], torch.dtype]]:
    left, layouts = list(sizes), []
    for name in dtypes.split():
        rank = int(left[0])
        layouts.append((left[1 : 1 + rank], getattr(torch, name)))
        left = left[1 + rank :]
    return layouts
