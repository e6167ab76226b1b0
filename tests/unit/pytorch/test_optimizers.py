"""The fused optimizers against torch's, by both executors, and their state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
EXECUTORS = pytest.mark.parametrize("executor", ["eager", "xla"])
ADAM: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"weight_decay": 0.1, "adam_w_mode": False}]
SGD: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 3), (7,), (1,))]


def _train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 6, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def _close(ours: list[nn.Parameter], theirs: list[nn.Parameter], steps: int = 6) -> None:
    """Both round each step's few operations in fp32: some epsilons of the parameters and of what was added to them, a step."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 16 * steps * EPS[torch.float32] * (b.abs().max() + 1)


@EXECUTORS
@pytest.mark.parametrize("options", ADAM, ids=str)
def test_adam_is_torchs(options: dict[str, Any], executor: str) -> None:
    ours, theirs = _parameters(), _parameters()
    theirs_of = {name: value for name, value in options.items() if name != "adam_w_mode"}
    other = torch.optim.AdamW(theirs, lr=0.1, **{"weight_decay": 0.0, **theirs_of})
    if not options.get("adam_w_mode", True):
        other = torch.optim.Adam(theirs, lr=0.1, **theirs_of)
    _train(fusible.FusedAdam(ours, lr=0.1, executor=executor, **options), ours)
    _train(other, theirs)
    _close(ours, theirs)


@EXECUTORS
@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_is_torchs(options: dict[str, Any], executor: str) -> None:
    ours, theirs = _parameters(), _parameters()
    _train(fusible.FusedSGD(ours, lr=0.1, executor=executor, **options), ours)
    _train(torch.optim.SGD(theirs, lr=0.1, **options), theirs)
    _close(ours, theirs)


@EXECUTORS
def test_a_parameter_whose_gradients_begin_later_begins_its_buffer_with_the_first(executor: str) -> None:
    ours, theirs = _parameters(), _parameters()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    for make, parameters in ((fusible.FusedSGD, ours), (torch.optim.SGD, theirs)):
        optimizer = make(parameters, **options, **({"executor": executor} if parameters is ours else {}))
        for step in range(4):
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 1.0 + step) if step >= i else None
            optimizer.step()
    _close(ours, theirs, 4)


def test_a_compiled_step_is_one_executable_for_all_rates_and_counts() -> None:
    parameters = _parameters()
    optimizer = fusible.FusedAdam(parameters, executor="xla")
    _train(optimizer, parameters, steps=5)
    assert optimizer._executor.compiled == 1  # type: ignore[attr-defined]


@EXECUTORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_lose_no_small_step(dtype: torch.dtype, executor: str) -> None:
    """Steps of a hundredth of the parameter's epsilon move the master weight, and with it at last the parameter."""
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = fusible.FusedSGD([p], lr=EPS[dtype] / 100, master_weights=True, executor=executor)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p, torch.full_like(p, 1 - 2 * EPS[dtype]))
    assert optimizer.state[p]["master_param"].dtype is torch.float32


@EXECUTORS
def test_a_saved_optimizer_goes_on_as_if_never_stopped(executor: str) -> None:
    whole = _parameters(torch.bfloat16)
    _train(fusible.FusedAdam(whole, master_weights=True, executor=executor), whole, steps=6)
    part = _parameters(torch.bfloat16)
    optimizer = fusible.FusedAdam(part, master_weights=True, executor=executor)
    _train(optimizer, part, steps=3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = fusible.FusedAdam(part, master_weights=True, executor=executor)
    again.load_state_dict(torch.load(file, weights_only=True))
    _train(again, part, steps=3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(part, whole, strict=True))


@EXECUTORS
def test_a_step_makes_cached_quantized_weights_stale(executor: str) -> None:
    torch.manual_seed(0)
    model = fusible.Sequential(fusible.Linear(32, 32), fusible.GELU(), fusible.Linear(32, 32))
    optimizer = fusible.FusedAdam(model.parameters(), lr=0.1, executor=executor)
    x = torch.randn(32, 32)
    with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
        before = model(x)
        before.square().sum().backward()
        optimizer.step()
        after, fresh = model(x), copy.deepcopy(model)(x)
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_quantized_parameters_are_stepped_by_their_master_weights() -> None:
    torch.manual_seed(0)
    with fusible.quantized_model_init(recipe=fusible.Float8CurrentScaling()):
        model = ops.Sequential(ops.Linear(32, 32))
    optimizer = fusible.FusedAdam(model.parameters(), lr=0.05)
    x = torch.randn(32, 32)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_illegal_options_and_gradients_are_refused_before_anything_is_written() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(ArgumentError, match="lr of FusedAdam: expected a finite number of at least 0, got -1"):
        fusible.FusedAdam([p], lr=-1)
    with pytest.raises(ArgumentError, match="betas of FusedAdam"):
        fusible.FusedAdam([p], betas=(0.9, 1.0))
    with pytest.raises(ArgumentError, match="FusedSGD with nesterov"):
        fusible.FusedSGD([p], lr=0.1, nesterov=True)
    optimizer = fusible.FusedSGD([p, q], lr=0.1)
    p.grad, q.grad = torch.ones(3), torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    with pytest.raises(ArgumentError, match="FusedSGD: expected dense gradients"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


def _of_torch(kind: str, p: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p], lr=1e-4, weight_decay=0) if kind == "adam" else torch.optim.SGD([p], lr=1e-4, momentum=0.9)


def _ours(kind: str, p: nn.Parameter, executor: str = "eager", masters: bool = True) -> torch.optim.Optimizer:
    if kind == "adam":
        return fusible.FusedAdam([p], lr=1e-4, master_weights=masters, executor=executor)
    return fusible.FusedSGD([p], lr=1e-4, momentum=0.9, master_weights=masters, executor=executor)


def _step(optimizer: torch.optim.Optimizer, steps: int = 1) -> list[torch.Tensor]:
    """Steps of unit gradients; all that they move."""
    (p,) = optimizer.param_groups[0]["params"]
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return [p.detach().clone(), *(x.clone() for _, x in sorted(optimizer.state[p].items()))]


LACKING: dict[str, Callable[[str, nn.Parameter], torch.optim.Optimizer]] = {
    "torch": _of_torch,
    "no masters": lambda kind, p: _ours(kind, p, masters=False),
}


@EXECUTORS
@pytest.mark.parametrize("former", LACKING)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_masters_that_a_loaded_state_lacks_are_made_of_the_parameters(kind: str, former: str, executor: str) -> None:
    """As if the loaded state had brought fp32 copies of the parameters along."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    other = LACKING[former](kind, p)
    _step(other)
    saved = copy.deepcopy(other.state_dict())
    state = saved["state"][0]
    brought = {**saved, "state": {0: {**state, "master_param": p.detach().float()}}}
    results = []
    for dictionary in (saved, brought):
        q = nn.Parameter(p.detach().clone())
        optimizer = _ours(kind, q, executor)
        optimizer.load_state_dict(dictionary)
        results.append(_step(optimizer, 20))
        assert sorted(optimizer.state_dict()["state"][0]) == sorted({*state, "master_param"} - {"step"})
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    q, master = results[0][0], optimizer.state[q]["master_param"]
    assert not torch.equal(master, q.float())  # a step is less than half an epsilon of the parameter


def test_a_quantized_parameter_gets_the_master_that_a_loaded_state_lacks() -> None:
    with fusible.quantized_model_init(recipe=fusible.Float8CurrentScaling()):
        weight = ops.BasicLinear(32, 32).weight
    plain = nn.Parameter(weight.detach().dequantize())
    former = fusible.FusedAdam([plain])
    _step(former)
    optimizer = fusible.FusedAdam([weight])
    optimizer.load_state_dict(former.state_dict())
    wanted, _ = weight.detach().dequantize(), _step(optimizer)
    # One step of Adam is of its rate, 1e-3, but for fp32 roundings of the parameters and of the step.
    assert (optimizer.state[weight]["master_param"] - (wanted - 1e-3)).abs().max() <= 8 * EPS[torch.float32]


@EXECUTORS
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_masters_that_a_loaded_state_has_are_stepped_where_none_would_be_made(kind: str, executor: str) -> None:
    results = []
    for masters in (True, False):
        p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        former = _ours(kind, p)
        _step(former, 3)
        optimizer = _ours(kind, p, executor, masters=masters)
        optimizer.load_state_dict(copy.deepcopy(former.state_dict()))
        results.append(_step(optimizer, 20))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EXECUTORS
@pytest.mark.parametrize("state", [{}, {"momentum_buffer": None}, {"master_param": torch.ones(8)}], ids=lambda state: ",".join(state) or "none")
def test_momentum_that_a_loaded_state_lacks_begins_with_the_next_gradient(state: dict[str, Any], executor: str) -> None:
    results = []
    for loaded in (state, None):
        p = nn.Parameter(torch.ones(8))
        optimizer = fusible.FusedSGD([p], lr=0.1, momentum=0.9, dampening=0.5, executor=executor)
        if loaded is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: loaded}})
        _step(optimizer, 3)
        results.append([p.detach(), optimizer.state[p]["momentum_buffer"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
