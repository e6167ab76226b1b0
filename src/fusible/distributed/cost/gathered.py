"""Parameters that FSDP2 gathers, and what is sent of them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from fusible.distributed.cost.architectures import Architecture, BlockKind, elements
from fusible.distributed.cost.layout import Layout, Part, held_rows, plan_of
from fusible.nvte import DType
from fusible.pytorch.product_weights import WEIGHT
from fusible.quantized import DelayedScalingRequest, Float8CurrentScaling, GroupedTensor, Recipe, quantizer_for_role

__all__ = ["Gathered", "gathered"]


class Gathered(NamedTuple):
    """Of the parameters of a part: how many bytes are gathered each time, in all the processes that share them out; how many largest magnitudes are
    exchanged before; and the bytes of copies in the types of products that no process makes, as they come in these."""

    nbytes: float
    amaxes: int
    spared: int


def gathered(
    part: Part, architecture: Architecture, kind: BlockKind, layout: Layout, recipe: Recipe | None, dtype: torch.dtype, shards: int
) -> Gathered:
    """What is gathered of a part (``plan_of``) that ``shards`` processes share out, or of one of the experts that they share out: each element in
    ``dtype``; with ``layout.gather_quantized`` weights of products as ``gather_quantized`` has them gathered, by ``Float8CurrentScaling`` where
    ``recipe`` is ``DelayedScaling``."""
    low = recipe is not None and layout.gather_quantized and shards > 1
    if part == "expert" and kind.experts is not None:
        low = low and kind.experts.count // layout.of_experts % shards == 0
    return _gathered(part, architecture, kind, layout.rewriting, recipe if low else None, dtype, shards)


@cache
def _gathered(
    part: Part, architecture: Architecture, kind: BlockKind, layout: Layout, recipe: Recipe | None, dtype: torch.dtype, shards: int
) -> Gathered:
    plan = plan_of(part, architecture, kind, layout, recipe, dtype, DType.Float32)
    nbytes, amaxes, spared = float(elements(plan.ops) * dtype.itemsize), 0, 0
    quantizer: Any = None if recipe is None else _quantizer(recipe)
    rows, parameters = held_rows(part, architecture, kind, layout), [parameter for op in plan.ops for parameter in op.args]
    stacked = part == "expert"
    count = 1 if stacked else shards  # an expert lies in one of them
    for place in {arg.place for arg in plan.quantized_args} if quantizer is not None else ():
        width, parts = parameters[place].shape[1], rows[place]
        if parts is None:  # of which processes take lines
            continue
        of_parts = [_shard(quantizer, each, width, count, stacked=stacked) for each in parts]
        if any(made is None for made in of_parts):
            continue
        for each, made in zip(parts, of_parts, strict=True):
            sent, told = made.fsdp_pre_all_gather(None, None, None, None, None)
            nbytes += count * sum(tensor.nbytes for tensor in sent) - each * width * dtype.itemsize
            amaxes += told[3]  # numbers that all shards have alike
        if len(parts) == 1:  # others are joined in each pass
            spared += count * sum(tensor.nbytes for tensor in of_parts[0].fsdp_extract_buffers()[0])
    return Gathered(nbytes, amaxes, spared)


def _quantizer(recipe: Recipe) -> Any:
    found = quantizer_for_role(recipe.immutable(), WEIGHT)
    return quantizer_for_role(Float8CurrentScaling().immutable(), WEIGHT) if isinstance(found, DelayedScalingRequest) else found


def _shard(quantizer: Any, rows: int, width: int, shards: int, *, stacked: bool) -> Any:
    """A process's shard, quantized, without memory, or one of the matrices that are ``stacked`` in it; None where it is gathered as it is held."""
    values = torch.empty(rows // shards, width, device="meta")
    if rows % shards or not quantizer.is_quantizable(values):
        return None
    if stacked:
        return GroupedTensor.make_grouped_tensor_with_shapes(1, [values.shape], quantizer, values.device, values.dtype)
    made = quantizer(values)
    return None if rows // shards % made._row_step() else made
