"""Weights that processes along ``tp`` share out and hold in 8 or 4 bits: they are, to the bit, those of one process, and so are their passes but for
the order of sums."""

from __future__ import annotations

import copy
import os
import tempfile
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fusible
from fusible.distributed import load_sharded, parallelize, save_sharded
from fusible.errors import NotServedError, ShapeError
from fusible.quantized import QuantizedTensor

WIDTH, HEAD = 512, 128
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
PARTS = {"0.1.weight": ("query", "key", "value"), "1.1.weight": ("gate", "up")}

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")


def decoder(groups: int = 2, width: int = WIDTH) -> fusible.Sequential:
    torch.manual_seed(0)
    head = width // 4
    qkv, attention = fusible.Linear(width, width + 2 * groups * head, bias=False), fusible.GroupedQuerySelfAttention(width, 4, groups, rope_base=1e4)
    return fusible.Sequential(
        fusible.Residual(fusible.RMSNorm(width), qkv, attention, fusible.Linear(width, width)),
        fusible.Residual(
            fusible.RMSNorm(width), fusible.Linear(width, 4 * width, bias=False), fusible.SwiGLU(), fusible.Linear(2 * width, width, bias=False)
        ),
    )


def held(recipe: Any, mesh: DeviceMesh | None = None, groups: int = 2) -> fusible.Sequential:
    model = decoder(groups)
    return fusible.quantize_parameters(model if mesh is None else parallelize(model, mesh), recipe=recipe)


def whole(parameter: Any) -> torch.Tensor:
    """The values of all of it."""
    if not isinstance(parameter, DTensor):
        return parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter.detach()  # type: ignore[no-any-return]
    local: Any = parameter._local_tensor
    values = local.dequantize() if isinstance(local, QuantizedTensor) else local
    return DTensor.from_local(values.detach(), parameter.device_mesh, parameter.placements).full_tensor()


def passed(model: fusible.Sequential, recipe: Any = None) -> torch.Tensor:
    x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), fusible.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x)  # type: ignore[no-any-return]


def hold_the_values_of_one_process(mesh: DeviceMesh) -> None:
    for name, recipe in RECIPES.items():
        for groups in (2, 1):  # keys of its own for each process, or one key for both
            alone, shared = held(recipe, None, groups), held(recipe, mesh, groups)
            found, count = dict(shared.named_parameters()), 0
            for path, parameter in alone.named_parameters():
                begin = path.removesuffix("weight")
                parts = [found[f"{begin}{part}_weight"] for part in PARTS[path]] if path in PARTS else [found[path]]
                assert torch.equal(torch.cat([whole(part) for part in parts]), whole(parameter)), (name, groups, path)
                count += isinstance(parameter, QuantizedTensor)
                assert all(isinstance(part._local_tensor, QuantizedTensor) is isinstance(parameter, QuantizedTensor) for part in parts), path  # type: ignore[attr-defined]
            assert count == 4
            wanted = passed(alone)
            torch.testing.assert_close(passed(shared), wanted, rtol=0, atol=8 * WIDTH * torch.finfo(torch.float32).eps * wanted.abs().max().item())
            assert passed(shared, recipe).isfinite().all()


def no_call_makes_another_copy(mesh: DeviceMesh) -> None:
    """What is joined is joined by its bytes."""
    for recipe in (RECIPES["current"], RECIPES["mxfp8"]):
        shared, seen = held(recipe, mesh), list[str]()
        with fusible.tex.listening(lambda call, seen=seen: seen.append(call.method.__name__)):  # type: ignore[misc]
            passed(shared)
        assert "generic_gemm" in seen and not {"quantize", "dequantize"} & set(seen), seen


def are_saved_and_read(mesh: DeviceMesh, folder: str) -> None:
    for name in ("current", "mxfp8"):
        shared = held(RECIPES[name], mesh)
        wanted = passed(shared)
        assert torch.equal(passed(copy.deepcopy(shared)), wanted)
        dcp.save(shared.state_dict(), checkpoint_id=f"{folder}/{name}")
        for way in ("state_dict", "dcp"):
            other = decoder()
            for parameter in other.parameters():
                torch.nn.init.normal_(parameter)
            fusible.quantize_parameters(parallelize(other, mesh), recipe=RECIPES[name])
            state = shared.state_dict() if way == "state_dict" else other.state_dict()
            if way == "dcp":
                dcp.load(state, checkpoint_id=f"{folder}/{name}")
            other.load_state_dict(state)
            assert torch.equal(passed(other), wanted), (name, way)
        for call in (save_sharded, load_sharded):
            with pytest.raises(NotServedError, match="^the shards of a model: expected tensors in high precision, got 0.1.query_weight as a "):
                call(f"{folder}/own", shared, shared.state_dict())


def take_values_part_by_part(mesh: DeviceMesh) -> None:
    """A query part that is a fourth of the others: what is loaded into one leaves the scales of the others."""
    for name in ("current", "block", "mxfp8"):
        shared, other = held(RECIPES[name], mesh), parallelize(decoder(), mesh)
        with torch.no_grad():
            other.get_submodule("0.1").query_weight._local_tensor.mul_(0.25)
        shared.load_state_dict(other.state_dict())
        found = dict(shared.named_parameters())
        for path, parameter in other.named_parameters():
            wanted = whole(parameter)
            assert (whole(found[path]) - wanted).abs().max() <= wanted.abs().max() / 16, (name, path)
        torch.testing.assert_close(passed(shared), passed(other), rtol=0, atol=0.05 * passed(other).abs().max().item())


def are_shared_out_again(mesh: DeviceMesh) -> None:
    """Along a dimension of one process, where FSDP2 takes the first of the tensors that it is given."""
    for name in ("current", "mxfp8"):
        shared = held(RECIPES[name], mesh)
        wanted = passed(shared)
        fully_shard(shared, mesh=mesh["dp_shard"])
        for _ in range(2):
            assert torch.equal(passed(shared), wanted), name
        with pytest.raises(NotServedError, match="^the model of quantize_parameters: expected weights that FSDP does not share out, got a model "):
            fusible.quantize_parameters(shared)


def refuse_what_would_be_cut(mesh: DeviceMesh) -> None:
    """A key of 32 rows for each process in squares of 128."""
    model = parallelize(decoder(2, 128), mesh)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(ShapeError, match=r"^0\.1\.weight: expected parts of rows in whole blocks, got \[64, 128\], \[32, 128\], \[32, 128\]; "):
        fusible.quantize_parameters(model, recipe=RECIPES["block"])
    assert [id(p) for p in model.parameters()] == before


def mixture(mesh: DeviceMesh | None = None, seed: int = 0) -> fusible.Sequential:
    torch.manual_seed(seed)
    model = fusible.Sequential(fusible.Residual(fusible.RMSNorm(WIDTH), fusible.MixtureOfExperts(WIDTH, 256, 4, 2)))
    return model if mesh is None else parallelize(model, mesh, sequence_parallel=True)


def hold_experts_of_their_own(mesh: DeviceMesh) -> None:
    """Each process those that it has, to the bit as one process would, and no others; no call makes another copy of them. Along ``ep`` each has
    tokens of its own, along ``tp`` rows of all."""
    of_experts, rank = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep")), mesh.get_rank()
    for (name, recipe), among in product(RECIPES.items(), (of_experts, mesh)):
        alone, shared, seen = (*(fusible.quantize_parameters(mixture(of), recipe=recipe) for of in (None, among)), list[str]())
        for weight in ("up", "down"):
            own = shared.get_submodule("0.1").get_parameter(f"{weight}_weight")._local_tensor  # type: ignore[attr-defined]
            wanted = [alone.get_submodule("0.1").get_parameter(f"{weight}_weight{expert}").dequantize() for expert in (2 * rank, 2 * rank + 1)]
            assert isinstance(own, QuantizedTensor) and torch.equal(own.dequantize(), torch.stack(wanted)), name
        common = sum(p.nbytes for p in alone.parameters() if not isinstance(p, QuantizedTensor))
        assert 2 * (fusible.parameter_bytes(shared) - common) == fusible.parameter_bytes(alone) - common, name
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            own_rows = slice(None) if among is mesh else slice(32 * rank, 32 * rank + 32)
            wanted = alone(x)[own_rows]
            with fusible.tex.listening(lambda call, seen=seen: seen.append(call.method.__name__)):  # type: ignore[misc]
                found = shared(x[own_rows])
            torch.testing.assert_close(found, wanted, rtol=0, atol=8 * WIDTH * torch.finfo(torch.float32).eps * wanted.abs().max().item())
            assert not {"quantize", "group_quantize", "dequantize", "group_dequantize"} & set(seen), (name, seen)
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                assert shared(x).isfinite().all()


def experts_are_saved_and_read(mesh: DeviceMesh, folder: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    for name in ("current", "block", "mxfp8", "nvfp4"):
        shared = fusible.quantize_parameters(mixture(mesh), recipe=RECIPES[name])
        wanted = passed(shared)
        assert torch.equal(passed(copy.deepcopy(shared)), wanted)
        dcp.save(shared.state_dict(), checkpoint_id=f"{folder}/experts-{name}")
        for way in ("state_dict", "dcp", "values"):
            other = fusible.quantize_parameters(mixture(mesh, seed=1), recipe=RECIPES[name])
            state = {"state_dict": shared, "dcp": other, "values": mixture(mesh)}[way].state_dict()
            if way == "dcp":
                dcp.load(state, checkpoint_id=f"{folder}/experts-{name}")
            other.load_state_dict(state)
            assert torch.equal(passed(other), wanted), (name, way)
        fully_shard(shared, mesh=mesh["dp_shard"])
        for _ in range(2):
            assert torch.equal(passed(shared), wanted), name


JOBS = (
    hold_the_values_of_one_process,
    no_call_makes_another_copy,
    are_saved_and_read,
    take_values_part_by_part,
    are_shared_out_again,
    refuse_what_would_be_cut,
    hold_experts_of_their_own,
    experts_are_saved_and_read,
)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    for job in JOBS:
        job(*((mesh, folder) if job in (are_saved_and_read, experts_are_saved_and_read) else (mesh,)))  # type: ignore[operator]
    distributed.barrier()
    os._exit(0)  # an interpreter that ends while gloo's threads run may abort, with all its work done


def test_weights_that_processes_share_out_are_held_in_8_bits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder,), nprocs=2)
