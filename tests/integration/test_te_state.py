"""The extra state of NVIDIA's modules is a pickle: what it may say is read, and nothing of it is run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from te_client import RECIPES_OF_CLIENT, package, recipe_for

from fusible.compat.nvidia_state import read_pickled_state, read_state
from fusible.errors import CheckpointError

SIZE = 32
KINDS = ["Linear", "LayerNormLinear", "ops.Linear"]
TRACES: list[Any] = []


def trace(*args: Any) -> None:
    """What a payload would run."""
    TRACES.append(args)


class Payload:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture(params=[None, "1"], ids=["untrusted", "trusted"])
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In both states of the package's own switch."""
    if request.param is None:
        monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", raising=False)
    else:
        monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", request.param)
    with package() as te:
        yield te


def made(te: Any, kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    owner = te.ops if kind.startswith("ops.") else te
    return getattr(owner, kind.removeprefix("ops."))(SIZE, SIZE)


def trained(te: Any, kind: str, recipe: Any) -> torch.nn.Module:
    module = made(te, kind)
    for step in range(3):
        with te.autocast(recipe=recipe):
            y = module(torch.full((SIZE, SIZE), 2.0**step, device="cuda"))
        y.sum().backward()
    return module


def states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in module.state_dict().items() if name.endswith("_extra_state")}


@pytest.mark.parametrize("recipe_name", RECIPES_OF_CLIENT)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_package_saves_is_loaded(te: Any, kind: str, recipe_name: str) -> None:
    recipe = recipe_for(te, recipe_name)
    module, restored = trained(te, kind, recipe), made(te, kind)
    restored.load_state_dict(module.state_dict())
    x = torch.ones(SIZE, SIZE, device="cuda")
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(module(x), restored(x))
    held = [state for state in states(module).values() if state.numel()]
    assert bool(held) == (recipe_name == "delayed")
    again = states(restored)
    for name, state in states(module).items():
        if state.numel():
            one, two = (read_state(of.numpy().tobytes()) for of in (state, again[name]))
            same(one, two)


def same(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert set(one) == set(two)
        for name in one:
            same(one[name], two[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert repr(one) == repr(two)


def payloads() -> dict[str, bytes]:
    """Pickles that run something when they are read as Python reads them."""
    inner = io.BytesIO()
    torch.save(Payload(trace, 1), inner, _use_new_zipfile_serialization=False)
    recipes = "transformer_engine.common.recipe"
    return {
        "function": pickle.dumps(Payload(trace, 1)),
        "system": pickle.dumps(Payload(os.system, "true")),
        "eval": pickle.dumps(Payload(eval, "1")),
        "in a state": pickle.dumps({"recipe": Payload(trace, 1), "scale_fwd": torch.ones(2), "extra_fp8_variables": {}}),
        "protocol 0": pickle.dumps(Payload(trace, 1), protocol=0),
        "protocol 2": pickle.dumps(Payload(trace, 1), protocol=2),
        "getattr": pickle.dumps(Payload(getattr, Payload(getattr, 1, "real"), "bit_length")),
        "attribute of a class": b"cbuiltins\ngetattr\n(c" + recipes.encode() + b"\nDelayedScaling\nS'__init__'\ntR.",
        "change of a class": b"c" + recipes.encode() + b"\nDelayedScaling\n(N(dS'delayed'\nI0\nstb.",
        "change of a module": b"ctorch._utils\n_rebuild_tensor_v2\n(N(dS'x'\nI0\nstb.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.system\x93\x8c\x04true\x85R.",
        "old instance": b"(itests\ntrace\n.",
        "number": b"\x80\x02\x82\x01.",
        "persistent": b"Px\n.",
        "a tensor's own pickle": pickle.dumps(Payload(torch.storage._load_from_bytes, inner.getvalue())),
        "torch.load": pickle.dumps(Payload(torch.load, "x")),
    }


PASSED_OVER = {"old instance", "number", "persistent"}
"""Those in which the package finds no state, and which it does not read."""

SENTENCE = r"^the extra state of a module: expected tensors, plain values and recipes .*, got .*; .*\.$"


@pytest.mark.parametrize("read", [read_state, read_pickled_state], ids=["with the package's classes", "without"])
@pytest.mark.parametrize("name", payloads())
def test_a_payload_is_refused_by_the_reader(name: str, read: Any) -> None:
    """But that classes of the package are changed, which has no meaning where there are none."""
    TRACES.clear()
    if read is read_pickled_state and name in ("attribute of a class",):
        read(payloads()[name])
    else:
        with pytest.raises(CheckpointError, match=SENTENCE):
            read(payloads()[name])
    assert TRACES == []


@pytest.mark.parametrize("name", payloads())
def test_a_payload_is_refused_and_runs_nothing(te: Any, name: str) -> None:
    TRACES.clear()
    recipe = recipe_for(te, "delayed")
    for kind in KINDS:
        module = made(te, kind)
        before = repr(vars(type(recipe)))
        key = next(iter(states(module)))
        state = torch.frombuffer(bytearray(payloads()[name]), dtype=torch.uint8)
        with nullcontext() if name in PASSED_OVER else pytest.raises(CheckpointError, match=SENTENCE):
            module.load_state_dict({**module.state_dict(), key: state})
        assert repr(vars(type(recipe))) == before and TRACES == []


def test_a_recipe_of_a_framework_is_read_and_none_of_its_functions_called(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core has such: made of its own configuration, and pickled as any object is."""
    recipe = type(recipe_for(te, "delayed"))
    made_by = {"__init__": lambda self, *args: trace("made"), "__setstate__": lambda self, state: trace("state")}
    derived = type("Derived", (recipe,), {**made_by, "__module__": __name__})
    guarded = type("Guarded", (derived,), {"__new__": lambda cls, *args: trace("new"), "__module__": __name__})
    for kind in (derived, guarded):
        monkeypatch.setitem(globals(), kind.__name__, kind)
    one = object.__new__(derived)
    vars(one).update(margin=3, amax_history_len=7)
    TRACES.clear()
    read = read_state(pickle.dumps({"recipe": one}))["recipe"]
    assert type(read) is derived and vars(read) == vars(one) and TRACES == []
    named = f"c{__name__}\nDerived\n".encode()
    built = b"\x80\x02" + named + b")\x81}X\x07\x00\x00\x00delayedK\x00sb."
    bare = {"called": named + b")R.", "given": b"\x80\x02" + named + b"K\x01\x85\x81.", "method": built}
    for payload in (*bare.values(), pickle.dumps(object.__new__(guarded))):
        with pytest.raises(CheckpointError, match=SENTENCE):
            read_state(payload)
    monkeypatch.delitem(globals(), "Derived")
    with pytest.raises(CheckpointError, match=SENTENCE):
        read_state(bare["called"])
    assert TRACES == []


def test_megatron_core_reads_extra_state_by_the_same_reader(te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "megatron" / "core" / "extensions"
    folder.mkdir(parents=True)
    (folder / "transformer_engine.py").write_text("import pickle\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    TRACES.clear()
    assert module.pickle.loads(module.pickle.dumps({"scale_fwd": 1.0})) == {"scale_fwd": 1.0}
    with pytest.raises(CheckpointError, match=SENTENCE):
        module.pickle.loads(payloads()["function"])
    assert TRACES == []
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def test_a_file_in_place_of_the_tensor_is_read_as_weights_are(te: Any) -> None:
    TRACES.clear()
    recipe = recipe_for(te, "delayed")
    module = trained(te, "Linear", recipe)
    held = read_state(states(module)["_extra_state"].numpy().tobytes())
    del held["recipe"]
    for content in (held, {"x": Payload(trace, 1)}):
        file = io.BytesIO()
        torch.save(content, file)
        restored = made(te, "Linear")
        if content is held:
            restored.set_extra_state(file)
            same(read_state(states(restored)["_extra_state"].numpy().tobytes())["scale_fwd"], held["scale_fwd"])
        else:
            with pytest.raises(CheckpointError, match="the extra state of a module: expected .*, got what torch reads for no weights"):
                restored.set_extra_state(file)
    assert TRACES == []


@pytest.mark.parametrize("size", [2, 10**12], ids=str)
def test_a_tensor_larger_than_its_memory_is_refused(size: int) -> None:
    data = pickle.dumps(torch.ones(1))
    one, other = b"K\x01\x85", b"\x8a\x06" + size.to_bytes(6, "little") + b"\x85"
    at = data.rindex(one, 0, data.rindex(one))  # of the last two, a size and a stride, the size
    frame = data.replace(b"\x95" + data[3:11], b"", 1)
    at -= len(data) - len(frame)
    assert torch.equal(read_state(frame), torch.ones(1))
    with pytest.raises(CheckpointError, match=f"got a tensor .{size}. in the memory of 1 values"):
        read_state(frame[:at] + other + frame[at + 3 :])


def test_every_place_where_the_package_unpickles_is_known() -> None:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("NVIDIA's Python package is not installed")
    found = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if (node.func.value.id, node.func.attr) in {("pickle", "loads"), ("pickle", "load"), ("torch", "load"), ("np", "load")}:
                    found.add(str(path.relative_to(Path(spec.origin).parent)))
    assert found == {"pytorch/module/base.py", "pytorch/ops/op.py"}
