"""Pipelines inside ``torch.export``: their ops are torch's own functions there, so that a graph runs where Fusible is not (``pytorch.lowering``).

The tracer puts tensors of its own in the places of a model's parameters. It has no use for quantized ones, and what weights in 8 bits are made of
need not be in the graph. So within ``exporting`` modules have buffers in the places of quantized parameters, and it is remembered what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fusible.compute_pipeline import Plan
from fusible.errors import ArgumentError, expected
from fusible.nvte import Pass, QuantizedType
from fusible.pytorch.engine.autocast import autocast
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.parametrized import parameter_of
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.torch_autocast import activation_of
from fusible.pytorch.lowering import constants_of, lowered, values_of
from fusible.quantized import QuantizedTensor

__all__ = ["exporting", "is_exporting", "is_lowered", "lowered_call", "own_parameter"]


@dataclass(frozen=True)
class _Model:
    """``parameters``: those of each module, as they were. ``blocks``: of each parameter that has buffers in its place, the length of its blocks."""

    parameters: Mapping[nn.Module, Mapping[str, torch.Tensor | None]]
    blocks: Mapping[tuple[nn.Module, str], int]


_model: ContextVar[_Model | None] = ContextVar("fusible_exported_model", default=None)


def is_exporting() -> bool:
    """Whether ``torch.export`` traces by running the code. Where it has the compiler trace (``strict``), pipelines are our own operators."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_lowered(runner: PipelineRunner, context: autocast) -> bool:
    """Whether a pipeline that ``torch.export`` traces becomes torch's functions. Outside of ``exporting`` one that computes in 8 or 4 bits does not:
    its graph has our own operators, which compute as the model does and need Fusible."""
    if _model.get() is not None:
        return True
    if context.recipe is not None and not context.recipe.high_precision():
        return False
    with _disable_current_modes():
        return not any(isinstance(_read(b.module, name), QuantizedTensor) for b in runner.bound for name in b.parameters)


@contextmanager
def exporting(model: nn.Module, unneeded: Sequence[tuple[nn.Module, str]] = ()) -> Iterator[None]:
    """Within it, ``torch.export`` takes ``model`` with its quantized parameters; ``unneeded`` ones are no parameters meanwhile. Raises
    ``ArgumentError`` for a parameter that has no codes and scales."""
    parameters = {module: dict(module._parameters) for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in parameters}
    quantized = [(module, name, p) for module, own in parameters.items() for name, p in own.items() if isinstance(p, QuantizedTensor)]
    found = [(module, name, constants_of(parameter)) for module, name, parameter in quantized]
    token = _model.set(_Model(parameters, {(module, name): constants["block"] for module, name, constants in found}))
    try:
        for module, name, constants in found:
            module._buffers.update({f"{name}_{part}": value for part, value in constants.items() if isinstance(value, torch.Tensor)})
        for module, name in (*unneeded, *((module, name) for module, name, _ in quantized)):
            module._parameters[name] = None
        yield
    finally:
        _model.reset(token)
        for module, own in parameters.items():
            _put_back(module._parameters, own)
            _put_back(module._buffers, buffers[module])


def _put_back(now: dict[str, Any], then: Mapping[str, Any]) -> None:
    now.clear()
    now.update(then)


def own_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of a module; of one that is being exported as it was before."""
    model = _model.get() if is_exporting() else None  # torch.compile cannot trace the first
    return (module._parameters if model is None else model.parameters[module]).get(name)


def lowered_call(runner: PipelineRunner, x: torch.Tensor, extra: Sequence[torch.Tensor], call: ChainCall, context: autocast) -> torch.Tensor:
    """What a pipeline gives for x, as a graph of torch's functions. Raises ``ArgumentError`` for what such a graph has not."""
    with _disable_current_modes():
        runner.look_again()
    got = next((got for got, there in _lacking(runner, call) if there), "")
    if got:
        do = "give rows of one length, padded behind, and leave the rest out"
        raise ArgumentError(expected("whole sequences of one length", of=f"an exported call of {runner.title}", got=got, do=do))
    x = activation_of(x)
    holders = [(b.module, name) for b in runner.bound for name in b.parameters]
    with _disable_current_modes(), torch.no_grad():
        plan, constants, scales = _planned(runner, x, holders, extra, context)
    args = (_value(holder, name, found) for (holder, name), found in zip(holders, constants, strict=True))
    sides = dict(zip(runner.sides, extra, strict=True))
    return Pass("inference", scales).run(lambda: lowered(plan.ops, args, x, sides))


def _lacking(runner: PipelineRunner, call: ChainCall) -> Iterator[tuple[str, bool]]:
    yield "seq_lens", call.seq_lens is not None
    yield "a cache", call.cache is not None
    yield "keyword arguments of operations", bool(call.keywords)
    yield "extra outputs", bool(runner.outputs)
    yield "parameters that processes share out", runner.divided


class _Like(NamedTuple):
    """The properties of a tensor on which a plan depends."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, x: torch.Tensor) -> Any:
        return cls(x.dtype, (int(x.shape[-1]),) if x.ndim else (), x.device)


def _planned(
    runner: PipelineRunner, x: torch.Tensor, holders: Sequence[tuple[Any, str]], extra: Sequence[torch.Tensor], context: autocast
) -> tuple[Plan, list[Any], dict[str, float]]:
    """The plan; of each parameter that it takes in 8 bits the constants, of another None; and the scales of activations, by slot."""
    args = _real(holders)
    like: Any = [arg if isinstance(arg, QuantizedTensor) else _Like.of(arg) for arg in args]
    sides: Any = [_Like(value.dtype, (), value.device) for value in extra]  # whose sizes no plan asks for, and a program may leave open
    plan = runner.plan(_Like.of(x), like, context, False, sides)
    constants: list[Any] = [None] * len(args)
    if not any(isinstance(type, QuantizedType) for type in plan.arg_types) and plan.delayed is None:
        return plan, constants, {}
    if _model.get() is None:
        do = "export it by fusible.export_program"
        raise ArgumentError(expected("weights in high precision", of="a model that torch.export traces", got="weights in 8 or 4 bits", do=do))
    snapshot = runner._snapshot(plan, context, x.device, inference=True)
    params, _ = runner._weights.prepare(plan, args, snapshot, runner.executor)
    for place, type in enumerate(plan.arg_types):
        if isinstance(type, QuantizedType) and not isinstance(args[place], QuantizedTensor):
            constants[place] = constants_of(params[place].data)
    return plan, constants, {} if snapshot is None else {slot: 1 / scale for slot, scale in snapshot.values.items()}


def _real(holders: Sequence[tuple[Any, str]]) -> list[torch.Tensor]:
    """The parameters as they were before the tracer came. Outside of ``exporting``, as it has left them."""
    model = _model.get()
    then = {module: dict(module._parameters) for module in (model.parameters if model is not None else ())}
    try:
        for module in then:
            _put_back(module._parameters, model.parameters[module])  # type: ignore[union-attr]
        return [_read(holder, name) for holder, name in holders]
    finally:
        for module, own in then.items():
            _put_back(module._parameters, own)


def _read(holder: Any, name: str) -> torch.Tensor:
    """The parameter of a module, or of what stands for one."""
    if isinstance(holder, nn.Module):
        return parameter_of(holder, name)
    try:
        return holder._parameters[name]
    except KeyError:
        return getattr(holder, name)


def _value(holder: Any, name: str, constants: Any) -> torch.Tensor:
    """A parameter in the graph."""
    model = _model.get()
    if constants is not None:
        return values_of(constants)
    if model is not None and (holder, name) in model.blocks:
        parts = {part: holder._buffers.get(f"{name}_{part}") for part in ("codes", "scale", "tensor_scale")}
        return values_of({**parts, "block": model.blocks[holder, name]})
    hidden = own_parameter(holder, name) if isinstance(holder, nn.Module) and holder._parameters.get(name) is None else None
    return _read(holder, name) if hidden is None else hidden  # which is needed for more than its codes
