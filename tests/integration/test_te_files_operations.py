"""State dicts of NVIDIA's fusible operations under delayed scaling, as Fusible's operations take them, and back."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from te_client import package, recipe_for

import fusible
from fusible.compat import operations_from_nvidia, operations_to_nvidia, read_state_dict, write_state_dict
from fusible.compat.nvidia_files.operations import _format
from fusible.compat.nvidia_state import read_pickled_state
from fusible.errors import CheckpointError
from fusible.pytorch import ops
from fusible.tex import DType

SIZE, OPTIONS = 32, {"amax_history_len": 4, "margin": 1}
MODELS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "chain": lambda of: of.Sequential(of.LayerNorm(SIZE), of.Linear(SIZE, 64), of.GELU(), of.Linear(64, SIZE)),
    "quantized edge": lambda of: of.Sequential(of.RMSNorm(SIZE), of.Quantize(forward=True, backward=True), of.Linear(SIZE, SIZE)),
    "inside another": lambda of: torch.nn.Sequential(torch.nn.LayerNorm(SIZE), of.Sequential(of.Linear(SIZE, 64), of.SiLU(), of.Linear(64, SIZE))),
    "grouped": lambda of: of.Sequential(of.GroupedLinear(2, SIZE, SIZE)),
    "alone": lambda of: of.Linear(SIZE, SIZE),
}
EACH = pytest.mark.parametrize("name", MODELS)
FORMATS = pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        yield te


def stepped(te: Any, model: torch.nn.Module, step: int, fp8_format: str) -> torch.Tensor:
    """The output of a training step by the recipe of the model's own package; inputs grow, so that scales change."""
    torch.manual_seed(step)
    x = torch.randn(SIZE, SIZE) * 2**step
    theirs = any(type(module).__module__.startswith("transformer_engine") for module in model.modules())
    if theirs:
        recipe = recipe_for(te, "delayed", **OPTIONS)
        formats: Any = type(recipe.fp8_format)
        recipe.fp8_format = formats[fp8_format]
        context: Any = te.autocast(recipe=recipe)
    else:
        context = fusible.autocast(recipe=fusible.DelayedScaling(**OPTIONS, fp8_format=fusible.Format[fp8_format]))
    with context:
        y = model(x, *([torch.tensor([10, SIZE - 10])] if any("Grouped" in type(module).__name__ for module in model.modules()) else []))
    y.float().square().mean().backward()
    return y.detach()


def check_goes_on(te: Any, one: torch.nn.Module, other: torch.nn.Module, fp8_format: str) -> None:
    for step in range(3, 5):
        wanted = stepped(te, one, step, fp8_format)
        torch.testing.assert_close(stepped(te, other, step, fp8_format), wanted, rtol=2.0**-20, atol=2.0**-20 * wanted.abs().max().item())


@EACH
@FORMATS
def test_ours_goes_on_where_the_package_was(te: Any, name: str, fp8_format: str, tmp_path: Path) -> None:
    theirs, ours, fresh = MODELS[name](te.ops), MODELS[name](ops), MODELS[name](ops)
    for step in range(3):
        stepped(te, theirs, step, fp8_format)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    state = operations_from_nvidia(ours, read_state_dict(tmp_path / "theirs.pt"))
    assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
    fresh.load_state_dict({key: value for key, value in state.items() if "scaling_state" not in key})
    wanted = stepped(te, theirs, 3, fp8_format)
    assert not torch.allclose(stepped(te, fresh, 3, fp8_format), wanted, rtol=2.0**-12), "the inputs are too small for scales to matter"
    torch.testing.assert_close(stepped(te, ours, 3, fp8_format), wanted, rtol=2.0**-20, atol=2.0**-20 * wanted.abs().max().item())
    check_goes_on(te, theirs, ours, fp8_format)


@EACH
@FORMATS
def test_the_package_goes_on_where_ours_was(te: Any, name: str, fp8_format: str, tmp_path: Path) -> None:
    theirs, ours = MODELS[name](te.ops), MODELS[name](ops)
    for step in range(3):
        stepped(te, ours, step, fp8_format)
    write_state_dict(tmp_path / "ours.pt", operations_to_nvidia(ours))
    assert str(theirs.load_state_dict(torch.load(tmp_path / "ours.pt"))) == "<All keys matched successfully>"
    check_goes_on(te, ours, theirs, fp8_format)


@EACH
def test_what_was_never_quantized_has_no_scales(te: Any, name: str) -> None:
    theirs, ours = MODELS[name](te.ops), MODELS[name](ops)
    state = operations_from_nvidia(ours, theirs.state_dict())
    assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
    again = operations_to_nvidia(ours)
    assert list(again) == list(theirs.state_dict()) and not any(value.numel() for key, value in again.items() if key.endswith("_extra_state"))


def test_a_format_is_read_however_python_writes_it() -> None:
    """By its name in some versions, in others by its value."""
    values = b"ctransformer_engine.common.recipe\n_FormatHelper\n(G@|\x00\x00\x00\x00\x00\x00G@\xec\x00\x00\x00\x00\x00\x00t\x81"
    record = b"\x80\x02ctransformer_engine.common.recipe\nDelayedScaling\n)\x81}X\x0a\x00\x00\x00fp8_format%bsb."
    by_value = record % (b"ctransformer_engine.common.recipe\nFormat\n" + values + b"\x85R")
    by_name = record % b"cbuiltins\ngetattr\n(ctransformer_engine.common.recipe\nFormat\nX\x04\x00\x00\x00E4M3tR"
    found = _format(read_pickled_state(by_value))
    assert (found.forward, found.backward) == (DType.kFloat8E4M3, DType.kFloat8E5M2)
    assert _format(read_pickled_state(by_name)).backward is DType.kFloat8E4M3
    assert isinstance(DType.kFloat8E4M3, enum.IntEnum)


@pytest.mark.parametrize("damage", ["names", "size", "kind"])
def test_a_damaged_state_is_told(te: Any, damage: str) -> None:
    theirs, ours = MODELS["alone"](te.ops), MODELS["alone"](ops)
    for step in range(2):
        stepped(te, theirs, step, "HYBRID")
    state, key = theirs.state_dict(), "basic_ops.0._extra_state"
    held: Any = pickle.loads(state[key].numpy().tobytes())
    if damage == "names":
        del held["backward"]["amax_history_bwd"]
    elif damage == "size":
        held["forward"]["scale_fwd"] = torch.ones(4)
    state[key] = 3.0 if damage == "kind" else torch.frombuffer(bytearray(pickle.dumps(held)), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"^(the _extra_state of an operation|basic_ops.0._extra_state): expected .*, got"):
        operations_from_nvidia(ours, state)
