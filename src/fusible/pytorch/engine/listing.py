"""Listing a pass: the tex calls that a program makes, with the flow of tensors between them, as they are heard.

The listing also knows where each value is last used, and lets it go there. Listing keeps no value alive either: it knows them by weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from fusible import nvte, tex
from fusible.pytorch.engine.replay import Replay, Step
from fusible.quantized import Float8Quantizer, Float8TensorStorage, Quantizer

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

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._places: dict[int, int] = {}
        self._parts_of: dict[int, tuple[int, Callable[[Any], Any]]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._constants: dict[int, Any] = {}
        self._steps: list[Step] = []
        self._count = 0
        self._replayable = True
        for value in inputs:
            self._new(value)
        self._inputs = self._count

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
        return Replay(self._with_liveness(places), self._template(), self._inputs, places, static, epoch)

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
        method = partial(call.method, **call.kwargs) if call.kwargs else call.method
        self._step(method, sources, call.result)
        step = len(self._steps) - 1
        for arg, source in zip(call.args, sources, strict=True):
            if isinstance(arg, Float8Quantizer) and arg.amax is not None:
                self._steps.append(Step(attrgetter("amax"), (source,), self._new(arg.amax), (), ()))
        self._reach(step, call.result)

    def _step(self, call: Callable[..., Any], sources: tuple[int, ...], result: Any) -> int:
        target = self._new(result)
        self._steps.append(Step(call, sources, target, (), ()))
        return target

    def _reach(self, step: int, result: Any, path: Callable[[Any], Any] | None = None) -> None:
        """Register the tensors inside a result: they get a place of their own when they are asked for."""
        if isinstance(result, (list, tuple)):
            inner = [(itemgetter(i), part) for i, part in enumerate(result)]
        elif isinstance(result, Float8TensorStorage):
            inner = [(attrgetter(name), getattr(result, name)) for name in ("_data", "_transpose", "_scale_inv")]
        elif isinstance(result, nvte.STORAGES):
            inner = [(_part(name), part) for name, part in result.get_metadata().items() if name != "quantizer"]
        else:
            return
        for get, part in inner:
            if isinstance(part, _CONSTANTS) or id(part) in self._places:
                continue
            reach = get if path is None else _then(path, get)
            if self._watch(part):
                self._parts_of.setdefault(id(part), (step, reach))
            self._reach(step, part, reach)

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
            parts, spec = nvte.take_apart(value)
            make = partial(_make_storage, spec)
        else:
            raise _Unreplayable
        return self._step(make, tuple(self._place(part) for part in parts), value)

    def _template(self) -> list[Any]:
        """The values before a run: constants in their places."""
        return [self._constants.get(place) for place in range(self._count)]

    def _with_liveness(self, outputs: tuple[int, ...]) -> list[Step]:
        """The steps, each with the places that nobody reads after it."""
        last: dict[int, int] = {}
        for i, step in enumerate(self._steps):
            for place in (*step.sources, step.target):  # a part has its place since somebody reads it
                last[place] = i
        kept = {*outputs, *self._constants}
        ending: dict[int, list[int]] = {}
        for place, i in last.items():
            if place not in kept:
                ending.setdefault(i, []).append(place)
        return [step._replace(done=tuple(ending.get(i, ()))) for i, step in enumerate(self._steps)]


def _is_constant(value: Any) -> bool:
    """Whether a value is the same for every run: a constant, or a list of such."""
    return isinstance(value, _CONSTANTS) or (isinstance(value, (list, tuple)) and all(isinstance(v, _CONSTANTS) for v in value))


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: second(first(value))


def _make_list(*values: Any) -> list[Any]:
    return list(values)


def _make_delayed(dtype: Any, rowwise: bool, columnwise: bool, internal: bool, scale: Any) -> Float8Quantizer:
    return Float8Quantizer(scale, None, dtype, rowwise=rowwise, columnwise=columnwise, internal=internal)


def _part(name: str) -> Callable[[Any], Any]:
    return lambda storage: storage.get_metadata()[name]


def _make_storage(spec: nvte.StorageSpec | nvte.Shell, *parts: Any) -> Any:
    return nvte.put_together(iter(parts), spec)
