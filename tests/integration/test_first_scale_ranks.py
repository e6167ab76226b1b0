"""Weights under delayed scaling that processes send each other have equal bits in all of them, and go on alike; other formats, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fusible
from fusible.compat import te_modules
from fusible.quantized import Float8CurrentScalingQuantizer, recorded_amax
from fusible.tex import DType

WORLD, WIDTH = 2, 128
DELAYED = fusible.DelayedScaling(amax_history_len=3)
RECIPES: list[fusible.Recipe] = [
    DELAYED,
    fusible.Float8CurrentScaling(),
    fusible.MXFP8BlockScaling(),
    fusible.Float8BlockScaling(),
    fusible.NVFP4BlockScaling(),
]


def layers(recipe: fusible.Recipe, seed: int, count: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    with fusible.quantized_model_init(recipe=recipe):
        return torch.nn.Sequential(*(te_modules.Linear(WIDTH, WIDTH, bias=False, params_dtype=dtype) for _ in range(count)))


def train(model: Any, recipe: fusible.Recipe, seed: int) -> None:
    p = next(model.parameters())
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    with fusible.autocast(recipe=recipe):
        y = model(x)
    y.float().square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def state(p: Any) -> list[Tensor]:
    """All bits of a weight, and what its quantizer goes on from."""
    buffers = [x for x in p.get_metadata().values() if isinstance(x, Tensor)]
    return buffers + ([p._quantizer.scale, p._quantizer.amax] if recorded_amax(p._quantizer) is not None else [])


def of_all(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(WORLD)]
    distributed.all_gather(found, x.detach().contiguous())
    return found


def assert_alike(model: Any, at: object) -> None:
    for p in model.parameters():
        for x in state(p):
            first, *others = of_all(x)
            assert all(torch.equal(first, other) for other in others), at


def replicate(rank: int) -> None:
    """By DDP, which sends one weight alone, or several in a message, and has them written by their values."""
    for recipe in RECIPES:
        for count in (1, 3):
            for dtype in (torch.float32, torch.bfloat16):
                model = layers(recipe, rank, count, dtype)
                if rank:
                    with torch.no_grad():
                        next(model.parameters()).mul_(0.01)
                wanted = [of_all(p.detach().dequantize())[0] for p in model.parameters()]
                replica = DistributedDataParallel(model)
                for p, value in zip(model.parameters(), wanted, strict=True):
                    torch.testing.assert_close(p.detach().dequantize(), value, rtol=2 * torch.finfo(dtype).eps, atol=0)
                assert_alike(model, (recipe, count))
                for step in range(3):
                    train(replica, recipe, 10 * step + rank)
                    for p in model.parameters():  # each recipe's own state may differ, as each process has observed other inputs
                        assert torch.equal(*of_all(p.detach().dequantize())), (recipe, count, step)


def broadcast(rank: int) -> None:
    """By their bytes, whatever was trained before; into a weight, or memory that it shares; of whichever copies each process has."""
    for recipe in RECIPES:
        for trained in (0, 2):
            model = layers(recipe, rank)
            for step in range(trained):
                train(model, recipe, step)
                with torch.no_grad():
                    next(model.parameters()).mul_(1 + rank)
            p: Any = next(model.parameters())
            if recipe is DELAYED and rank and trained:
                p.update_usage(rowwise_usage=True, columnwise_usage=False)
            wanted = of_all(p.detach().dequantize())[1]
            scale = of_all(p._quantizer.scale)[1] if recipe is DELAYED else torch.empty(0)
            work = distributed.broadcast(p.data, 1, async_op=bool(trained))
            assert work is None or work.wait()
            assert torch.equal(p.detach().dequantize(), wanted), (recipe, trained)
            if recipe is DELAYED:
                assert torch.equal(p._quantizer.scale, scale)
                p.update_usage(rowwise_usage=True, columnwise_usage=True)
                assert torch.equal(p._transpose, p._data.t())
            assert_alike(model, (recipe, trained))


def broadcast_parts(rank: int) -> None:
    """The rest of the weight, which has the same scale, keeps its values."""
    p: Any = next(layers(DELAYED, rank).parameters())
    with torch.no_grad():
        p.mul_(1 - 0.4 * rank)
    before, wanted = p.detach().dequantize(), of_all(p.detach().dequantize())[1]
    distributed.broadcast(p.data[:16], 1)
    torch.testing.assert_close(p.detach().dequantize()[:16], wanted[:16], rtol=2**-3, atol=wanted.abs().max().item() * 2**-12)
    assert torch.equal(p.detach().dequantize()[16:], before[16:])


def gather(rank: int) -> None:
    for recipe in RECIPES:
        for trained in (0, 2):
            model = layers(recipe, rank)
            for step in range(trained):
                train(model, recipe, step)
            p: Any = next(model.parameters())
            values = of_all(p.detach().dequantize())
            into = [torch.empty_like(p.detach()) for _ in range(WORLD)]
            assert type(into[0]) is type(p.detach())
            distributed.all_gather(into, p.detach())
            assert all(torch.equal(x.dequantize(), value) for x, value in zip(into, values, strict=True)), (recipe, trained)
            mine = torch.empty_like(p.detach())
            distributed.scatter(mine, [x * (1 + i) for i, x in enumerate(values)] if rank == 0 else None, 0)
            if not trained:  # else by the scale of what was observed
                torch.testing.assert_close(mine.dequantize(), values[rank] * (1 + rank), rtol=1e-6, atol=0)


def share_out(rank: int) -> None:
    """Under FSDP2 each process writes its shard by its own largest magnitude; before they are gathered, all have that of the whole."""
    whole = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) * torch.linspace(4, 0.25, WIDTH).view(-1, 1)
    scale_inv = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(whole)._scale_inv
    for again in (False, True):
        model = layers(DELAYED, 0)
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model, mesh=mesh)
        seen: list[Tensor] = []
        model.register_forward_hook(lambda module, *_, seen=seen: seen.append(next(module.parameters()).detach().dequantize().clone()))
        if again:  # what is compared at the first gathering is compared no more
            with torch.no_grad():
                model(torch.ones(32, WIDTH))
            model.reshard()
        model.load_state_dict({name: distribute_tensor(whole, mesh, p.placements) for name, p in model.named_parameters()})
        train(model, DELAYED, rank)
        assert ((seen[-1] - whole).abs() <= whole.abs() * 2**-3 + scale_inv * 2**-9).all(), (again, (seen[-1] - whole).abs().max())
        p: Any = next(model.parameters()).to_local()
        for step in range(3):
            train(model, DELAYED, 10 * step + rank)
            assert torch.equal(*of_all(p._quantizer.scale)), (again, step)


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    for check in (replicate, broadcast, broadcast_parts, gather, share_out):
        check(rank)
    distributed.barrier()
    os._exit(0)  # an interpreter that ends while gloo's threads run may abort, with all its work done


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
def test_processes_have_equal_weights(tmp_path: Path) -> None:
    multiprocessing.spawn(run, args=(str(tmp_path / "store"),), nprocs=WORLD)
