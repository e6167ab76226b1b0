"""What is measured of a training step's memory in each process of a group: for ``test_layout_memory``."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_models import Dimensions, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusible
from fusible import GroupedQuerySelfAttention, Linear, MixtureOfExperts, Residual, RMSNorm, Sequential, SwiGLU
from fusible.distributed import gather_quantized, local_batch, parallelize, split_stages
from fusible.distributed.cost import Architecture, Experts
from fusible.quantized import Recipe
from fusible.tex.backends.torch_backend import collectives

ARCHITECTURE = Architecture(layers=4, hidden=256, heads=4, groups=2, inner=512, vocabulary=512)
MIXTURE = replace(ARCHITECTURE, experts=Experts(count=4, chosen=2, inner=384, shared=512, every=2))
"""Every other block of which has four experts, beside the layer that all tokens share."""
SEQUENCES, LENGTH, MICROBATCHES = 8, 128, 4
TOKENS = SEQUENCES * LENGTH

RECIPES: dict[str, tuple[Recipe | None, torch.dtype]] = {
    "fp32": (None, torch.float32),
    "bf16": (None, torch.bfloat16),
    "delayed": (fusible.DelayedScaling(), torch.bfloat16),
    "current": (fusible.Float8CurrentScaling(), torch.bfloat16),
    "block": (fusible.Float8BlockScaling(), torch.bfloat16),
    "mxfp8": (fusible.MXFP8BlockScaling(), torch.bfloat16),
    "nvfp4": (fusible.NVFP4BlockScaling(), torch.bfloat16),
}


class Meter(TorchDispatchMode):
    """The bytes of the tensors of this process: exact, and the same each time. What a call of torch takes and gives is known by weak references, and
    looked at after each call; so a tensor that a thread of the group lets go of last is seen to go as well.

    ``with Meter() as meter: ...; meter.mark("begin"); ...``: afterwards ``now`` has the bytes at each mark, and ``most`` the most between it and the
    next; of tensors that a call in the body has taken or given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._known: set[StorageWeakRef] = set()
        self._at = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = {StorageWeakRef(_local(value).untyped_storage()) for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)}
        if not seen <= self._known:
            self._known |= seen
            self.most[self._at] = max(self.most.get(self._at, 0), self.total)
        return result

    @property
    def total(self) -> int:
        self._known = {place for place in self._known if not place.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(place.cdata) for place in self._known)
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def mark(self, name: str) -> None:
        gc.collect()
        self._at, self.now[name] = name, self._settled()

    def _settled(self) -> int:
        """The bytes once they have not changed for a while: threads of the group let go of what they sent some time after it has arrived."""
        found, since = self.total, time.monotonic()
        while time.monotonic() < since + 0.1:
            time.sleep(0.005)
            if self.total != found:
                found, since = self.total, time.monotonic()
        return found


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


class Model(nn.Module):
    """The decoder of which ``of`` has the sizes."""

    def __init__(self, dtype: torch.dtype, of: Architecture = ARCHITECTURE) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(of.vocabulary, of.hidden)
        linear = Linear(of.hidden, of.vocabulary, bias=False)
        blocks = [_block(of, of.experts is not None and (i + 1) % of.experts.every == 0) for i in range(of.layers)]
        self.body = Sequential(*blocks, RMSNorm(of.hidden), linear)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(text).to(self.dtype))  # type: ignore[no-any-return]


def _block(of: Architecture, mixed: bool = False) -> Sequential:
    h, width = of.hidden, of.hidden // of.heads
    mixture = [MixtureOfExperts(h, of.experts.inner, of.experts.count, of.experts.chosen)] if mixed and of.experts is not None else []
    attention = GroupedQuerySelfAttention(h, of.heads, of.groups, rope_base=10000.0)
    return Sequential(
        Residual(RMSNorm(h), Linear(h, h + 2 * of.groups * width, bias=False), attention, Linear(h, h, bias=False)),
        Residual(RMSNorm(h), Linear(h, 2 * of.inner, bias=False), SwiGLU(), Linear(of.inner, h, bias=False)),
        *mixture,
    )


def _laid_out(
    dimensions: Dimensions, sequence: bool, dtype: torch.dtype, gathered: Recipe | None = None, of: Architecture = ARCHITECTURE
) -> tuple[Model, DeviceMesh | None]:
    """``gathered``: by which weights are gathered in 8 bits, if by any."""
    model = Model(dtype, of)
    if not dimensions:
        return model, None
    mesh = mesh_of(*dimensions)
    parallelize(model, mesh, sequence_parallel=sequence, shared_output=True)
    names = mesh.mesh_dim_names or ()
    shards = tuple(name for name in names if name in ("dp_shard", "cp"))
    if shards:
        if gathered is not None:
            gather_quantized(model, gathered)
        policy = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype)
        along = mesh["dp_replicate", "dp_shard"] if "dp_replicate" in names else mesh[shards]._flatten() if len(shards) > 1 else mesh[shards]
        for block in list(model.body)[: ARCHITECTURE.layers]:
            fully_shard(block, mesh=along, mp_policy=policy)
        fully_shard(model, mesh=along, mp_policy=policy)
    return model, mesh


def sent_for_parameters(dimensions: Dimensions, recipe: str, low: bool, of: Architecture, rank: int) -> float:
    """The bytes that a step's gathers of parameters and sums of gradients send, as rings do, of a model whose blocks are sharded one by one. ``low``:
    whether weights are gathered as the recipe quantizes them."""
    chosen, dtype = RECIPES[recipe]
    model, mesh = _laid_out(dimensions, False, dtype, chosen if low else None, of)
    assert mesh is not None
    text = torch.randint(ARCHITECTURE.vocabulary, (1, 33), generator=torch.Generator().manual_seed(rank))
    columns = mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else None
    loss, found = fusible.CrossEntropyLoss(group=columns), list[float]()

    def counting(function: Callable[..., Any], whole: str, rounds: int) -> Callable[..., Any]:
        taken = inspect.signature(function)

        def call(*args: Any, **options: Any) -> Any:
            given = taken.bind(*args, **options).arguments
            size = dist.get_world_size(given["group"])
            if given["group"] is not columns:
                found.append(rounds * given[whole].nbytes * (size - 1) / size)
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for names, whole, rounds in (
            (("all_gather_single", "all_gather_into_tensor"), "output_tensor", 1),
            (("reduce_scatter_single", "reduce_scatter_tensor"), "input", 1),
            (("all_reduce",), "tensor", 2),
        ):
            name = next(name for name in names if hasattr(dist, name))  # newer releases of torch have renamed two
            patch.setattr(dist, name, counting(getattr(dist, name), whole, rounds))
        patch.setattr(collectives, "_all_reduce", counting(collectives._all_reduce, "x", 2))
        with fusible.autocast(enabled=chosen is not None, recipe=chosen):
            loss(model(text[:, :-1]), text[:, 1:]).backward()
    return sum(found)


def measured(dimensions: Dimensions, sequence: bool, recipe: str, low: bool, of: Architecture, rank: int) -> dict[str, int]:
    """Bytes of the second step of a model, by what they are for. ``low``: whether weights are gathered as the recipe quantizes them."""
    chosen, dtype = RECIPES[recipe]
    with Meter() as meter:
        model, mesh = _laid_out(dimensions, sequence, dtype, chosen if low else None, of)
        meter.mark("weights")
        _train(model, mesh, chosen, rank, meter)
    now, most = meter.now, meter.most
    weights = {_local(p).untyped_storage()._cdata: _local(p).untyped_storage().nbytes() for p in model.parameters()}
    return {
        "weights": sum(weights.values()),
        "gradients": now["stepped"] - now["cleared"],
        "optimizer": now["stepped"] - now["differentiated"],
        "kept": now["forward"] - now["weights"] - (now["stepped"] - now["differentiated"]),
        "peak": max(most["cleared"], most["forward"], most["step again"]) - now["weights"] + sum(weights.values()),
    }


def _train(model: Model, mesh: DeviceMesh | None, recipe: Recipe | None, rank: int, meter: Meter) -> None:
    """Two steps: in the second there is all that there will be."""
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    loss = fusible.CrossEntropyLoss(group=mesh["tp"].get_group() if mesh is not None and "tp" in names else None)
    optimizer = torch.optim.AdamW(model.parameters())
    parts = mesh["cp"].size() if mesh is not None and "cp" in names else 1
    text = torch.randint(ARCHITECTURE.vocabulary, (SEQUENCES, parts * LENGTH + 1), generator=torch.Generator().manual_seed(rank // parts))
    read, following = text[:, :-1], text[:, 1:]
    if mesh is not None and parts > 1:
        read, following = local_batch(mesh["cp"], read, following)

    def forward() -> Any:
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            return loss(model(read), following)

    forward().backward()
    meter.mark("differentiated")
    optimizer.step()
    meter.mark("stepped")
    optimizer.zero_grad()
    meter.mark("cleared")
    value = forward()
    meter.mark("forward")
    value.backward()
    del value
    meter.mark("step again")
    optimizer.step()
    meter.mark("end")


class _Stage(nn.Module):
    """A part of the decoder, with the embedding where it is the first."""

    def __init__(self, whole: Model, stage: int) -> None:
        super().__init__()
        self.embedding, self.dtype = whole.embedding if stage == 0 else None, whole.dtype
        self.body = split_stages(whole.body, [ARCHITECTURE.layers // 2])[stage]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x if self.embedding is None else self.embedding(x).to(self.dtype))  # type: ignore[no-any-return]


def measured_in_stages(recipe: str, rank: int) -> dict[str, int]:
    """Bytes of the second step of a model in two stages, by what they are for."""
    chosen, dtype = RECIPES[recipe]
    with Meter() as meter:
        mesh = mesh_of(("pp", 2))
        model = parallelize(_Stage(Model(dtype), rank), mesh)
        meter.mark("weights")
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh.get_group())
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=fusible.CrossEntropyLoss(), scale_grads=False)
        optimizer = torch.optim.AdamW(model.parameters())
        text = torch.randint(ARCHITECTURE.vocabulary, (MICROBATCHES * SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        for step in ("", " again"):
            with fusible.autocast(enabled=chosen is not None, recipe=chosen):
                schedule.step(*([text[:, :-1]] if rank == 0 else []), **({"target": text[:, 1:], "losses": []} if rank else {}), return_outputs=False)
            meter.mark(f"differentiated{step}")
            optimizer.step()
            meter.mark(f"stepped{step}")
            optimizer.zero_grad()
            meter.mark(f"cleared{step}")
    now, most, weights = meter.now, meter.most, sum(p.untyped_storage().nbytes() for p in model.parameters())
    return {
        "weights": weights,
        "gradients": now["stepped"] - now["cleared"],
        "optimizer": now["stepped"] - now["differentiated"],
        "peak": max(most["cleared"], most["differentiated again"]) - now["weights"] + weights,
    }
