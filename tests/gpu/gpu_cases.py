"""Training steps of the same module on a GPU and on the CPU, whose numbers are held to float64 elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusible import KVCache, autocast, tex
from fusible.quantized import Recipe

__all__ = ["DEVICE", "apart", "forward", "only", "steps", "with_gpu_group"]

DEVICE = torch.device("cuda")

if not torch.cuda.is_available():
    pytest.skip("torch has no GPU here", allow_module_level=True)


@contextmanager
def only(backend: str | None) -> Iterator[None]:
    """What is called within is served by one backend, or, of None, by whichever is first."""
    with nullcontext() if backend is None else tex.set_backend(backend, strict=True):
        yield


@contextmanager
def with_gpu_group(device: torch.device) -> Iterator[None]:
    """This process as a group of processes, for collectives of tensors on a device."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def steps(
    call: Callable[[nn.Module, dict[str, Any]], Any],
    module: nn.Module,
    make: Callable[[], dict[str, Any]],
    recipe: Recipe | None,
    device: torch.device,
    count: int = 3,
) -> list[Tensor]:
    """Outputs and gradients of ``count`` steps of a copy of ``module`` on ``device``, with gradient descent between them: the third is replayed."""
    torch.manual_seed(0)
    module = copy.deepcopy(module).to(device)
    found: list[Tensor] = []
    for _ in range(count):
        with torch.device(device):
            arguments = {name: _there(value, device) for name, value in make().items()}
        with autocast(enabled=recipe is not None, recipe=recipe):
            result = call(module, arguments)
        outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.is_floating_point()]
        module.zero_grad()
        wanted = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
        backward = [y for y in outputs if y.requires_grad]
        if backward:
            torch.autograd.backward(backward, [_gradient(y) for y in backward])
        leaves = [*wanted, *(p for p in module.parameters() if p.grad is not None)]
        assert all(x.device.type == device.type for x in (*outputs, *leaves)), "a result lies on another device"
        found += [x.detach().double().cpu() for x in (*outputs, *(x.grad for x in leaves if x.grad is not None))]
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return found


def forward(
    call: Callable[[nn.Module, dict[str, Any]], Any],
    module: nn.Module,
    make: Callable[[], dict[str, Any]],
    recipe: Recipe | None,
) -> list[Tensor]:
    """Outputs of a copy of ``module`` on the GPU, in the mode of the caller."""
    module = copy.deepcopy(module).to(DEVICE)
    with torch.device(DEVICE):
        arguments = {name: _there(value, DEVICE) for name, value in make().items()}
    with autocast(enabled=recipe is not None, recipe=recipe):
        result = call(module, arguments)
    return [y.double().cpu() for y in (result if isinstance(result, tuple) else (result,)) if y.is_floating_point()]


def _there(value: Any, device: torch.device) -> Any:
    """A cache lies on the CPU unless it is told otherwise; a new one, as what a subject gives is empty."""
    if not isinstance(value, KVCache):
        return value
    return KVCache(len(value.lengths), value.capacity, dtype=value.dtype, device=device)


def _gradient(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.device, y.dtype)


def apart(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest distance of two tensors, as a share of the second's norm."""
    assert [x.shape for x in got] == [x.shape for x in wanted]
    assert all(x.isfinite().all() for x in got)
    return max(((g - w).norm().item() / max(w.norm().item(), 1e-30) for g, w in zip(got, wanted, strict=True)), default=0.0)
