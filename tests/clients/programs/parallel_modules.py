"""A stack of NVIDIA's modules in several processes: ``parallel_modules.py MODES``, a JSON list. Prints losses and products of each mode and way.

The ways: ``alone`` (each process has all data), ``ddp`` and ``fsdp2`` (each has its part of it).
"""

import json
import os
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from client_recipes import autocast
from counted import quantized_products
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LENGTH, BATCH, STEPS = 64, 32, 4, 3


class Network(torch.nn.Module):
    """Two Transformer layers and what classifies their tokens."""

    def __init__(self) -> None:
        super().__init__()
        more = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd", "self_attn_mask_type": "causal"}
        layers = [te.TransformerLayer(WIDTH, 2 * WIDTH, 4, params_dtype=torch.bfloat16, **more) for _ in range(2)]
        self.layers = torch.nn.ModuleList(layers)
        self.head = te.LayerNormLinear(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(way: str) -> torch.nn.Module:
    torch.manual_seed(0)
    network = Network().cuda()
    if way == "ddp":
        return DistributedDataParallel(network, device_ids=[int(os.environ["LOCAL_RANK"])])
    if way == "fsdp2":
        for part in (*network.layers, network.head):
            fully_shard(part)
        fully_shard(network)
    return network


def trained(mode: str, way: str) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=draws).bfloat16()
    target = torch.randint(0, 2 * WIDTH, (BATCH, LENGTH), generator=draws)
    if way != "alone":
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        x, target = x[rank::ranks], target[rank::ranks]
    x, target, losses = x.cuda(), target.cuda(), []
    network = made(way)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    with quantized_products() as products:
        for _ in range(STEPS):
            with autocast(mode):
                y = network(x)
            loss = torch.nn.functional.cross_entropy(y.float().flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, op=torch.distributed.ReduceOp.AVG)
            losses.append(mean.item())
    linears = 4 * 2 + 1  # a layer has two of attention and two of its MLP
    return {"losses": losses, "linears": linears, "products": len(products), "same": is_same_everywhere(network)}


def is_same_everywhere(network: torch.nn.Module) -> bool:
    """Whether all processes hold the same numbers; of sharded parameters each has its own part."""
    apart = []
    for parameter in network.parameters():
        if not hasattr(parameter, "full_tensor"):
            most, least = (parameter.detach().float().clone() for _ in range(2))
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
            apart.append(not torch.equal(most, least))
    return not any(apart)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    found = [{way: trained(mode, way) for way in ("alone", "ddp", "fsdp2")} for mode in json.loads(sys.argv[1])]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
