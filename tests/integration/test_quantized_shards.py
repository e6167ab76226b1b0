"""Quantized parameters under FSDP2: the bytes are gathered, and the shards are quantized by common amaxes; what cannot be shared out is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fusible
from fusible.errors import ArgumentError, ShapeError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fusible.tex import DType

E4M3, RATE, WORLD = DType.kFloat8E4M3, 2.0**-4, 2
MAKERS: dict[str, Callable[[], Quantizer]] = {
    "delayed": lambda: Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "columnwise": lambda: Float8CurrentScalingQuantizer(E4M3, rowwise=False),
    "block-1d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block-2d": lambda: Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": lambda: NVFP4Quantizer(),
    "hybrid": lambda: HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(E4M3), columnwise_quantizer=MXFP8Quantizer(E4M3)),
    "identity": lambda: IdentityQuantizer(),
}


def quantized(make: Callable[[], Quantizer], values: torch.Tensor) -> Any:
    with torch.no_grad():
        return make()(values)


def train(make: Callable[[], Quantizer], rank: int) -> None:
    """Two steps; before each, the gathered weight is exactly what one process would have quantized."""
    layer = torch.nn.Linear(64, 256, bias=False)
    smaller_below = torch.linspace(1, 0.1, 256).view(256, 1)  # so the shards have amaxes of their own
    whole = quantized(make, torch.linspace(-3, 2, 256 * 64).view(256, 64).sin() * smaller_below)
    layer.weight = torch.nn.Parameter(whole)
    fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    gathered: list[tuple[type, torch.Tensor, Any]] = []

    def look(module: Any, args: object, output: object) -> None:
        weight = module.weight.detach()
        gathered.append((type(weight), weight.dequantize().clone(), weight.clone()))

    layer.register_forward_hook(look)
    for step in range(2):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        layer(x).square().mean().backward()
        kind, values, weight = gathered.pop()
        assert kind is type(whole) and weight.get_usages() == whole.get_usages()
        for mine, wanted in zip(weight.get_data_tensors(), whole.get_data_tensors(), strict=True):
            assert mine is wanted is None or torch.equal(mine, wanted)
        assert torch.equal(values, whole.dequantize())
        grad = layer.weight.grad
        assert isinstance(grad, DTensor) and isinstance(layer.weight.to_local(), type(whole))
        whole = quantized(make, torch.add(whole.dequantize(), grad.full_tensor(), alpha=-RATE))
        optimizer.step()
        optimizer.zero_grad()


RECIPES = [
    fusible.DelayedScaling(amax_history_len=2),
    fusible.Float8CurrentScaling(),
    fusible.MXFP8BlockScaling(),
    fusible.Float8BlockScaling(),
    fusible.NVFP4BlockScaling(),
]


def layer(recipe: fusible.Recipe, rows: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with fusible.quantized_model_init(recipe=recipe):
        return fusible.Linear(64, rows, bias=False)


def go_by_common_scales(recipe: fusible.Recipe, rank: int) -> None:
    """The weight that a pass sees has the values of all shards, step after step, though each process writes other magnitudes to its own."""
    model = layer(recipe, 256)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.weight.dequantize().clone()))
    for step in range(5):
        values = [torch.empty(128, 64) for _ in range(WORLD)]
        distributed.all_gather(values, model.weight.to_local().dequantize().detach().contiguous())
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
        with fusible.autocast(recipe=recipe):
            y = model(x * (1 + rank))
        assert torch.equal(seen.pop(), torch.cat(values)), (recipe, step)
        (y.square() * torch.logspace(0, 2, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def refuse() -> None:
    """What would no longer be held in 8 bits, or rounded once more, or crash in torch; in the same words in every process."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for recipe, rows, step in zip(RECIPES, (33, 33, 96, 192, 48), (1, 1, 32, 128, 16), strict=True):
        wanted = rf"^a shard of a \w+ \[{rows}, 64\]: expected an even part{f' in whole blocks of {step} rows' if step > 1 else ''}, got .*\.$"
        with pytest.raises(ShapeError, match=wanted):
            fully_shard(layer(recipe, rows), mesh=mesh)


def refuse_scales_of_their_own(recipe: fusible.Recipe, rank: int) -> None:
    """Parameters that each process has made for itself."""
    model = layer(recipe, 256, seed=rank)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    with pytest.raises(ArgumentError, match=r"^the shards of a \w+: expected one scale, got several; make or load .*\.$"):
        model(torch.randn(32, 64))


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    for make in MAKERS.values():
        train(make, rank)
    for recipe in RECIPES:
        go_by_common_scales(recipe, rank)
    refuse()
    for recipe in (RECIPES[0], RECIPES[1], RECIPES[4]):
        refuse_scales_of_their_own(recipe, rank)
    distributed.barrier()
    os._exit(0)  # an interpreter that ends while gloo's threads run may abort, with all its work done


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
def test_shards_of_quantized_parameters_train_as_the_whole_would(tmp_path: Path) -> None:
    multiprocessing.spawn(run, args=(str(tmp_path / "store"),), nprocs=WORLD)
