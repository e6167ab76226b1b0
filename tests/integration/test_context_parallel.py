"""Attention of NVIDIA's package over two processes that share each sequence, under the device map: what one process alone computes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOW = ["p2p-bshd-causal", "p2p-sbhd-no_mask", "all_gather-sbhd-causal", "a2a-bshd-causal"]
"""How the processes share: by what they exchange, the layout and the mask."""

WORKER = """
import os, sys
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")


def own(x, dim):  # the first and the last of four pieces, or the two between: as much work for each where the mask is causal
    pieces = x.detach().chunk(4, dim)
    return torch.cat([pieces[rank], pieces[3 - rank]], dim)


def passes(kind, layout, mask, tensors, group=None):
    q, k, v, grad = tensors
    attention = te.DotProductAttention(4, 32, attn_mask_type=mask, qkv_format=layout)
    if group is not None:
        attention.set_context_parallel_group(group, [0, 1], torch.cuda.Stream(), kind)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y = attention(q, k, v)
    y.backward(grad.flatten(2))
    return [y, q.grad, k.grad, v.grad]


for how in sys.argv[1:]:
    torch.manual_seed(0)
    layout = how.split("-")[1]
    shape, dim = ((2, 16, 4, 32), 1) if layout == "bshd" else ((16, 2, 4, 32), 0)
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    alone = passes(*how.split("-"), [x.clone() for x in whole])
    shared = passes(*how.split("-"), [own(x, dim) for x in whole], dist.new_group([0, 1], backend="nccl"))
    worst = max(((got - own(wanted, dim)).abs().max() / wanted.abs().max()).item() for got, wanted in zip(shared, alone))
    os.write(1, f"{how} of rank {rank}: {worst}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="NVIDIA's Python package is not installed")
def test_two_processes_that_share_sequences_compute_what_one_does(tmp_path: Path) -> None:
    """Each partial result is rounded to bf16 before it is added to the other."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "fusible", "run", "--device", "cpu", "-m", "torch.distributed.run", "--nproc-per-node", "2", "worker.py", *HOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    errors = {name: float(error) for name, _, error in (line.partition(": ") for line in done.stdout.splitlines())}
    assert set(errors) == {f"{how} of rank {rank}" for how in HOW for rank in (0, 1)}
    assert max(errors.values()) <= 2 * torch.finfo(torch.bfloat16).eps, done.stdout
