"""One checkpoint through one process, two and one again: replicated, or with parameters that the processes share out (FSDP2); and what torch hands
over to models in several processes, wrapped and not."""

from __future__ import annotations

import copy
import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from state_ways import RECIPES, go_on, make, train
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusible.errors import CheckpointError
from fusible.pytorch.checkpoint import LoadPlanner

WORLD = 2
FEW = [(kind, "delayed", how) for kind, how in (("nested", "replicated"), ("quantized", "whole"), ("held-delayed", "whole"), ("foreign", "parts"))]
REST = [
    (kind, recipe, sharded)
    for kind in ("linear", "nested", "attention", "foreign", "ops", "quantized", "held-delayed", "held-current", "held-nvfp4")
    for recipe in RECIPES
    for sharded in ("replicated", "whole", "parts")
    if (kind, recipe, sharded) not in FEW
]
OTHERWISE_ARRANGED = {"nested", "attention", "ops", "quantized", "held-delayed", "held-current", "held-nvfp4"}
"""Containers of ours: parts that FSDP2 hooks are called on their own, so that the pipelines are others, and so are their states."""
HANDED_ON_BY_VALUE = {"held-delayed", "held-current"}
"""A full dictionary of shards that are held in 8 bits has the values alone: where one scale serves all of them, they are quantized by another one."""

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),
]


def shared_out(model: nn.Module, how: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    if how == "parts":
        for child in model.children():
            if list(child.parameters()):
                fully_shard(child, mesh=mesh)
    return model if how == "replicated" else fully_shard(model, mesh=mesh)


def read(model: nn.Module, path: Path, **options: Any) -> nn.Module:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner(state), **options)
    set_model_state_dict(model, state)
    return model


def check(rank: int, kind: str, recipe: str, how: str, folder: Path) -> None:
    """Both processes read what one wrote, go on as it would, and write what one will read; a full dictionary is handed on to a fresh model."""
    name = f"{kind}-{recipe}"
    wanted = json.loads((folder / f"{name}.json").read_text())
    model = shared_out(make(kind, 2), how)
    if how == "parts" and recipe == "delayed" and kind in OTHERWISE_ARRANGED:
        with pytest.raises(CheckpointError, match=r"^[^\n]*: expected [^\n]*, got [^\n]*; load [^\n]* the model it was saved from\.$"):
            read(model, folder / name)
        return
    if how == "parts" and kind in OTHERWISE_ARRANGED:  # other fused passes round otherwise
        wanted = go_on(shared_out(read(make(kind, 2), folder / name), how), RECIPES[recipe])
    read(model, folder / name)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / f"{name}-{how}")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert go_on(model, RECIPES[recipe]) == wanted, (kind, recipe, how)
    if how == "replicated" or kind in HANDED_ON_BY_VALUE:
        return
    given = full if rank == 0 else {}
    other = shared_out(make(kind, 3), how)
    set_model_state_dict(other, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert go_on(other, RECIPES[recipe]) == wanted, (kind, recipe, how, "handed on")


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


WRAPPERS: dict[str, Callable[[nn.Module], tuple[nn.Module, nn.Module]]] = {
    "plain": lambda model: (model, model),
    "DDP": lambda model: (wrapped := DistributedDataParallel(model), wrapped),
    "inside DDP": lambda model: (wrapped := DistributedDataParallel(model), wrapped.module),
    "compiled": lambda model: (wrapped := _compiled(model), wrapped),
    "inside compiled": lambda model: (wrapped := _compiled(model), wrapped._orig_mod),
    "compiled DDP": lambda model: (wrapped := _compiled(DistributedDataParallel(model)), wrapped),
    "compiled inside": lambda model: (wrapped := nn.Sequential(nn.Identity(), _compiled(model)), wrapped),
    "compiled shards": lambda model: (wrapped := _compiled(shared_out(model, "whole")), wrapped),
}
"""What is made of a model, and what is given to torch to load into."""


def handed_over(rank: int, kind: str, wrapper: str) -> None:
    """A dictionary with scaling states, or without, from the first process or each process's own, into a model that was called or not: it goes on as
    the one that was saved; and is refused where it lacks states that the model has."""
    recipe = RECIPES["delayed"]
    saved, plain = make(kind), make(kind, 3)
    train(saved, recipe, 0, 3)
    states = {True: copy.deepcopy(saved.state_dict()), False: copy.deepcopy(plain.state_dict())}
    wanted = {True: go_on(saved, recipe), False: go_on(plain, recipe)}
    inside = "1." if wrapper == "compiled inside" else ""
    for broadcast, strict, called, has in itertools.product((True, False), repeat=4):
        model = make(kind, 2)
        if called:
            train(model, recipe, 8, 10)
        held, target = WRAPPERS[wrapper](model)
        given = {f"{inside}{name}": value for name, value in states[has].items()} if rank == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=broadcast or wrapper == "compiled shards", broadcast_from_rank0=broadcast, strict=strict)
        case = kind, wrapper, broadcast, strict, called, has
        if called and strict and not has:
            with pytest.raises(RuntimeError, match=r"scaling_state\.0"):
                set_model_state_dict(target, given, options=options)
            continue
        before = model.state_dict() if called else {}
        set_model_state_dict(target, given, options=options)
        if called and not has:
            after = model.state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items() if "scaling_state" in name), case
        else:
            assert go_on(model, recipe) == wanted[has], case
        del held


def run(rank: int, cases: list[tuple[str, str, str]], over: list[tuple[str, str]], folder: Path) -> None:
    torch.set_num_threads(1)
    # torch says so of every output that is a view: such as of scaled blocks, whose rows were padded.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for case in cases:
        check(rank, *case, folder)
    for kind, wrapper in over:
        handed_over(rank, kind, wrapper)
    distributed.barrier()
    os._exit(0)  # an interpreter that ends while gloo's threads run may abort, with all its work done


def through(cases: list[tuple[str, str, str]], over: list[tuple[str, str]], folder: Path) -> None:
    for kind, recipe in {(kind, recipe) for kind, recipe, _ in cases}:
        model = make(kind)
        train(model, RECIPES[recipe], 0, 3)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / f"{kind}-{recipe}", no_dist=True)
        (folder / f"{kind}-{recipe}.json").write_text(json.dumps(go_on(model, RECIPES[recipe])))
    multiprocessing.spawn(run, args=(cases, over, folder), nprocs=WORLD)
    for kind, recipe, how in cases:
        if (folder / f"{kind}-{recipe}-{how}").exists():
            model = read(make(kind, 4), folder / f"{kind}-{recipe}-{how}", no_dist=True)
            assert go_on(model, RECIPES[recipe]) == json.loads((folder / f"{kind}-{recipe}.json").read_text()), (kind, recipe, how)


def test_a_checkpoint_goes_through_two_processes(tmp_path: Path) -> None:
    through(FEW, [("foreign", wrapper) for wrapper in WRAPPERS], tmp_path)
    state = make("quantized", 2).state_dict()
    wanted = r"CheckpointError: [^\n]*Float8Tensor: expected all rows at once, got 16 of 32; [^\n]*LoadPlanner"
    with pytest.raises(dcp.CheckpointException, match=wanted):
        dcp.load({"0.weight": state["0.weight"]}, checkpoint_id=tmp_path / "quantized-delayed-whole", no_dist=True)


@pytest.mark.slow
def test_every_checkpoint_goes_through_two_processes(tmp_path: Path) -> None:
    through(REST, list(itertools.product(("linear", "nested", "ops", "ops-linear", "attention"), WRAPPERS)), tmp_path)
