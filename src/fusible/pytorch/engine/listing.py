"""Listing a pass: what a program calls in tex, with the flow of tensors between the calls, as it is heard.

Listing keeps no value alive: it knows them by weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fusible import nvte, tex
from fusible.pytorch.engine.replay import Replay, layout_of
from fusible.pytorch.engine.steps import Step
from fusible.quantized import FieldStorage, Float8Quantizer, Quantizer
from fusible.tex.interface.specialize import specialize

__all__ = ["Listing", "deduplicate"]

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum, getattr(torch.distributed, "ProcessGroup", Enum))


class _Unreplayable(Exception):
    """A program uses a value that no input and no tex call gave."""


def deduplicate(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs as objects of their own: where one came twice, by chance perhaps, its places must not be taken for one."""
    seen: set[int] = set()
    distinct = []
    for value in inputs:
        distinct.append(value.detach() if id(value) in seen else value)
        seen.add(id(value))
    return distinct


class Listing:
    """The calls of a program on ``inputs``, as they are heard.

    Every value has a place: first the inputs, then constants and results as they come. Places of objects are found by identity, while they live.
    """

    def __init__(self, inputs: list[Any]) -> None:
        self._places: dict[int, int] = {}
        self._parts_of: dict[int, tuple[int, str]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._constants: dict[int, Any] = {}
        self._steps: list[Step] = []
        self._count = 0
        self._replayable = True
        for value in inputs:
            self._new(value)
        self._inputs = self._count
        self._layout = layout_of(inputs)

    def note(self, call: tex.RecordedCall) -> None:
        """List one call."""
        try:
            if self._replayable:
                self._add(call)
        except _Unreplayable:
            self._replayable = False

    def finish(self, outputs: Sequence[Any], static: Any, epoch: int) -> Replay | None:
        """The program that gave ``outputs``; None where a value in it comes from elsewhere."""
        try:
            if not self._replayable:
                return None
            places = tuple(self._place(output) for output in outputs)
        except _Unreplayable:
            return None
        finally:
            self._alive.clear()  # a tensor that something refers to weakly, as the collector has yet to find, cannot be swapped
        return Replay(self._steps, self._constants, self._inputs, places, static, epoch, self._layout)

    def _new(self, value: Any) -> int:
        place = self._count
        self._count += 1
        if self._watch(value):
            self._places.setdefault(id(value), place)
        return place

    def _watch(self, value: Any) -> bool:
        """Whether a value is known by its identity from now on, until it is gone; lists and tuples are not, but by what is in them."""
        key = id(value)
        if key in self._alive:
            return True
        if isinstance(value, (list, tuple, *_CONSTANTS)):
            return False

        def forget(_: Any) -> None:
            for known in (self._alive, self._places, self._parts_of):
                known.pop(key, None)

        self._alive[key] = weakref.ref(value, forget)
        return True

    def _constant(self, value: Any) -> int:
        place = self._count
        self._count += 1
        self._constants[place] = value
        return place

    def _add(self, call: tex.RecordedCall) -> None:
        """List one call, and register what can be reached from its result and from the quantizers it was given."""
        if not all(_is_constant(value) for value in call.kwargs.values()):
            raise _Unreplayable
        sources = tuple(self._place(arg) for arg in call.args)
        step = len(self._steps)
        if call.kwargs:
            self._steps.append(Step(partial(call.method, **call.kwargs), sources, self._new(call.result)))
        else:
            target = self._new(call.result)
            specialized = self._specialized(call, target) if self._layout is not None else None
            self._steps.append(Step(call.method, sources, target, specialized=specialized))
        for arg, source in zip(call.args, sources, strict=True):
            if isinstance(arg, Float8Quantizer) and arg.amax is not None:
                self._steps.append(Step(attrgetter("amax"), (source,), self._new(arg.amax)))
        self._reach(step, call.result)

    def _specialized(self, call: tex.RecordedCall, target: int) -> Step | None:
        """What may be called instead; None where it takes what the pass does not have."""
        found = specialize(call.method, call.args)
        if found is None or not all(
            id(value) in self._places or id(value) in self._parts_of or isinstance(value, _CONSTANTS) for value in found.operands
        ):
            return None
        return Step(found.compute, tuple(self._place(operand) for operand in found.operands), target, kernels=found.kernels)

    def _reach(self, step: int, result: Any, path: str = "") -> None:
        """Register the tensors inside a result, by what is written after it to get them: they get a place of their own when they are asked for."""
        if isinstance(result, (list, tuple)):
            inner = [(f"[{i}]", part) for i, part in enumerate(result)]
        elif isinstance(result, FieldStorage):
            inner = [(f".{name}", getattr(result, name)) for name in (*result._TENSORS.values(), *result._PARTS.values())]
        elif isinstance(result, nvte.STORAGES):
            inner = [(f".get_metadata()[{name!r}]", part) for name, part in result.get_metadata().items() if name != "quantizer"]
        else:
            return
        for text, part in inner:
            if isinstance(part, _CONSTANTS) or id(part) in self._places:
                continue
            if self._watch(part):
                self._parts_of.setdefault(id(part), (step, path + text))
            self._reach(step, part, path + text)

    def _place(self, value: Any) -> int:
        """Where a value is: known, part of a result, a constant, or put together of such."""
        known = self._places.get(id(value))
        if known is not None:
            return known
        if id(value) in self._parts_of:
            step, part = self._parts_of[id(value)]
            place = self._new(value)
            self._steps[step] = self._steps[step]._replace(parts=(*self._steps[step].parts, (part, place)))
            return place
        if isinstance(value, _CONSTANTS) or (isinstance(value, tuple) and _is_constant(value)):
            return self._constant(value)
        return self._assembled(value)

    def _assembled(self, value: Any) -> int:
        if isinstance(value, (list, tuple)):
            make: Callable[..., Any] = _make_list
            parts: Sequence[Any] = list(value)
        elif isinstance(value, Float8Quantizer):
            make = partial(_make_delayed, value.dtype, value.rowwise_usage, value.columnwise_usage, value.internal)
            parts = [value.scale]
        elif isinstance(value, Quantizer) and value._value_key() is not None:
            return self._constant(value)  # it has no state
        elif isinstance(value, nvte.STORAGES):
            parts, spec = nvte.flatten_storage(value)
            make = partial(_make_storage, spec)
        else:
            raise _Unreplayable
        sources = tuple(self._place(part) for part in parts)
        self._steps.append(Step(make, sources, target := self._new(value), assembles=True))
        return target


def _is_constant(value: Any) -> bool:
    """Whether a value is the same for every run: a constant, or a list of such."""
    return isinstance(value, _CONSTANTS) or (isinstance(value, (list, tuple)) and all(isinstance(v, _CONSTANTS) for v in value))


def _make_list(*values: Any) -> list[Any]:
    return list(values)


def _make_delayed(dtype: Any, rowwise: bool, columnwise: bool, internal: bool, scale: Any) -> Float8Quantizer:
    return Float8Quantizer(scale, None, dtype, rowwise=rowwise, columnwise=columnwise, internal=internal)


def _make_storage(spec: nvte.StorageSpec | nvte.Shell, *parts: Any) -> Any:
    return nvte.unflatten_storage(iter(parts), spec)
