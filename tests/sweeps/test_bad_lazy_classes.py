"""What the lazy compiler is told beside its functions refuses a bad call in one sentence: plugins, inputs, settings, executables, traces, modules."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scores import Scores, score
from test_bad_lazy_calls import _wrong

from fusible import lazy
from fusible.errors import DTypeError
from fusible.lazy.engine import pjrt, plugins
from fusible.lazy.flat_ir.ops.elementwise import TanhOp
from fusible.lazy.frontend import record
from fusible.lazy.trace import TraceOp

F32 = lazy.float32
FUNCTION = ctypes.CDLL(None).puts
"""A function of a library, which is never called here."""
Case = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


def _setting(name: str) -> Case:
    def assign(value: Any) -> None:
        former = getattr(lazy.config, name)
        try:
            setattr(lazy.config, name, value)
        finally:
            setattr(lazy.config, name, former)

    return assign, lambda: {"value": getattr(lazy.config, name)}


def _linear() -> lazy.Linear:
    module = lazy.Linear(2, 2)
    module.initialize_dummy_parameters()
    return module


def _of_executables(folder: Path) -> dict[str, Case]:
    made = lazy.compile(lambda a: a + 1.0, args=(lazy.InputInfo((2,), F32),))
    made.save(folder / "saved")
    ones = lambda: {"a": lazy.ones((2,))}  # noqa: E731
    return {
        "save": (made.save, lambda: {"path": folder / "again", "binary": False}),
        "load": (lazy.Executable.load, lambda: {"path": folder / "saved", "trust_binary": False}),
        "executable": (lambda a: made(a), ones),
        "executable.run": (lambda a: made.run(a), ones),
    }


def _of_classes() -> dict[str, Case]:
    modules = {
        "BatchNorm": {"num_features": 3, "dtype": F32, "eps": 1e-5},
        "Conv": {"in_channels": 2, "out_channels": 2, "kernel_dims": (3, 3), "bias": True},
        "ConvTranspose": {"in_channels": 2, "out_channels": 2, "kernel_dims": (3, 3), "bias": True},
        "DefaultParameter": {"shape": (2, 3), "dtype": F32},
        "Embedding": {"num_embeddings": 3, "embedding_dim": 4, "dtype": F32},
        "GroupNorm": {"num_groups": 2, "num_channels": 4, "dtype": F32, "eps": 1e-5},
        "InstanceNorm": {"num_channels": 3, "dtype": F32, "eps": 1e-5},
        "LayerNorm": {"normalized_shape": 4, "dtype": F32, "eps": 1e-5},
        "Linear": {"in_features": 2, "out_features": 3, "bias": True, "dtype": F32},
    }
    recorded = lazy.ones((2,))
    return {
        "device": (lazy.device, lambda: {"device": "cpu"}),
        "InputInfo": (lazy.InputInfo, lambda: {"shape": (2, 3), "dtype": F32, "donate": False}),
        "NamedDimension": (lazy.NamedDimension, lambda: {"name": "n", "min": 1, "opt": 2, "max": 3}),
        "DimensionInputInfo": (lazy.DimensionInputInfo, lambda: {"value_bounds": (1, 2, 3)}),
        "Stream": (lazy.Stream, lambda: {"device": lazy.device("cpu")}),
        "Tensor": (lazy.Tensor, lambda: {"data": [1.0, 2.0], "dtype": F32, "name": "x", "device": lazy.device("cpu")}),
        "Trace": (lazy.Trace, lambda: {"outputs": [recorded + 1.0], "inputs": [recorded]}),
        "load_state_dict": (
            lambda state_dict, strict: _linear().load_state_dict(state_dict, strict), lambda: {"state_dict": _linear().state_dict(), "strict": True}
        ),
        **{name: (getattr(lazy, name), lambda given=given: dict(given)) for name, given in modules.items()},
    }  # fmt: skip


def _of_plugins() -> dict[str, Case]:
    registered = {"name": "a::b", "handler": FUNCTION, "version": "1", "namespace": "", "symbol": None, "outputs": None}
    called = {"name": "known", "output_info": [((2,), F32)], "version": "1", "namespace": ""}
    return {
        "register_plugin": (lazy.register_plugin, lambda: dict(registered)),
        "plugin": (lazy.plugin, lambda: {**called, "inputs": [lazy.ones((2,))]}),
    }


SETTINGS = ("engine", "timing_cache_file_path", "enable_input_validation", "use_cache_in_eager_mode", "extra_error_information")
ACCEPTED: dict[tuple[str, str], set[str]] = {
    **{(name, "eps"): {"2.5", "99"} for name in ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm")},
    **{(name, argument): {"99"} for name in ("Conv", "ConvTranspose") for argument in ("in_channels", "out_channels")},
    **{(name, "kernel_dims"): {"3", "empty list", "longer list"} for name in ("Conv", "ConvTranspose")},
    **{("Linear", argument): {"99"} for argument in ("in_features", "out_features")},
    **{("Embedding", argument): {"99"} for argument in ("num_embeddings", "embedding_dim")},
    ("BatchNorm", "num_features"): {"99"},
    ("InstanceNorm", "num_channels"): {"99"},
    ("DefaultParameter", "shape"): {"3", "empty list", "longer list"},
    ("InputInfo", "shape"): {"3", "empty list", "longer list"},
    ("LayerNorm", "normalized_shape"): {"99", "a list"},
    ("NamedDimension", "max"): {"99"},
    ("NamedDimension", "name"): {"a text"},
    ("Tensor", "data"): {"a tensor", "3", "empty list", "longer list", "a list with a number", "a list with -9"},
    ("Tensor", "device"): {"None"},
    ("Tensor", "dtype"): {"None"},
    ("Tensor", "name"): {"a text", "None"},
    ("Trace", "inputs"): {"empty list"},
    ("Trace", "outputs"): {"empty list", "longer list"},
    ("config.engine", "value"): {"a text"},
    ("config.timing_cache_file_path", "value"): {"a text"},
    ("config.extra_error_information", "value"): {"empty list", "longer list"},
    ("load", "path"): {"a text"},
    ("plugin", "inputs"): {"a set", "empty list", "longer list", "a list with a number", "a list with -9"},
    ("plugin", "namespace"): {"None"},
    ("plugin", "output_info"): {"longer list"},
    ("register_plugin", "name"): {"a text"},
    ("register_plugin", "namespace"): {"a text"},
    ("register_plugin", "outputs"): {"a class"},
    ("register_plugin", "symbol"): {"a text"},
    ("register_plugin", "version"): {"a text"},
    ("save", "path"): {"a text"},
}
"""Wrong values that are none: other sizes and names, one size for a shape, numbers for tensors."""
NAMES = {"Trace": {"trace"}, "executable.run": {"executable"}}


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Case]]:
    monkeypatch.chdir(tmp_path)  # a path that is a text is a file here
    monkeypatch.setattr(pjrt, "register_target", lambda name, handler: None)
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    lazy.register_plugin("known", FUNCTION)
    yield {**_of_plugins(), **_of_classes(), **_of_executables(tmp_path), **{f"config.{name}": _setting(name) for name in SETTINGS}}


def _forget() -> None:
    for key in [key for key in plugins._PLUGINS if key[0] != "known"]:
        del plugins._PLUGINS[key]


def test_every_right_call_is_one(cases: dict[str, Case]) -> None:
    for run, arguments in cases.values():
        run(**arguments())


def test_every_bad_call_is_refused_clearly(cases: dict[str, Case]) -> None:
    scores = Scores()
    for title, (run, arguments) in cases.items():
        for argument, good in arguments().items():
            for what, bad in _wrong(good):
                _forget()
                before = dict(plugins._PLUGINS)
                try:
                    run(**{**arguments(), argument: bad})
                except Exception as error:
                    names = {title, *title.split("."), *arguments(), *NAMES.get(title, ())}
                    scores.add((title, argument, what), score(error, names, changed=before != plugins._PLUGINS, lines=True), error)
                else:
                    accepted = what in ACCEPTED.get((title, argument), ())
                    scores.add((title, argument, what), "accepted" if accepted else "accepted without a reason")
    print(f"{scores.counts.total()} bad calls of {len(cases)}: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 600


class Shifted(TraceOp):
    """An operation from outside of the package, with attributes of any kind."""

    first: Any
    second: Any = 0

    def to_flat_ir(self, inputs: Any, outputs: Any) -> None:
        TanhOp(list(inputs), list(outputs))


STAYING = (3, 0.5, math.nan, True, None, "a", (1, (2.5, "b")), F32, frozenset({1}), len)
CHANGING = ([1], [], {"a": 1}, {1}, bytearray(b"a"), np.ones(2), lazy.ones((2,)), torch.ones(2), (1, [2]), ((), ({},)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["first", "second"])
def test_an_operation_takes_attributes_that_stay_as_they_are(name: str, compiled: bool) -> None:
    x = lazy.Tensor([0.0, 1.0])

    def run(value: Any) -> list[float]:
        def shifted(x: Any) -> Any:
            return record(Shifted(**{"first": 1, name: value}), x)

        return (lazy.compile(shifted, args=[lazy.InputInfo((2,), F32)]) if compiled else shifted)(x).tolist()

    for value in STAYING:
        for _ in range(2):
            assert run(value) == pytest.approx([0.0, math.tanh(1.0)])
    for value in CHANGING:
        with pytest.raises(DTypeError, match=rf"{name} of the operation Shifted( of compile)?: expected a value with a hash, .*, got a ") as caught:
            run(value)
        assert type(value).__name__ in str(caught.value)
