"""The scaling states of delayed scaling in state dicts: NVIDIA's modules and ours load each other's, strictly, and go on as if nothing had been."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package
from te_states import MODULES, stepped

from fusible.compat import te_modules
from fusible.compat.nvidia_state import read_state
from fusible.errors import CheckpointError

EACH = pytest.mark.parametrize("name", MODULES)


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        yield te


def made(of: Any, name: str) -> torch.nn.Module:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0} if name == "TransformerLayer" else {}
    return getattr(of, name)(*MODULES[name], **options)


def trained(te: Any, name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """NVIDIA's module and ours after the same three steps."""
    theirs, ours = made(te, name), made(te_modules, name)
    ours.load_state_dict(theirs.state_dict())
    for step in range(3):
        one, other = stepped(te, theirs, step), stepped(te, ours, step)
        torch.testing.assert_close(other, one, rtol=2.0**-20, atol=2.0**-20 * one.abs().max().item())
    return theirs, ours


def scales(state: dict[str, Any]) -> dict[str, Any]:
    """By the names of extra states, what they say; but of attention, which is not quantized: the package has scales of it that were never used."""
    held = {name: value for name, value in state.items() if name.endswith("_extra_state") and value.numel() and "core_attention" not in name}
    read = {name: read_state(value.numpy().tobytes()) for name, value in held.items()}
    return {f"{name} {key}": value for name, held in read.items() for key, value in held.items() if key != "fusible"}


@EACH
def test_both_write_the_same(te: Any, name: str) -> None:
    theirs, ours = (module.state_dict() for module in trained(te, name))
    assert list(theirs) == list(ours)
    wanted, found = scales(theirs), scales(ours)
    assert wanted.keys() == found.keys() and len(wanted) >= 6
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=2.0**-20, atol=0)
        else:
            assert str(found[key]) == str(value), key


@EACH
def test_each_loads_the_others_and_goes_on(te: Any, name: str) -> None:
    theirs, ours = trained(te, name)
    loaded = [made(of, name) for of in (te, te_modules, te_modules)]
    for module, state in zip(loaded, (ours.state_dict(), theirs.state_dict(), ours.state_dict()), strict=True):
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    for step in range(3, 5):
        wanted = stepped(te, theirs, step)
        fresh = made(te_modules, name)
        fresh.load_state_dict({key: value for key, value in theirs.state_dict().items() if "_extra_state" not in key}, strict=False)
        for module in (ours, *loaded):
            torch.testing.assert_close(stepped(te, module, step), wanted, rtol=2.0**-20, atol=2.0**-20 * wanted.abs().max().item())
        assert not torch.allclose(stepped(te, fresh, step), wanted, rtol=2.0**-12), "the inputs are too small for scales to matter"


def test_a_running_iteration_goes_on_where_it_was(te: Any) -> None:
    """Ours keeps what the package's form has no place for: the amaxes of a forward whose backward is yet to come."""
    module = made(te_modules, "Linear")
    stepped(te, module, 0)
    stepped(te, module, 1, backward=False)
    copies = [copy.deepcopy(module), made(te_modules, "Linear")]
    copies[1].load_state_dict(module.state_dict())
    wrapped = torch.nn.ModuleDict({"inner": made(te_modules, "Linear")})
    wrapped.load_state_dict({f"inner.{name}": value for name, value in module.state_dict().items()})
    y = stepped(te, module, 2)
    for other in (*copies, wrapped["inner"]):
        assert torch.equal(stepped(te, other, 2), y)


def test_a_state_is_read_without_the_package(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = trained(te, "Linear")
    state, module = theirs.state_dict(), made(te_modules, "Linear")
    monkeypatch.delitem(sys.modules, "transformer_engine.common.recipe")
    with pytest.raises(CheckpointError):
        read_state(state["_extra_state"].numpy().tobytes())
    module.load_state_dict(state)
    monkeypatch.undo()
    assert torch.equal(stepped(te, module, 3), stepped(te, ours, 3))


@pytest.mark.parametrize("damage", ["scale", "shape", "none", "kind"])
def test_a_damaged_state_is_refused_and_changes_nothing(te: Any, damage: str) -> None:
    from fusible.compat.nvidia_state import write_state

    theirs, ours = trained(te, "Linear")
    state = theirs.state_dict()
    held = {key.partition(" ")[2]: value for key, value in scales(state).items()}
    held.pop("recipe")
    if damage == "scale":
        held["scale_fwd"] = torch.full((3,), float("nan"))
    elif damage == "shape":
        held["scale_fwd"] = torch.ones(1)
    elif damage == "none":
        held.pop("amax_history_bwd")
    state["_extra_state"] = torch.ones(3) if damage == "kind" else write_state(held)
    before = scales(ours.state_dict())
    with pytest.raises(CheckpointError, match=r"^(a saved scaling state|the _extra_state of Linear): expected .*, got"):
        ours.load_state_dict(state)
    after = scales(ours.state_dict())
    assert all(torch.equal(value, after[key]) for key, value in before.items() if isinstance(value, torch.Tensor))
