"""Parameters whose gradients are partial sums, because each process of a group has other rows: how they are marked, and reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusible import tex
from fusible.errors import ArgumentError, expected
from fusible.tex.calls.transaction import run

__all__ = ["mark", "materialized", "reduce_sequence_parallel_gradients"]

_groups: Any = WeakTensorKeyDictionary()
"""By marked parameter its group, where a pipeline knows it. No attribute: a process group cannot be saved with a model."""


def mark(parameter: Any, group: Any) -> None:
    """Let ``parameter.sequence_parallel`` be true, as NVIDIA's modules do for Megatron, unless a user has said what it is. ``group``: of the ranks
    that share out the rows."""
    if getattr(parameter, "sequence_parallel", None) is None:
        parameter.sequence_parallel = True
    _groups[parameter] = group


def materialized(parameter: Any) -> nn.Parameter:
    """A parameter on the default device in the place of one on the meta device, with its attributes (marks of parallelism among them)."""
    made = nn.Parameter(torch.empty_like(parameter, device=torch.get_default_device()), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def reduce_sequence_parallel_gradients(parameters: nn.Module | Iterable[torch.Tensor], group: Any = None) -> None:
    """Sum the gradients (``main_grad``, where a parameter has one) of the parameters whose ``sequence_parallel`` is true over their group.

    To be called in every process of it, after the last backward of a step and before gradients are clipped, where no one else does so: Megatron
    reduces them itself. Each call sums, so one too many multiplies. ``group``: of those whose group no pipeline knows; a pipeline knows it of what
    stands in one list with the layer or operation that scatters or gathers the rows. Raises ``ArgumentError`` where ``torch.distributed`` is not
    initialized but a parameter is marked.
    """
    chosen = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    buckets: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for p in chosen:
        if not getattr(p, "sequence_parallel", False):
            continue
        main_grad = getattr(p, "main_grad", None)
        gradient: Any = p.grad if main_grad is None else main_grad
        if gradient is not None:
            own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            buckets[_groups.get(p, group), own.dtype, own.device].append(own.detach())
    if buckets and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        do = "call torch.distributed.init_process_group first"
        raise ArgumentError(expected("an initialized torch.distributed", of="reduce_sequence_parallel_gradients", got="none", do=do))
    for (of, _, _), gradients in buckets.items():
        summed = tex.prim.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), of)
        parts = summed.split([gradient.numel() for gradient in gradients])
        run([partial(into.copy_, part.view(into.shape)) for into, part in zip(gradients, parts, strict=True)])
