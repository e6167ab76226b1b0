"""A model of fusible operations under delayed scaling that is saved, and goes on in a new process, is the one that was never interrupted, to the
bit; and of a checkpoint that is damaged, altered or another model's nothing is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import fusible
from fusible.errors import CheckpointError
from fusible.pytorch import ops

WIDTH = 32


def make(seed: int = 1, width: int = WIDTH) -> ops.Sequential:
    """Two pipelines, with a plain module between: a residual by a channel, dropout, every kind of operation that has a scale."""
    torch.manual_seed(seed)
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    block = [begin, ops.LayerNorm(width), ops.Linear(width, 2 * width), ops.GELU(), ops.Dropout(0.1), ops.Linear(2 * width, width), end]
    return ops.Sequential(*block, torch.nn.Tanh(), ops.Linear(width, width, bias=False))


def train(model: ops.Sequential, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """The losses of the steps ``[first, last)``; data and dropout follow from the step's number."""
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        x = torch.randn(16, WIDTH)
        with fusible.autocast(recipe=fusible.DelayedScaling(amax_history_len=3)):
            loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model: ops.Sequential) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def by_torch(state: dict[str, Tensor], path: Path) -> None:
    torch.save(state, path)


def by_safetensors(state: dict[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(state, path)


def load(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else safetensors.torch.load_file(path)


SAVERS = {"pt": by_torch, "safetensors": by_safetensors}


def everything(model: ops.Sequential) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return not different(a, b)


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names that one of two states lacks, or whose tensors differ."""
    return [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]


_GO_ON = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from test_ops_resume import SAVERS, adam, load, make, train
losses, directory = [], Path(sys.argv[2])
for kind, save in SAVERS.items():
    model = make(seed=9)
    model.load_state_dict(load(directory / f"model.{kind}"))
    optimizer = adam(model)
    optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))
    losses.append(train(model, optimizer, 4, 8))
    save(model.state_dict(), directory / f"model.{kind}")
print(json.dumps(losses))
"""


def test_four_steps_and_four_more_in_a_new_process_are_eight_steps(tmp_path: Path) -> None:
    """Saved by torch.save, and by safetensors."""
    whole = make()
    losses = train(whole, adam(whole), 0, 8)
    part = make()
    optimizer = adam(part)
    before = train(part, optimizer, 0, 4)
    for kind, save in SAVERS.items():
        save(part.state_dict(), tmp_path / f"model.{kind}")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    done = subprocess.run([sys.executable, "-c", _GO_ON, str(Path(__file__).parent), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for kind, after in zip(SAVERS, json.loads(done.stdout), strict=True):
        assert before + after == losses
        assert different(load(tmp_path / f"model.{kind}"), everything(whole)) == []


def test_the_scales_matter() -> None:
    """Without them training goes on otherwise: what the test above compares is sensitive to the state."""
    model = make()
    optimizer = adam(model)
    train(model, optimizer, 0, 4)
    state = everything(model)
    scaling = [name for name in state if "scaling_state" in name]
    assert len(scaling) == 2 and all(state[name].dtype is torch.uint8 for name in scaling)
    losses = []
    for kept in (state, {name: value for name, value in state.items() if name not in scaling}):
        other = make(seed=9)
        other.load_state_dict(kept)
        losses.append(train(other, adam(other), 4, 6))
    assert losses[0] != losses[1]


def _truncated(state: dict[str, Tensor], name: str) -> None:
    state[name] = state[name][:-5]


def _altered(state: dict[str, Tensor], name: str) -> None:
    tensors = safetensors.torch.load(bytes(state[name].numpy()))
    tensors["forward.scale"][0] = -1.0
    state[name] = torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


def _foreign(state: dict[str, Tensor], name: str) -> None:
    other = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.Linear(WIDTH, WIDTH), ops.Linear(WIDTH, WIDTH))
    train(other, adam(other), 0, 1)
    state[name] = everything(other)["scaling_state.0"]


def _pickled(state: dict[str, Tensor], name: str) -> None:
    """What Transformer Engine itself leaves: bytes of a pickle. They are refused unread."""
    state[name] = torch.frombuffer(bytearray(b"\x80\x04cos\nsystem\n(S'touch unpickled'\ntR."), dtype=torch.uint8)


def _one_too_many(state: dict[str, Tensor], name: str) -> None:
    state["scaling_state.2"] = state[name]


def _of_another_width(state: dict[str, Tensor], name: str) -> None:
    state["8.basic_ops.0.weight"] = torch.zeros(2 * WIDTH, WIDTH)


def _without_a_parameter(state: dict[str, Tensor], name: str) -> None:
    del state["8.basic_ops.0.weight"]


def _with_a_parameter_more(state: dict[str, Tensor], name: str) -> None:
    state["8.basic_ops.1.bias"] = torch.zeros(WIDTH)


DAMAGES = [_truncated, _altered, _foreign, _pickled, _one_too_many, _of_another_width, _without_a_parameter, _with_a_parameter_more]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_of_a_damaged_checkpoint_nothing_is_loaded(damage: Callable[..., None], place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and parameters, scales and what follows are as if nobody had tried."""
    monkeypatch.chdir(tmp_path)
    model, twin, other = make(), make(), make(seed=2)
    optimizer, twins = adam(model), adam(twin)
    train(model, optimizer, 0, 2)
    train(twin, twins, 0, 2)
    train(other, adam(other), 5, 8)
    state = everything(other)
    damage(state, f"scaling_state.{place}")
    with pytest.raises(CheckpointError, match=r"^[^\n]*: expected [^\n]*, got [^\n]*; [^\n]*\.$"):
        model.load_state_dict(state)
    assert same(everything(model), everything(twin))
    assert train(model, optimizer, 2, 4) == train(twin, twins, 2, 4)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_may_be_allowed() -> None:
    model, other = make(), make(seed=2)
    state = everything(other)
    del state["8.basic_ops.0.weight"]
    result = model.load_state_dict({**state, "more": torch.zeros(1)}, strict=False)
    assert result.missing_keys == ["8.basic_ops.0.weight"] and result.unexpected_keys == ["more"]
    assert torch.equal(model[2].weight, other[2].weight)
    state["8.basic_ops.0.weight"] = torch.zeros(2 * WIDTH, WIDTH)
    with pytest.raises(CheckpointError, match=r"got \[64, 32\] for '8.basic_ops.0.weight', which has \[32, 32\]"):
        model.load_state_dict(state, strict=False)
