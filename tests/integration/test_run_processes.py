"""``fusible run`` with modules, other capabilities, and programs that start processes of their own: each is served as the program is."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILDREN = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp

def work(rank):
    assert torch.cuda.is_available() and torch.zeros(1, device="cuda").is_cuda and torch.cuda.get_device_capability() == (10, 0)
    import transformer_engine_torch
    print("spawned", rank, transformer_engine_torch.__name__, flush=True)

if __name__ == "__main__":
    assert torch.cuda.get_device_capability() == (10, 0)
    mp.spawn(work, nprocs=1)
    code = "import transformer_engine_torch as tex, torch; print('child', tex.__name__, torch.zeros(1).is_cuda, *torch.cuda.get_device_capability())"
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run([sys.executable, "-c", "import sys; print('other', 'torch' in sys.modules, sys.modules['sitecustomize'].hidden)"], check=True)
"""
"""Is imported again by the process that it spawns."""
HIDDEN = "import sys\nsys.modules['sitecustomize'].hidden = 'was run too'\n"
WORKERS = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
assert dist.is_nccl_available() and dist.get_backend() == "gloo"
x = torch.full((4,), float(rank + 1), device="cuda")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4
group = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl")
inputs, outputs = [torch.full((2,), float(rank), device="cuda") for _ in range(2)], [torch.empty(4, device="cuda") for _ in range(2)]
with _coalescing_manager(group, async_ops=True) as work:
    for part, whole in zip(inputs, outputs):
        dist.all_gather_into_tensor(whole, part, group=group)
work.wait()
assert [whole.tolist() for whole in outputs] == [[0.0, 0.0, 1.0, 1.0]] * 2
sums = [torch.empty(1, device="cuda") for _ in range(2)]
with _coalescing_manager(group, x.device):
    for own in sums:
        dist.reduce_scatter_tensor(own, torch.arange(2.0, device="cuda"), group=group)
assert [own.item() for own in sums] == [2.0 * rank] * 2
got = torch.empty(1, device="cuda")
sent = torch.tensor([float(rank)], device="cuda")
for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
    request.wait()
    request.wait()  # NCCL's may be waited for again
assert got.item() == 1.0 - rank and request.is_completed()
for together in (True, False):
    got.fill_(-1.0)
    with _coalescing_manager(group, x.device, async_ops=together) as work:
        dist.isend(sent, 1 - rank, group)
        dist.irecv(got, 1 - rank, group)
    if together:
        work.wait()
    assert got.item() == 1.0 - rank
for options in ({"device_ids": [rank], "output_device": rank}, {}):
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, device="cuda", bias=False), **options)
    replica(torch.full((1, 2), float(rank), device="cuda")).sum().backward()
    assert replica.module.weight.grad.tolist() == [[0.5, 0.5]]  # the mean over both
for options in ({"device_id": torch.cuda.current_device()}, {}):
    sharded = FullyShardedDataParallel(torch.nn.Linear(2, 1, device="cuda", bias=False), **options)
    sharded(torch.full((1, 2), float(rank), device="cuda")).sum().backward()
    assert next(sharded.parameters()).grad.tolist() == [0.5]  # its half of that
assert torch.nn.DataParallel(torch.nn.Identity().cuda())(x) is x
assert init_device_mesh("cuda", (2,), mesh_dim_names=("data",)).device_type == "cpu"
os.write(1, f"rank {rank} done\\n".encode())  # in one piece: print would write the end of the line by itself
dist.barrier(device_ids=[rank])
dist.destroy_process_group()
"""
LEFT_AT_END = """
import atexit
from pathlib import Path
import torch

def look():
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("left at the end:", torch.distributed.is_initialized(), sum("gloo" in name for name in threads))

atexit.register(look)  # run after what is registered later
"""
LEFT = """
import left_at_end
import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
cycle = [dist.group.WORLD]
cycle.append(cycle)
dist.all_reduce(torch.ones(300, device="cuda"), async_op=True)
print("there:", dist.is_initialized())
"""
RECIPES = """
import torch
import transformer_engine.pytorch as te

layer = te.Linear(64, 64)
with te.autocast():
    y = layer(torch.ones(32, 64, device="cuda"))
y.sum().backward()
print(type(te.get_default_recipe()).__name__, layer.weight.grad.shape[0])
"""


def _run(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """What ``fusible run`` with these arguments prints."""
    command = [sys.executable, "-m", "fusible", "run", "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_processes_that_a_program_starts_are_served(tmp_path: Path) -> None:
    """Those of multiprocessing and of a shell; one that asks for no torch imports none, and what it would have run at its start is run."""
    (tmp_path / "program.py").write_text(CHILDREN)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDDEN)
    printed = _run(tmp_path, "--capability", "10.0", "program.py", PYTHONPATH=str(tmp_path / "hidden"))
    assert printed.splitlines() == ["spawned 0 fusible.tex", "child fusible.tex True 10 0", "other False was run too"]


def test_a_process_that_imports_the_module_by_another_name_waits_for_nothing() -> None:
    finders = list(sys.meta_path)
    sys.modules.pop(name := "fusible.compat.site.sitecustomize", None)
    importlib.import_module(name)
    assert sys.meta_path == finders


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_workers_of_torchrun_meet_over_gloo(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKERS)
    printed = _run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "worker.py", OMP_NUM_THREADS="1")
    assert sorted(printed.splitlines()) == ["rank 0 done", "rank 1 done"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_a_program_that_leaves_its_groups_ends_without_them(tmp_path: Path) -> None:
    """Else a thread of gloo that is still at work while Python is taken down aborts the process, a few times in a hundred."""
    (tmp_path / "left_at_end.py").write_text(LEFT_AT_END)
    (tmp_path / "program.py").write_text(LEFT)
    assert _run(tmp_path, "program.py") == "there: True\nleft at the end: False 0\n"


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="NVIDIA's Python package is not installed")
@pytest.mark.parametrize(("capability", "recipe"), [("9.0", "DelayedScaling"), ("10.0", "MXFP8BlockScaling")])
def test_the_default_recipe_is_the_one_of_the_capability(tmp_path: Path, capability: str, recipe: str) -> None:
    (tmp_path / "program.py").write_text(RECIPES)
    assert _run(tmp_path, "--capability", capability, "program.py") == f"{recipe} 64\n"
