"""Training, saving, graphs and generation on a GPU, as a user does them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, apart, only
from torch import Tensor

import fusible
from fusible import FusedAdam, KVCache, autocast
from fusible.cli.training.model import RECIPES_BY_NAME, ByteGPT
from fusible.cli.training.options import TrainOptions

OPTIONS = TrainOptions(layers=2, hidden=64, heads=4, seq_len=64, batch=8)
HOST = torch.device("cpu")


def batches(count: int) -> list[Tensor]:
    """Windows of a text that can be learned: each byte follows from the one before."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        start = torch.randint(97, 123, (OPTIONS.batch, 1), generator=generator)
        found.append((start + 3 * torch.arange(OPTIONS.seq_len + 1)) % 26 + 97)
    return found


def train(model: ByteGPT, device: torch.device, count: int) -> list[float]:
    optimizer = FusedAdam(model.parameters(), lr=2e-3)
    losses = []
    for window in batches(count):
        window = window.to(device)
        loss = model.loss(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def gpt(recipe: str) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(OPTIONS, recipe)


@pytest.mark.parametrize("recipe", RECIPES_BY_NAME)
def test_training_goes_as_on_the_cpu(recipe: str) -> None:
    model = gpt(recipe)
    with only("torch"):
        wanted = train(copy.deepcopy(model), HOST, 30)
    got = train(model.to(DEVICE), DEVICE, 30)
    assert got[-1] < 0.5 * got[0]
    allowed = 1e-3 if recipe == "fp32" else 1e-2
    assert got == pytest.approx(wanted, rel=allowed, abs=allowed)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_a_state_dict_goes_to_the_cpu_and_back(recipe: str) -> None:
    model = gpt(recipe).to(DEVICE)
    train(model, DEVICE, 5)
    text = batches(1)[0][:, :-1]
    with torch.no_grad():
        wanted = model(text.to(DEVICE))
        there = gpt(recipe)
        there.load_state_dict(model.state_dict())
        back = gpt(recipe).to(DEVICE)
        back.load_state_dict(there.state_dict())
        moved = copy.deepcopy(model).to(HOST)
        assert torch.equal(back(text.to(DEVICE)), wanted)
        with only("torch"):
            assert apart([there(text).double()], [wanted.double().cpu()]) <= (2.0**-2 if recipe == "nvfp4" else 2.0**-4)
            assert torch.equal(moved(text), there(text))


def layers() -> fusible.Sequential:
    torch.manual_seed(0)
    norm, up, down = fusible.RMSNorm(64), fusible.Linear(64, 128), fusible.Linear(128, 64)
    return fusible.Sequential(fusible.Residual(norm, up, fusible.GELU(), down), fusible.Linear(64, 64)).to(DEVICE, torch.bfloat16)


UNWAITING = {"none": None, "delayed": fusible.DelayedScaling(), "current": fusible.Float8CurrentScaling(), "mxfp8": fusible.MXFP8BlockScaling()}


@pytest.mark.parametrize("backend", [None, "torch"], ids=str)
@pytest.mark.parametrize("recipe", UNWAITING)
def test_the_host_does_not_wait_for_the_gpu(recipe: str, backend: str | None) -> None:
    model, x = layers(), torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16)
    with only(backend):
        for i in range(4):
            torch.cuda.set_sync_debug_mode("error" if i == 3 else "default")
            try:
                with autocast(enabled=recipe != "none", recipe=UNWAITING[recipe]):
                    y = model(x)
                y.backward(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", UNWAITING)
def test_a_step_is_captured_as_a_graph(recipe: str) -> None:
    model, x = layers(), torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16)

    def step() -> Tensor:
        with autocast(enabled=recipe != "none", recipe=UNWAITING[recipe]):
            y = model(x)
        y.backward(x)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    twin = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    twin.zero_grad(set_to_none=True)
    model, captured = twin, model
    assert torch.equal(y, step())
    grads = zip(captured.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in grads if a.grad is not None and b.grad is not None)


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_torch_compile_takes_a_model(recipe: str) -> None:
    model, x = layers(), torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16)
    compiled = torch.compile(copy.deepcopy(model))

    def run(f: Any) -> Tensor:
        with autocast(enabled=recipe != "none", recipe=UNWAITING[recipe]):
            return f(x)

    wanted, got = run(model), run(compiled)
    got.backward(x)
    assert apart([got.double().cpu()], [wanted.double().cpu()]) <= 2.0**-7


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_a_cache_goes_on_as_the_whole_sequence(recipe: str) -> None:
    model = gpt(recipe).to(DEVICE).eval()
    text = batches(1)[0][0, :32].to(DEVICE)
    lengths = torch.tensor([32], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        whole = model.next_bytes(text, lengths, KVCache(1, 64, dtype=torch.bfloat16, device=DEVICE))
        cache = KVCache(1, 64, dtype=torch.bfloat16, device=DEVICE)
        model.next_bytes(text[:20], lengths - 12, cache)
        cache.advance([20])
        for i in range(20, 32):
            last = model.next_bytes(text[i : i + 1], torch.ones_like(lengths), cache)
            cache.advance([1])
    assert apart([last.double().cpu()], [whole.double().cpu()]) <= (2.0**-5 if recipe == "bf16" else 2.0**-3)
