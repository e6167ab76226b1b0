"""NVIDIA's modules shared by two processes against the same modules whole: what is compared in each process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from te_client import package, recipe_for

__all__ = ["JOBS", "beside_whole"]

SIZE, HIDDEN, FFN, HEADS, SEQUENCE, BATCH, PASSES = 2, 128, 256, 4, 64, 2, 3
PRODUCTS = 10
"""On the longest way through a layer: those of attention and its backward are in it."""
_LAYER: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
LAYERS: dict[str, dict[str, Any]] = {
    "layer": _LAYER,
    "gated layer": {**_LAYER, "normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2},
}
NAMES = (*LAYERS, "operations")
RECIPES = ("fp32", "bf16", "delayed", "current", "block", "mxfp8", "nvfp4")
JOBS = [(name, sequence, recipe) for name in NAMES for sequence in (False, True) for recipe in RECIPES]
Results = dict[str, torch.Tensor]


def built(te: Any, name: str, dtype: torch.dtype, *, shared: bool = False, sequence: bool = False) -> Any:
    """A module, or what a process has of it where it is ``shared``; with ``sequence`` the processes share out the rows of norms and residuals too."""
    if name in LAYERS:
        parts = {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "tp_size": SIZE, "sequence_parallel": sequence} if shared else {}
        return te.TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=dtype, **LAYERS[name], **parts)
    modes = [{"tensor_parallel_mode": mode, "sequence_parallel": sequence} if shared else {} for mode in ("column", "row")]
    norm, up = te.ops.LayerNorm(HIDDEN, dtype=dtype), te.ops.Linear(HIDDEN, FFN, dtype=dtype, **modes[0])
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence  # as NVIDIA's own norms have it, and Megatron reads it
    return te.ops.Sequential(norm, up, te.ops.GELU(), te.ops.Linear(FFN, HIDDEN, dtype=dtype, **modes[1]))


def own(name: str, whole: torch.Tensor, part: torch.Tensor, rank: int) -> torch.Tensor:
    """This process's part of a parameter or of its gradient, of the shape of ``part``. Gate and up lie one after the other, and are each divided."""
    if part.shape == whole.shape:
        return whole
    by = next(dim for dim in range(whole.ndim) if part.shape[dim] != whole.shape[dim])
    things = whole.chunk(2 if "fc1" in name and whole.shape[0] == 2 * FFN else 1)
    return torch.cat([thing.chunk(SIZE, dim=by)[rank] for thing in things])


def summed_bias(module: Any, name: str) -> bool:
    """Whether a parameter is the bias of a row-parallel operation, of which each process adds its own before the sum."""
    return not hasattr(module, "self_attention") and name == "3.bias"


def load(module: Any, values: Results, rank: int | None = None) -> Any:
    """Give a module its parameters, ``rank``'s parts of them where it is shared, and give it back."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = values[name] if rank is None else own(name, values[name], parameter, rank)
            parameter.copy_(value * (0.25 + 0.5 * rank) if rank is not None and summed_bias(module, name) else value)
    return module


def results(te: Any, module: Any, x: torch.Tensor, dy: torch.Tensor, recipe: Any, group: Any = None) -> Results:
    """Of the last of some passes: delayed scaling knows the amaxes of the ones before."""
    leaf = x
    for _ in range(PASSES):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
            y = module(leaf)
        y.backward(dy)
    assert leaf.grad is not None
    found = {"output": y.detach(), "input's gradient": leaf.grad}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        if group is not None and getattr(parameter, "sequence_parallel", False):  # of its own rows alone: Megatron sums them so
            dist.all_reduce(parameter.grad)
        found[name] = parameter.grad
    return {name: value.float() for name, value in found.items()}


def drawn(te: Any, name: str) -> Results:
    """Parameters that bf16 holds; gammas and biases, too, are none that are easy to guess."""
    module = built(te, name, torch.bfloat16)
    with torch.no_grad():
        return {of: (p + 0.02 * torch.randn_like(p)).float() for of, p in module.named_parameters()}


def parted(name: str, found: Results, whole: Results, rank: int, sequence: bool) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What the process has, beside the same of the whole."""
    for of, value in found.items():
        rows = sequence and of in ("output", "input's gradient")
        yield of, value, whole[of].chunk(SIZE)[rank] if rows else own(of, whole[of], value, rank)


def beside_whole(name: str, sequence: bool, recipe: str, rank: int) -> bool:
    """The shared module computes what the whole one does.

    In fp32 both differ by the order of sums alone: by norm of ``FFN`` roundings, one matrix product after the other. Otherwise both are beside the
    whole in fp32: what is shared is as far from it as what is whole, which rounds as often. By half as much again at most, for parts have scales of
    their own; and by a step of bf16, ``2**-8``, for each of two partial sums is rounded to it before they are summed.
    """
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    with package() as te, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        values = drawn(te, name)
        x, dy = (torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16().float() for _ in range(2))
        used = None if recipe == "fp32" else recipe_for(te, recipe)
        own_x, own_dy = (t.chunk(SIZE)[rank] if sequence else t for t in (x, dy))
        exact = results(te, load(built(te, name, torch.float32), values), x, dy, None)
        whole = results(te, load(built(te, name, dtype), values), x.to(dtype), dy.to(dtype), used)
        shared = load(built(te, name, dtype, shared=True, sequence=sequence), values, rank)
        found = results(te, shared, own_x.to(dtype), own_dy.to(dtype), used, dist.group.WORLD)
    assert found.keys() == exact.keys()
    for (of, value, wanted), (_, _, near) in zip(parted(name, found, exact, rank, sequence), parted(name, found, whole, rank, sequence), strict=True):
        bound = 1.5 * (near - wanted).norm() + 2.0**-8 * wanted.norm()
        if recipe == "fp32":
            bound = math.sqrt(PRODUCTS * FFN) * torch.finfo(torch.float32).eps * wanted.norm()
        assert value.shape == wanted.shape and (value - wanted).norm() <= bound, f"{of}: {(value - wanted).norm() / bound:.3g} times the bound"
    return True
