"""Every function of nvte refuses a bad call in one sentence that names it or the argument, or takes the value for what it is: the result is that of
the same numbers in a dense fp32 tensor."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from nvte_functions import DRAWN_CALLS, Draw
from scores import Scores, score
from wrong_values import changed, others, state

from fusible import nvte
from fusible.errors import DTypeError

pytestmark = pytest.mark.usefixtures("alone")

DRAWS = 4
"""Of each function, in the long run."""
NUMBERS = ("of ", "strided", "sparse")
"""Values that are numbers still: what is accepted of them must be right."""


class Call(NamedTuple):
    function: str
    seed: int
    argument: str
    what: str

    def __str__(self) -> str:
        return f"{self.function} (draw {self.seed}): {self.argument} {self.what}"


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Wrong values in the place of an argument of a function."""
    if isinstance(value, nvte.Tensor) and isinstance(value.data, torch.Tensor):
        yield "a torch.Tensor", value.data
        for what, other in others(value.data):
            if not isinstance(other, torch.Tensor):
                yield what, [value] if isinstance(other, list) else other
                continue
            try:
                yield what, nvte.make_nvte_tensor(other)
            except DTypeError:
                continue  # of a type that nvte has not
    elif isinstance(value, nvte.Tensor):
        yield from ((what, [value] if isinstance(other, list) else other) for what, other in others(object()))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], nvte.Tensor):
        yield from (("None", None), ("3", 3), ("empty list", []), ("a tensor", value[0]), ("longer list", [*value, value[0]]))
        yield from ((f"first {what}", [other, *value[1:]]) for what, other in _wrong(value[0]))
    else:
        yield from others(value)


def _calls(functions: Iterable[str], seeds: Iterable[int]) -> Iterator[Call]:
    for function in functions:
        for seed in seeds:
            given = DRAWN_CALLS[function](Draw(zlib.crc32(function.encode()) + seed))
            for argument, value in given.arguments.items() if not given.more else ():
                yield from (Call(function, seed, argument, what) for what, _ in _wrong(value))


def _arguments(call: Call) -> dict[str, Any]:
    return DRAWN_CALLS[call.function](Draw(zlib.crc32(call.function.encode()) + call.seed)).arguments


def _values(found: Any) -> list[torch.Tensor]:
    if isinstance(found, list | tuple):
        return [x for item in found for x in _values(item)]
    if not isinstance(found, nvte.Tensor) or not isinstance(found.data, torch.Tensor):
        return []
    dense = found.data.to_dense() if found.data.layout is not torch.strided else found.data
    return [dense.double()]


def _dense(call: Call, value: Any) -> Any:
    """The same numbers in a dense tensor of fp32, of those that a function computes with; of a list that begins with such, the list with that."""
    if isinstance(value, list) and value and call.what.startswith("first "):
        first = _dense(call._replace(what=call.what.removeprefix("first ")), value[0])
        return None if first is None else [first, *value[1:]]
    numbers = isinstance(value, nvte.Tensor) and call.what.startswith(NUMBERS) and call.function not in MACHINERY and value.data.numel() > 0
    return nvte.make_nvte_tensor(value.data.to_dense().float().clone(memory_format=torch.contiguous_format)) if numbers else None


def _means_the_same(call: Call, found: Any, dense: Any) -> bool:
    """Whether the result is that of the same numbers in a dense tensor of fp32."""
    again = getattr(nvte, call.function)(**{**_arguments(call), call.argument: dense})
    return all(torch.allclose(a, b, rtol=2.0**-6, atol=2.0**-6, equal_nan=True) for a, b in zip(_values(found), _values(again), strict=True))


def _score(call: Call, scores: Scores) -> None:
    arguments = _arguments(call)
    arguments[call.argument] = value = next(value for what, value in _wrong(arguments[call.argument]) if what == call.what)
    before, dense = list(state(arguments)), _dense(call, value)
    try:
        found = getattr(nvte, call.function)(**arguments)
    except Exception as error:
        scores.add(call, score(error, {call.function, call.argument}, changed=changed(before, list(state(arguments)))), error)
        return
    finally:
        nvte.set_execution_state(None)
        nvte.current_pass().amaxes.clear()
    if dense is not None:
        try:
            right = _means_the_same(call, found, dense)
        except DTypeError:
            right = True  # there is no such tensor of fp32
        scores.add(call, "accepted" if right else "wrong")
    else:
        scores.add(call, "accepted" if _allowed(call) else "accepted without a reason")


MACHINERY = (
    "flatten",
    "unflatten",
    "flatten_storage",
    "unflatten_storage",
    "dropout",
    "make_nvte_tensor",
    "check_sizes",
    "empty_like",
    "empty",
    "zeros",
)
"""Functions that hand on what they are given, or of which the values play no part."""
SHAPES = {"0-d", "empty", "one rank more", "flat", "longer", "shorter", "wider", "a list with -1", "empty list", "longer list"}
"""Functions take any leading dimensions, and shapes that broadcast; where shapes do not fit one another, they say so."""
ALLOWED = {
    "None": "it is the default, or asks for nothing",
    "-1": "the last dimension, a negative exponent, or no FP8",
    "99": "a large number is one",
    "3": "no FP8",
    "2.5": "no FP8",
    "meta": "of tensors on meta alone others on meta come",
}
ALSO = {
    **{
        (function, "window_size"): "a window may be wider than any sequence"
        for function in ("attention", "attention_cached", "attention_step", "dattention")
    },
    ("bytes_gathered", "shape"): "a question about any shape",
    ("has_own_blocks", "shape"): "a question about any shape",
    ("multi_cast_transpose_checked", "types"): "None asks for nothing",
    ("rows_together", "types"): "a question about any types",
    ("split", "sizes"): "without a last size of 0 the others still add up",
}
OPAQUE = {"of", "group", "slot", "leaves", "spec", "data", "amax"}
"""Arguments that a function hands on without a look."""


def _allowed(call: Call) -> bool:
    what = call.what.removeprefix("first ")
    if call.function in MACHINERY or call.argument in OPAQUE or (call.function, call.argument) in ALSO:
        return True
    return what in SHAPES or what in ALLOWED or what.startswith(NUMBERS)


def _scored(calls: Iterable[Call]) -> Scores:
    scores = Scores()
    for call in calls:
        _score(call, scores)
    return scores


def test_a_sample_of_bad_calls_of_nvte_is_refused_clearly() -> None:
    calls = list(_calls(DRAWN_CALLS, [0]))
    scores = _scored(random.Random(17).sample(calls, 1500))
    print(f"{len(calls)} bad calls of {len(DRAWN_CALLS)} functions, of which a sample: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_bad_call_of_a_word_is_refused_clearly(part: int) -> None:
    calls = list(_calls(sorted(DRAWN_CALLS)[part::8], range(DRAWS)))
    scores = _scored(calls)
    print(dict(scores.counts))
    assert not scores.unclear, "\n".join(scores.unclear)
    assert sum(scores.counts.values()) == len(calls) > 1500
