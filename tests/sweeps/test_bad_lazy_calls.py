"""Every public function of the lazy compiler refuses a bad call in one sentence that names it or the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
from scores import Scores, score
from wrong_values import Strange

from fusible import lazy
from fusible.lazy.frontend.interface import FUNCTIONS

PREFERRED = (lazy.float32, lazy.int32, lazy.bool, lazy.uint32, lazy.float8)
STATIC: dict[str, dict[str, Any]] = {
    "arange": {"start": 0, "stop": 4},
    "avgpool": {"input": (1, 2, 4, 4), "kernel_dims": (2, 2), "stride": (1, 1), "padding": ((0, 0), (0, 0))},
    "broadcast_to": {"shape": (2, 2, 3)},
    "concatenate": {"dim": 0},
    "copy": {"device": lazy.device("cpu")},
    "cumsum": {"dim": 0},
    "dot_general": {"contracting": ((1,), (1,))},
    "expand": {"sizes": (2, 3)},
    "full": {"shape": (2, 3), "value": 1.0},
    "full_like": {"value": 1.0},
    "gather": {"dim": 0, "index": (2,)},
    "iota": {"shape": (2, 3)},
    "masked_fill": {"value": 1.0},
    "matmul": {"rhs": (3, 2)},
    "maxpool": {"input": (1, 2, 4, 4), "kernel_dims": (2, 2), "stride": (1, 1), "padding": ((0, 0), (0, 0))},
    "ones": {"shape": (2, 3)},
    "outer": {"vec1": (2,), "vec2": (3,)},
    "pad": {"pad": ((0, 1), (1, 0))},
    "permute": {"perm": (1, 0)},
    "dequantize": {"scale": 0.5},
    "quantize": {"scale": ()},
    "rand": {"shape": (2, 3)},
    "randn": {"shape": (2, 3)},
    "random_words": {"seed": (1,), "counter": (4,)},
    "repeat": {"repeats": 2, "dim": 0},
    "reshape": {"shape": (3, 2)},
    "resize": {"input": (1, 2, 4, 4), "output_shape": (1, 2, 8, 8)},
    "split": {"num_split_or_sizes": 2, "dim": 0},
    "squeeze": {"input": (1, 3), "dims": 0},
    "topk": {"k": 1, "dim": 0},
    "transpose": {"dim0": 0, "dim1": 1},
    "unsqueeze": {"dim": 0},
    "zeros": {"shape": (2, 3)},
}
"""Of each function the arguments that have no default; of a tensor its shape, where that is not [2, 3]."""
OTHERS = {
    "manual_seed": {"seed": 3},
    "default_stream": {"device": lazy.device("cpu")},
    "compile": {"func": lambda a: a + 1.0, "optimization_level": 3, "args": (lazy.InputInfo((2,), lazy.float32),), "kwargs": None, "donate": ()},
}
"""Functions that take no tensors, with their arguments."""
NOT_SWEPT = {
    "plugin": "its keywords are the plugin's own, and its call is refused by the plugin's declaration (test_lazy_plugin)",
    "register_plugin": "it takes a compiled library (test_lazy_plugin)",
}


class Call(NamedTuple):
    function: str
    argument: str
    what: str

    def __str__(self) -> str:
        return f"{self.function}: {self.argument} {self.what}"


def _tensor(shape: Iterable[int], dtype: Any) -> lazy.Tensor:
    return lazy.cast(lazy.ones(tuple(shape)), dtype) if dtype is not lazy.float32 else lazy.ones(tuple(shape))


def _arguments(name: str) -> dict[str, Any]:
    """A right call."""
    if name in OTHERS:
        return dict(OTHERS[name])
    constraints = FUNCTIONS[name].constraints
    legal = [given for given, accepted in constraints.combinations() if accepted]
    chosen = min(legal, key=lambda given: [PREFERRED.index(d) if d in PREFERRED else 9 for d in given.values()])
    static, arguments = STATIC.get(name, {}), {}
    for p in inspect.signature(getattr(lazy, name)).parameters.values():
        kind = constraints.inputs.get(p.name, "")
        dtype = chosen.get(kind.strip("[]?"))
        if p.name == "dtype" or p.name.endswith("_dtype"):
            arguments[p.name] = dtype if p.default is p.empty else p.default
        elif kind.startswith("["):
            arguments[p.name] = [_tensor((2, 3), dtype), _tensor((2, 3), dtype)]
        elif kind and not kind.endswith("?"):
            arguments[p.name] = _tensor(static.get(p.name, (2, 3)), dtype)
        elif p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            arguments[p.name] = static[p.name] if p.name in static else p.default
    return arguments


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    yield "an object", Strange()
    yield "a text", "bogus"
    yield "a nested list", [[None]]
    yield "a class", Strange
    yield "a set", {1, 2}
    if value is not None:
        yield "None", None
    if isinstance(value, lazy.Tensor):
        shape = [int(n) for n in value.trace_tensor.shape]
        for dtype in (lazy.float32, lazy.int32, lazy.bool, lazy.uint8, lazy.float16, lazy.float64):
            if dtype is not value.dtype:
                yield f"of {dtype}", _tensor(shape, dtype)
        wider = [*shape[:-1], *(n + 1 for n in shape[-1:])]
        for what, other in (("0-d", []), ("empty", [0, *shape[1:]]), ("one rank more", [1, *shape]), ("wider", wider)):
            yield what, _tensor(other, value.dtype)
        return
    yield "a tensor", _tensor((2, 3), lazy.float32)
    if isinstance(value, list | tuple):
        yield from (("3", 3), ("empty list", []), ("longer list", [*value, *value[:1]]), ("a list with None", [None, *value[1:]]))
        yield from (("a list with a text", ["bogus", *value[1:]]), ("a list with a number", [2.5, *value[1:]]), ("a list with -9", [-9, *value[1:]]))
    elif isinstance(value, bool):
        yield "a list", [True]
    else:
        yield from (("2.5", 2.5), ("-9", -9), ("99", 99), ("a list", [value]))


def _calls() -> list[Call]:
    return [Call(name, argument, what) for name in _swept() for argument, value in _arguments(name).items() for what, _ in _wrong(value)]


def _swept() -> list[str]:
    return [name for name in lazy.__all__ if inspect.isfunction(getattr(lazy, name)) and name not in NOT_SWEPT]


ALLOWED = {"2.5", "-9", "99", "a list", "None", "3", "empty list", "longer list", "a tensor", "0-d", "empty", "one rank more", "wider"}
"""What may be right where the argument allows it: a number for a tensor, a negative dimension, a list of one, None for the default, any shape."""


def _scored(calls: Iterable[Call]) -> Scores:
    scores = Scores()
    for call in calls:
        arguments = _arguments(call.function)
        arguments[call.argument] = next(value for what, value in _wrong(arguments[call.argument]) if what == call.what)
        try:
            getattr(lazy, call.function)(**arguments)
        except Exception as error:
            names = {call.function, *arguments}
            own = call.argument == "args" and str(error).startswith(USERS)
            scores.add(call, "accepted" if own else score(error, names, lines=True), error)
        else:
            scores.add(call, "accepted" if _allowed(call) else "accepted without a reason")
    return scores


def _allowed(call: Call) -> bool:
    return call.what in ALLOWED or call.what.startswith("of ") or (call.function, call.argument) in OPEN


OPEN = {("resize", "output_shape"): "floating numbers are factors"}
USERS = ("unsupported operand", "can only concatenate")
"""Errors of the user's own function, which are the user's to read."""


@pytest.mark.parametrize("name", _swept())
def test_every_good_call_is_one(name: str) -> None:
    getattr(lazy, name)(**_arguments(name))


def test_every_bad_call_is_refused_clearly() -> None:
    calls = _calls()
    scores = _scored(calls)
    print(f"{len(calls)} bad calls of {len(_swept())} functions: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 1500
