"""Kernels that are wrong in the ways that kernels are: wrappers around any method of a backend, made from its declaration and its samples.

A mutant calls the true method and spoils what it was given, what it wrote or what it returned. ``mutants`` gives those that apply to a function: a
mutant of NaN to one that gives floating-point numbers, of an argument to one that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.memory import holds, tensors
from fusible.conformance.table import Record, Sample
from fusible.tex import DType
from fusible.tex.interface.declare import DECLARATIONS

__all__ = ["Mutant", "changed", "mutants"]

Method = Callable[..., Any]
Wrapper = Callable[[Method], Method]


@dataclass(frozen=True)
class Mutant:
    """``wrap(method)`` is the wrong method; made anew for each check, for it may remember calls. ``reads``: the parameter of which it is given
    another value, and nothing else is changed."""

    name: str
    wrap: Wrapper
    reads: str = ""


# ---- what a call wrote or returned


def changed(method: Method, arguments: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The result, and the tensors in it and those of the arguments that the call wrote, each memory once."""
    before = {path: (x, x.clone()) for path, x in tensors(arguments)}
    result = method(**arguments)
    found = [x for _, x in tensors([result])]
    after = dict(tensors(arguments))
    found += [x for path, x in after.items() if path not in before or x is not before[path][0] or not _same(x, before[path][1])]
    return result, list({id(x): x for x in found}.values())


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


def _spoil(x: Tensor) -> None:
    """Other values in place of those of ``x``."""
    if x.dtype is torch.bool:
        x.logical_not_()
    elif x.dtype.is_floating_point:
        x.copy_(torch.where(x.isfinite(), x * 1.5 + 1, torch.ones_like(x)))
    else:
        x.bitwise_xor_(1)


def _part(x: Tensor, start: int, stop: int | None = None) -> None:
    flat = x.clone(memory_format=torch.contiguous_format).view(-1)
    if flat[start:stop].numel():
        _spoil(flat[start:stop])
        x.copy_(flat.view(x.shape))


def _each(change: Callable[[Tensor], None]) -> Wrapper:
    def wrap(method: Method) -> Method:
        def wrong(**arguments: Any) -> Any:
            result, found = changed(method, arguments)
            for x in found:
                if x.numel():
                    change(x)
            return result

        return wrong

    return wrap


def _last_row(x: Tensor) -> None:
    if x.dim() > 1:
        _spoil(x[..., -1, :])
    else:
        _part(x, -1)


def _tail(x: Tensor) -> None:
    """What is left over of blocks of 32."""
    if rest := x.numel() % 32:
        _part(x, x.numel() - rest)


def _floats(change: Callable[[Tensor], Tensor]) -> Wrapper:
    def alter(x: Tensor) -> None:
        if x.dtype.is_floating_point and x.itemsize > 1:
            x.copy_(change(x))

    return _each(alter)


def _one_percent(x: Tensor) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format).view(-1)
    y[y.float().nan_to_num(0, 0, 0).abs().argmax()] *= 0.98
    return y.view(x.shape)


def _transposed(x: Tensor) -> None:
    if x.dim() >= 2 and x.shape[-1] == x.shape[-2]:
        x.copy_(x.transpose(-1, -2).clone())
    elif x.dim() >= 2:
        x.copy_(x.transpose(-1, -2).reshape(x.shape).clone())


_ON_ANY = {
    **{f"wrong past {n} elements": _each(lambda x, n=n: _part(x, n)) for n in (1, 64, 1024, 4096)},
    "wrong last row": _each(_last_row),
    "wrong last column": _each(lambda x: _spoil(x[..., -1] if x.dim() else x)),
    "wrong first element": _each(lambda x: _part(x, 0, 1)),
    "wrong last element": _each(lambda x: _part(x, -1)),
    "wrong tail of blocks of 32": _each(_tail),
    "wrong in all of a batch but the first": _each(lambda x: _spoil(x[1:]) if x.dim() > 2 and len(x) > 1 else None),
    "transposed": _each(_transposed),
    "all zeros": _each(lambda x: x.zero_()),
}
_ON_FLOATS = {
    "NaN to 0": _floats(lambda x: torch.where(x.isnan(), 0, x)),
    "infinity to the largest": _floats(lambda x: torch.where(x.isinf(), x.sign() * torch.finfo(x.dtype).max, x)),
    "infinity to NaN": _floats(lambda x: torch.where(x.isinf(), torch.nan, x)),
    **{f"clamped to {limit}": _floats(lambda x, limit=limit: x.clamp(-limit, limit)) for limit in (1.0, 448.0)},
    "clamped to 65504": _floats(lambda x: x.clamp(-65504.0, 65504.0)),
    "without sign": _floats(lambda x: x.abs()),
    "rounded through bfloat16": _floats(lambda x: x.to(torch.bfloat16).to(x.dtype)),
    "two per cent off in one element": _floats(_one_percent),
}


# ---- results as objects


def _returning(change: Callable[[Any], Any]) -> Wrapper:
    return lambda method: lambda **arguments: change(method(**arguments))


def _of_another_dtype(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.to(torch.float64 if result.dtype.is_floating_point else torch.int16)
    return type(result)(_of_another_dtype(x) for x in result) if isinstance(result, list | tuple) else result


def _flat(result: Any) -> Any:
    if isinstance(result, Tensor) and result.dim() != 1:
        return result.reshape(-1)
    return type(result)(_flat(x) for x in result) if isinstance(result, list | tuple) else result


def _swapped(i: int, j: int) -> Callable[[Any], Any]:
    def swap(result: Any) -> Any:
        places = list(result)
        places[i], places[j] = places[j], places[i]
        return type(result)(places)

    return swap


def _dropped(i: int) -> Callable[[Any], Any]:
    def drop(result: Any) -> Any:
        return type(result)(torch.zeros_like(x) if place == i and isinstance(x, Tensor) else x for place, x in enumerate(result))

    return drop


def _buffered(method: Method) -> Method:
    """Results of one shape share one memory, call after call."""
    buffers: dict[Any, Tensor] = {}

    def kept(x: Any, place: Any, given: set[int]) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(kept(value, (place, i), given) for i, value in enumerate(x))
        if type(x) is not Tensor or id(x) in given:
            return x
        return buffers.setdefault((place, x.shape, x.dtype), torch.empty_like(x)).copy_(x)

    return lambda **arguments: kept(method(**arguments), 0, {id(x) for _, x in tensors(arguments)})


def _second_call(method: Method) -> Method:
    seen: set[Any] = set()

    def wrong(**arguments: Any) -> Any:
        key = tuple((path, x.shape, x.dtype) for path, x in tensors(arguments))
        result, found = changed(method, arguments)
        if key in seen:
            for x in found:
                _part(x, 0)
        seen.add(key)
        return result

    return wrong


def _twins(arguments: Any, x: Any) -> list[Tensor]:
    """The tensors among ``arguments`` that a result ``x`` that is none of them could lie in."""
    given = [y for _, y in tensors(arguments)]
    if type(x) is not Tensor or any(y is x for y in given):
        return []
    return [y for y in given if y.shape == x.shape and y.dtype is x.dtype and y.numel()]


def _aliasing(method: Method) -> Method:
    """The result in the memory of an argument that is like it."""

    def wrong(**arguments: Any) -> Any:
        result = method(**arguments)

        def placed(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(placed(value) for value in x)
            return next((y.copy_(x) for y in _twins(arguments, x)), x)

        return placed(result)

    return wrong


def _read_as(change: Callable[[Tensor], Tensor]) -> Wrapper:
    """Reads ``change(x)`` for the tensors ``x`` of arguments: plain ones, and those that quantized and grouped tensors are made of."""

    def wrap(method: Method) -> Method:
        def wrong(**arguments: Any) -> Any:
            parts: list[tuple[Any, str, Tensor, Tensor]] = []

            def read(x: Any) -> Any:
                if isinstance(x, list | tuple):
                    return type(x)(read(value) for value in x)
                if holds(x):
                    for name, part in vars(x).items():
                        if type(part) is Tensor:
                            parts.append((x, name, part, change(part)))
                            setattr(x, name, parts[-1][3])
                return change(x) if type(x) is Tensor else x

            try:
                return method(**{name: read(x) for name, x in arguments.items()})
            finally:
                for x, name, part, other in parts:
                    if getattr(x, name) is other:
                        setattr(x, name, part)

        return wrong

    return wrap


def _compact(x: Tensor) -> Tensor:
    """As if the elements lay one after the other."""
    if x.is_contiguous() or not x.numel() or x.numel() + x.storage_offset() > x.untyped_storage().nbytes() // x.itemsize:
        return x
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def _from_the_start(x: Tensor) -> Tensor:
    """As if the tensor began where its storage does."""
    return x.as_strided(x.shape, x.stride(), 0) if x.storage_offset() else x


def _not_of_none(method: Method) -> Method:
    def wrong(**arguments: Any) -> Any:
        if any(not x.numel() for _, x in tensors(arguments)):
            raise ZeroDivisionError("an empty tensor")
        return method(**arguments)

    return wrong


# ---- arguments


def _writes_to(name: str, first: bool) -> Wrapper:
    def wrap(method: Method) -> Method:
        def wrong(**arguments: Any) -> Any:
            result = method(**arguments)
            for _, x in tensors(arguments[name]):
                if x.numel():
                    _part(x, *((0, 1) if first else (-1, None)))
            return result

        return wrong

    return wrap


def _instead(name: str, value: Callable[[Any], Any], default: Any = Parameter.empty) -> Wrapper:
    """``value`` of the argument, or of its ``default`` where it is not given."""

    def wrong(method: Method, arguments: dict[str, Any]) -> Any:
        given = arguments.get(name, default)
        return method(**arguments if given is Parameter.empty else {**arguments, name: value(given)})

    return lambda method: lambda **arguments: wrong(method, arguments)


def _not_written(name: str) -> Wrapper:
    """What belongs in the argument is written to a copy of it."""

    def wrap(method: Method) -> Method:
        def wrong(**arguments: Any) -> Any:
            twin = deepcopy(arguments[name])
            return method(**{**arguments, name: twin})

        return wrong

    return wrap


def _filled(value: float) -> Callable[[Any], Any]:
    def fill(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(fill(part) for part in x)
        return torch.full_like(x, value) if type(x) is Tensor else x

    return fill


def _amaxes(change: Callable[[Tensor, Tensor], Tensor]) -> Wrapper:
    """Of the amaxes of quantizers: ``change(former, new)``."""

    def wrap(method: Method) -> Method:
        def wrong(**arguments: Any) -> Any:
            before = {path: (x, x.clone()) for path, x in tensors(arguments) if path.endswith("amax")}
            result = method(**arguments)
            for x, former in before.values():
                x.copy_(change(former, x.clone()))
            return result

        return wrong

    return wrap


def _scale_for_its_inverse(method: Method) -> Method:
    def wrong(**arguments: Any) -> Any:
        result = method(**arguments)
        for path, x in tensors([result]):
            if path.endswith("_scale_inv") and x.dtype is torch.float32:
                x.reciprocal_()
        return result

    return wrong


def _values(name: str, samples: list[Sample]) -> list[Any]:
    return [sample.arguments[name] for sample in samples if name in sample.arguments]


def _of_arguments(function: str, samples: list[Sample]) -> Iterator[Mutant]:
    written = {path.split(".")[0] for sample in samples for path in sample.written}
    for name, parameter in DECLARATIONS[function].signature.parameters.items():
        values = _values(name, samples)
        if any(next(tensors(x), None) is not None for x in values):
            whole = any(type(x) is Tensor for value in values for x in (value if isinstance(value, list | tuple) else [value]))
            if name not in written:
                yield Mutant(f"writes to the first element of {name}", _writes_to(name, True))
                yield Mutant(f"writes to the last element of {name}", _writes_to(name, False))
            else:
                yield Mutant(f"does not write {name}", _not_written(name), name)
            if whole:
                yield Mutant(f"reads {name} as zeros", _instead(name, _filled(0)), name)
                yield Mutant(f"reads {name} as ones", _instead(name, _filled(1)), name)
        if any(x is None for x in values) or parameter.default is None:
            yield Mutant(f"ignores {name}", _instead(name, lambda _: None), name)
        plain = [x for x in values if isinstance(x, bool | int | float | str | torch.dtype)]
        if len(set(plain)) == 1 and isinstance(plain[0], torch.dtype | DType):
            plain = []  # the type of the samples of one dtype
        if isinstance(parameter.default, bool | int | float | str):
            plain.insert(0, parameter.default)
        for value in list(dict.fromkeys(plain))[:2]:
            yield Mutant(f"takes {name} for {value}", _instead(name, lambda x, value=value: x if x is None else value, parameter.default), name)
        if len(plain) and isinstance(plain[0], bool):
            yield Mutant(f"inverts {name}", _instead(name, lambda x: x if x is None else not x, parameter.default), name)
        elif len(plain) and type(plain[0]) is float:
            yield Mutant(f"doubles {name}", _instead(name, lambda x: x if x is None else 2 * x, parameter.default), name)


def mutants(record: Record, samples: list[Sample], came: list[tuple[dict[str, Any], Any, list[Tensor]]]) -> list[Mutant]:
    """Those that apply; ``came``: arguments, result, and the tensors written or made, of a call of the true method with each sample."""
    found = list(_of_arguments(record.function, samples))
    every = [x for _, _, made in came for x in made]
    results = [result for _, result, _ in came]
    if every:
        several = any(x.dim() > 2 and len(x) > 1 for x in every)
        flat = all(x.dim() < 2 for x in every)
        found += [Mutant(name, wrap) for name, wrap in _ON_ANY.items() if (several or "batch" not in name) and not (flat and name == "transposed")]
        found.append(Mutant("second call wrong", _second_call))
        if any(any(True for _ in tensors({k: x for k, x in arguments.items() if k != "quantizer"})) for arguments, _, _ in came):
            found.append(Mutant("fails on empty tensors", _not_of_none))
        found += [Mutant("gaps between elements ignored", _read_as(_compact)), Mutant("offset in the storage ignored", _read_as(_from_the_start))]
    if any(x.dtype.is_floating_point and x.itemsize > 1 for x in every):
        found += [Mutant(name, wrap) for name, wrap in _ON_FLOATS.items()]
    pairs = [(arguments, x) for arguments, result, _ in came for x in (result if isinstance(result, list | tuple) else [result])]
    plain = [x for _, x in pairs if type(x) is Tensor]
    if plain:
        found.append(Mutant("result of another dtype", _returning(_of_another_dtype)))
    if any(type(x) is Tensor and all(x is not y for _, y in tensors(arguments)) for arguments, x in pairs):
        found.append(Mutant("result in one buffer", _buffered))
    if any(x.dim() != 1 for x in plain):
        found.append(Mutant("result flat", _returning(_flat)))
    if any(_twins(arguments, x) for arguments, x in pairs):
        found.append(Mutant("result in an argument's memory", _aliasing))
    lists = [result for result in results if isinstance(result, list | tuple)]
    if lists:
        most = max(len(result) for result in lists)
        for i in range(min(most, 6)):
            if any(isinstance(x, Tensor) for result in lists for x in result[i : i + 1]):
                found.append(Mutant(f"result {i} left out", _returning(_dropped(i))))
            if i and all(len(result) > i for result in lists):
                found.append(Mutant(f"results {i - 1} and {i} swapped", _returning(_swapped(i - 1, i))))
    if any(path.endswith("amax") and any(x is y for y in made) for arguments, _, made in came for path, x in tensors(arguments)):
        found += [
            Mutant("amax not written", _amaxes(lambda old, new: old)),
            Mutant("amax the larger of former and new", _amaxes(lambda old, new: torch.maximum(old, new) + old)),
            Mutant("amax of what was quantized", _amaxes(lambda old, new: new * 4)),
        ]
    if any(path.endswith("_scale_inv") and x.dtype is torch.float32 for _, result, _ in came for path, x in tensors([result])):
        found.append(Mutant("scale for its inverse", _scale_for_its_inverse))
    return found
