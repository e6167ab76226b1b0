"""Every public method of quantizers and quantized tensors, and every operation of torch that these know, refuses a bad call and changes nothing."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from quantized_calls import MAKERS, Right, methods_of, right_calls, values
from scores import Scores, score
from wrong_values import changed, others, state

from fusible.errors import FusibleError

ANY = {
    "over": "it says what is next to a shard: torch calls it",
    "__torch_dispatch__": "torch calls it",
}
"""Methods that are not called with wrong values here, and why."""
RIGHT: dict[tuple[str, str], str] = {
    ("fsdp_pre_all_gather", "contiguous_orig_stride"): "it is not read",
    ("fsdp_pre_all_gather", "module"): "it is not read",
    ("fsdp_pre_all_gather", "mp_policy"): "it is not read",
    ("fsdp_pre_all_gather", "orig_size"): "it is not read",
    ("quantizes_like", "other"): "what is no quantizer quantizes otherwise",
    ("calibrate", "tensor"): "a quantizer without state has nothing to update",
    ("restore_from_saved", "tensors"): "whoever saved the tensors has them; they are put back as they are",
}
"""Arguments that may be anything, and why."""
LAYOUTS = {"0-d", "empty", "one rank more", "flat", "longer", "shorter", "wider", "meta", "strided"}
"""Of a tensor that is quantized anew: any shape that the format can have, on any device."""
ACCEPTED: dict[str, set[str]] = {
    "all_gather_outputs": {"first longer", "first shorter", "first empty", "first strided"},
    "device": {"None"},
    "dtype": {"None", "3"},
    "fake_dtype": {"3"},
    "gathered": {"first strided"},
    "inp": LAYOUTS | {"sparse", *(f"of {name}" for name in ("int64", "float64", "uint8", "bool", "complex64", "int8"))},
    "list_of_tensors": {"empty list", "longer list", "shorter list", *(f"first {what}" for what in LAYOUTS)},
    "parts": {"longer list", "shorter list"},
    "noop_flag": {"None", "0-d", "flat", "strided", *(f"of {name}" for name in ("int64", "float64", "uint8", "bool", "int8"))},
    "rowwise": {"3"}, "columnwise": {"3"}, "rowwise_usage": {"3", "None"}, "columnwise_usage": {"3"},
    "shape": {"longer list", "shorter list", "a list with a large number", "empty list"},
    "src": {"strided", "one rank more"},
    "tensor": LAYOUTS,
}  # fmt: skip
"""Wrong values that are none: a number for a flag, a type by its number, more or fewer rows."""
IDENTITY = {f"{first}of {name}" for first in ("", "first ") for name in ("int64", "float64", "uint8", "bool", "complex64", "int8")}
"""What only an identity takes, which leaves a tensor as it is."""
ALIASES = {"quantize", "create_empty_quantized_tensor"}
"""Functions of tex that do what the methods are for, and say so."""


def _accepted(call: Right, argument: str, what: str) -> bool:
    if (call.name, argument) in RIGHT or what in ACCEPTED.get(argument, ()):
        return True
    return call.kind.startswith("identity") and what in IDENTITY


def _bad(calls: list[Right]) -> Iterator[tuple[Right, str, str]]:
    for call in calls:
        for argument, good in call.arguments().items():
            yield from ((call, argument, what) for what, _ in others(good))


@pytest.mark.parametrize("kind", MAKERS)
def test_every_method_with_arguments_is_swept(kind: str) -> None:
    swept = {(call.kind, call.name) for call in right_calls()}
    for subject in (MAKERS[kind](), MAKERS[kind]()(values())):
        for name in methods_of(type(subject)):
            takes = [p for p in inspect.signature(getattr(subject, name)).parameters.values() if p.kind is not p.VAR_KEYWORD]
            assert not takes or name in ANY or (f"{kind} {type(subject).__name__}", name) in swept, name


@pytest.mark.parametrize("share", [pytest.param(8, id="a sample"), pytest.param(1, id="every one", marks=pytest.mark.slow)])
def test_a_bad_call_of_a_method_is_refused_clearly(share: int) -> None:
    scores, calls = Scores(), list(_bad(right_calls()))
    for call, argument, what in random.Random(7).sample(calls, len(calls) // share):
        subject, arguments = call.make(), call.arguments()
        arguments[argument] = next(value for said, value in others(arguments[argument]) if said == what)
        before = list(state([vars(subject), arguments]))
        label = f"{call.kind}.{call.name}: {argument} {what}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a quantizer is replaced
                call.call(subject, arguments)
        except Exception as error:
            wrote = changed(before, list(state([vars(subject), arguments])))
            scores.add(label, score(error, {call.name, argument, call.kind.split()[1], *ALIASES}, changed=wrote), error)
        else:
            scores.add(label, "accepted" if _accepted(call, argument, what) else "accepted without a reason")
    print(dict(scores.counts))
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 2500 // share


Operation = tuple[Callable[..., Any], dict[str, Any]]
OPERATIONS: dict[str, Operation] = {
    "as_strided": (lambda x, size, stride: torch.as_strided(x, size, stride), {"size": [128, 64], "stride": [64, 1]}),
    "chunk": (lambda x, chunks, dim: torch.chunk(x, chunks, dim), {"chunks": 2, "dim": 0}),
    "clone": (lambda x, memory_format: torch.clone(x, memory_format=memory_format), {"memory_format": torch.preserve_format}),
    "copy_": (lambda x, source: x.copy_(source), {"source": values() + 1}),
    "data": (lambda x, tensor: setattr(x, "data", tensor), {"tensor": values() + 1}),
    "empty_like": (lambda x, dtype, device: torch.empty_like(x, dtype=dtype, device=device), {"dtype": torch.float32, "device": "cpu"}),
    "expand": (lambda x, size: x.expand(size), {"size": [128, 64]}),
    "narrow": (lambda x, dim, start, length: torch.narrow(x, dim, start, length), {"dim": 0, "start": 0, "length": 64}),
    "new_empty": (lambda x, size, dtype: x.new_empty(size, dtype=dtype), {"size": [128, 64], "dtype": torch.float32}),
    "new_zeros": (lambda x, size, dtype: x.new_zeros(size, dtype=dtype), {"size": [128, 64], "dtype": torch.float32}),
    "reshape": (lambda x, shape: x.reshape(shape), {"shape": [2, 64, 64]}),
    "split": (lambda x, size, dim: torch.split(x, size, dim), {"size": 64, "dim": 0}),
    "to": (lambda x, device, dtype: x.to(device=device, dtype=dtype), {"device": "cpu", "dtype": torch.bfloat16}),
    "view": (lambda x, shape: x.view(shape), {"shape": [2, 64, 64]}),
    "zeros_like": (lambda x, dtype: torch.zeros_like(x, dtype=dtype), {"dtype": torch.float32}),
    "add_": (lambda x, other: x.add_(other), {"other": values()}),
    "getitem": (lambda x, index: x[index], {"index": 3}),
}


def _result(run: Callable[..., Any], subject: Any, arguments: dict[str, Any]) -> Any:
    """Shapes and dtypes, or the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of some casts once in a process
            found = run(subject, **arguments)
    except Exception as error:
        return error
    return [(tuple(part.shape), part.dtype) for part in (found if isinstance(found, tuple) else (found,)) if isinstance(part, torch.Tensor)]


def unlike_the_values(make: Callable[[], Any]) -> tuple[dict[str, int], list[str]]:
    """How many bad operations on what ``make`` gives were refused and taken, and those that are not as those on its dequantized values."""
    counts, wrong = {"refused": 0, "taken": 0}, []
    for name, (run, good) in OPERATIONS.items():
        for argument in good:
            for what, bad in others(good[argument]):
                arguments = {**good, argument: bad}
                subject = make()
                wanted, before = _result(run, subject.dequantize(), dict(arguments)), list(state(vars(subject)))
                found = _result(run, subject, dict(arguments))
                label = f"{name}: {argument} {what}: {found!r} instead of {wanted!r}"
                refused = isinstance(found, Exception)
                if refused and not isinstance(found, FusibleError) and type(found) is not type(wanted):
                    wrong.append(label)
                elif refused and changed(before, list(state(vars(subject)))):
                    wrong.append(f"changed: {label}")
                elif not refused and (isinstance(wanted, Exception) or found != wanted):
                    wrong.append(label)
                counts["refused" if refused else "taken"] += 1
    return counts, wrong


@pytest.mark.parametrize("kind", MAKERS)
def test_operations_of_torch_take_and_refuse_what_they_do_of_the_values(kind: str) -> None:
    counts, wrong = unlike_the_values(lambda: MAKERS[kind]()(values()))
    print(kind, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > 150


def test_what_would_not_be_noticed_could_not_fail() -> None:
    """A method that writes before it refuses, and one that takes anything."""
    subject = MAKERS["delayed"]()
    before = list(state([vars(subject)]))
    with suppress(RuntimeError):
        subject.scale.fill_(3.0)
        raise RuntimeError
    assert changed(before, list(state([vars(subject)])))
    call = next(call for call in right_calls() if call.name == "set_usage")
    assert not _accepted(call, "rowwise", "a text")
