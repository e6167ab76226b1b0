"""FSDP2 models under the fused optimizers, in each process of a group of two: for ``test_sharded_optimizer``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fusible
from fusible.errors import ArgumentError

Job = Callable[[int], Any]
JOBS: dict[str, Job] = {}
STEPS = 4
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: fusible.FusedAdam(p, lr=0.01, weight_decay=0.1),
    "adam-master": lambda p: fusible.FusedAdam(p, lr=0.01, master_weights=True),
    "adam-xla": lambda p: fusible.FusedAdam(p, lr=0.01, executor="xla"),
    "adam-held": lambda p: fusible.FusedAdam(p, lr=0.01, exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16),
    "sgd": lambda p: fusible.FusedSGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


def model() -> nn.Module:
    """An odd number of rows: the processes' parts differ in size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5))


def sharded(mesh: DeviceMesh | None = None) -> nn.Module:
    made = model()
    for layer in (made[0], made[2], made):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 5, generator=generator)


def train(made: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, first: int = 0, last: int = STEPS) -> list[float]:
    """Steps on this rank's half of each batch, or on all of it; the gradients' norms before they are clipped."""
    norms = []
    for step in range(first, last):
        x, y = batch(step)
        if rank is not None:
            x, y = x.chunk(2)[rank], y.chunk(2)[rank]
        optimizer.zero_grad()
        (made(x) - y).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms


def values(made: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in made.parameters()]


def check_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Gradients of the two are sums of the same 8 terms in another order, which err by some 2**-20 of the largest. Adam divides by the gradient's own
    size, so that this becomes 2**-20 over its share of the largest, 2**-7 or more, of a step of the rate 0.01 at most; four steps add up. Moments in
    fp16 err by 2**-11 each, of steps of 0.01, by scales of each process's own."""
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 2.0**-13 * (b.abs().max() + 1), (a - b).abs().max()


def steps_like_one_process(name: str, rank: int) -> None:
    whole, part = model(), sharded()
    norms = train(whole, OPTIMIZERS[name](whole.parameters()), None)
    optimizer = OPTIMIZERS[name](part.parameters())
    found = train(part, optimizer, rank)
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(found, norms, strict=True)), (found, norms)
    check_close(values(part), values(whole))
    for p, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
        assert tensors and all(isinstance(x, DTensor) and x.placements == p.placements and x.shape == p.shape for x in tensors)


JOBS.update({f"{name}_steps_like_one_process": partial(steps_like_one_process, name) for name in OPTIMIZERS})


@job
def a_mesh_of_one_process_is_like_none(rank: int) -> None:
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("apart", "alone"))["alone"]
    whole, part = model(), sharded(mesh)
    train(whole, OPTIMIZERS["adam"](whole.parameters()), None)
    train(part, OPTIMIZERS["adam"](part.parameters()), None)
    check_close(values(part), values(whole))


def _goes_on(name: str, source: str, *, full: bool = False) -> None:
    """State that ``get_optimizer_state_dict`` gives, taken by ``set_optimizer_state_dict`` into another optimizer: it goes on like the first."""
    rank = dist.get_rank()
    one, other = sharded(), sharded()
    first = OPTIMIZERS[source](one.parameters())
    train(one, first, rank, 0, 2)
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=full)
    saved = get_optimizer_state_dict(one, first, options=options)
    other.load_state_dict(one.state_dict())
    second = OPTIMIZERS[name](other.parameters())
    set_optimizer_state_dict(other, second, saved, options=options)
    train(one, first, rank, 2, 4)
    train(other, second, rank, 2, 4)
    check_close(values(other), values(one))


@job
def state_goes_through_the_checkpoint_functions(rank: int) -> None:
    for name in ("adam", "adam-held", "sgd"):
        _goes_on(name, name)
        _goes_on(name, name, full=True)


@job
def the_state_of_torchs_adamw_is_taken(rank: int) -> None:
    _goes_on("adam", "adamw")


@job
def plain_state_is_shared_out(rank: int) -> None:
    whole, part = model(), sharded()
    first, second = OPTIMIZERS["adam"](whole.parameters()), OPTIMIZERS["adam"](part.parameters())
    train(whole, first, None, 0, 2)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for p, q in zip(part.parameters(), whole.parameters(), strict=True):
            p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))  # type: ignore[attr-defined]
    train(whole, first, None, 2, 4)
    train(part, second, rank, 2, 4)
    check_close(values(part), values(whole))


@job
def a_gradient_that_is_placed_otherwise_is_refused(rank: int) -> None:
    part = sharded()
    optimizer = OPTIMIZERS["adam"](part.parameters())
    train(part, optimizer, rank, 0, 1)
    before = values(part)
    last: Any = list(part.parameters())[-1]
    last.grad = last.grad.redistribute(placements=[Replicate()])
    try:
        optimizer.step()
    except ArgumentError as error:
        assert str(error).startswith("a gradient of FusedAdam: expected (Shard(dim=0),), got (Replicate(),)"), error
    else:
        raise AssertionError("it was taken")
    assert all(torch.equal(a, b) for a, b in zip(before, values(part), strict=True)) and optimizer.param_groups[0]["step"] == 1
