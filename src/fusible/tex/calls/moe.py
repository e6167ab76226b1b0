"""What is checked of the calls that move tokens to experts and of the router, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.enums import NVTERoutingMapFormat
from fusible.tex.protocol import TensorLike, check_shape

__all__ = [
    "Routing",
    "SCORE_FUNCTIONS",
    "check_aux_loss",
    "check_bin_bounds",
    "check_float",
    "check_histogram",
    "check_integers",
    "check_moved",
    "check_permutation",
    "check_score_gradient",
    "map_shape",
]

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_FORMATS = tuple(int(value) for value in NVTERoutingMapFormat)


def check_float(x: TensorLike, of: str, floating: frozenset[Any]) -> None:
    """Raise ``DTypeError`` unless ``x`` has one of the dtypes ``floating``."""
    if x.dtype not in floating:
        raise DTypeError(expected("float32, bfloat16 or float16", of=of, got=x.dtype, do="cast it"))


def check_integers(x: TensorLike, of: str, allowed: Sequence[Any]) -> None:
    """Raise ``DTypeError`` unless ``x`` has one of the dtypes ``allowed``."""
    if x.dtype not in allowed:
        raise DTypeError(expected(" or ".join(map(str, allowed)), of=of, got=x.dtype, do="cast it"))


def check_permutation(x: TensorLike, indices: TensorLike) -> None:
    """Raise ``ShapeError`` unless ``x [T, H]`` and ``indices [T, K]`` belong together."""
    if x.ndim != 2 or indices.ndim != 2 or x.shape[0] != indices.shape[0]:
        got = f"{list(x.shape)} and {list(indices.shape)}"
        raise ShapeError(expected("[T, H] and [T, K]", of="input and indices of moe_permute_fwd", got=got, do="pass the experts of each token"))


def check_moved(row_id_map: TensorLike, prob: TensorLike | None, tokens: int, copies: int, function: str) -> None:
    """Raise ``ShapeError`` unless ``row_id_map`` has ``copies`` rows for each token, and ``prob`` a weight for each or none at all."""
    if math.prod(row_id_map.shape) != tokens * copies:
        got = list(row_id_map.shape)
        raise ShapeError(expected(f"{tokens * copies} entries", of=f"row_id_map of {function}", got=got, do="pass the map of moe_permute_fwd"))
    if prob is not None and math.prod(prob.shape):
        check_shape(prob, (tokens, copies), f"prob of {function}")


class Routing(NamedTuple):
    """A checked call of a router; ``groups`` is 0 where experts are not grouped."""

    experts: int
    topk: int
    groups: int
    group_topk: int
    scaling: float
    score: str
    map_format: int

    @classmethod
    def of(
        cls,
        logits: TensorLike,
        topk: int,
        score_function: str,
        routing_map_format: int,
        function: str,
        *,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
    ) -> Routing:
        """Raises ``ShapeError`` or ``ArgumentError`` for what does not fit together."""
        if logits.ndim < 1:
            raise ShapeError(expected("[*leading, experts]", of=f"logits of {function}", got=list(logits.shape), do="add a dimension"))
        experts = logits.shape[-1]
        if not 0 < topk <= experts:
            raise ArgumentError(expected(f"1 to {experts}", of=f"topk of {function}", got=topk, do="choose at least one expert, and at most all"))
        if score_function not in SCORE_FUNCTIONS:
            names = ", ".join(SCORE_FUNCTIONS)
            raise ArgumentError(expected(f"one of {names}", of=f"score_function of {function}", got=repr(score_function), do="pass one of these"))
        if int(routing_map_format) not in _FORMATS:
            got = routing_map_format
            raise ArgumentError(expected("0 or 1", of=f"routing_map_format of {function}", got=got, do="pass an NVTERoutingMapFormat"))
        groups, chosen = _groups(experts, topk, num_groups, group_topk, function)
        scaling = 1.0 if scaling_factor is None else float(scaling_factor)
        return cls(experts, topk, groups, chosen, scaling, score_function, int(routing_map_format))


def _groups(experts: int, topk: int, num_groups: int | None, group_topk: int | None, function: str) -> tuple[int, int]:
    groups, chosen = num_groups or 0, group_topk or 0
    if chosen <= 0:
        return 0, 0
    fits = 0 < chosen <= groups and experts % groups == 0 and topk % chosen == 0 and topk // chosen <= experts // groups
    if not fits:
        raise ArgumentError(
            expected(
                f"groups that divide {experts} experts, and a group_topk that divides topk {topk} into no more than a group has",
                of=function,
                got=f"{num_groups} groups, of which {group_topk}",
                do="change num_groups or group_topk",
            )
        )
    return groups, chosen


def map_shape(shape: Sequence[int], map_format: int) -> tuple[int, ...]:
    """The shape of a routing map for logits of ``shape``."""
    last = shape[-1] if map_format == NVTERoutingMapFormat.BYTEMAP else (shape[-1] + 7) // 8
    return (*shape[:-1], last)


def check_score_gradient(routing: Routing, intermediate: TensorLike, grad: TensorLike, grad_logits: TensorLike, function: str) -> None:
    """Raise ``ShapeError`` unless what the backward of a router takes, and what it writes, has the shape of the gradient ``grad``."""
    check_shape(intermediate, grad.shape, f"intermediate_output of {function}")
    check_shape(grad_logits, grad.shape, f"grad_logits of {function}")


def check_bin_bounds(lower: float, upper: float) -> None:
    """Raise ``ArgumentError`` unless the bounds of a histogram are finite and ascending."""
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        got = f"{lower} and {upper}"
        raise ArgumentError(expected("finite bounds, the lower one first", of="bin_bounds", got=got, do="pass the range of the scores"))


def check_histogram(histogram: TensorLike, bin_bounds: TensorLike, routing: Routing, int32: Any, fp32: Any) -> None:
    """Raise unless ``histogram`` is int32 ``[experts, bins]`` and ``bin_bounds`` fp32 ``[2]``, and a token chooses fewer than all experts; the types
    are the backend's own values."""
    experts = routing.experts
    if routing.topk == experts:
        raise ArgumentError(expected(f"less than {experts} experts", of="topk of quantile balancing", got=routing.topk, do="choose fewer than all"))
    if histogram.dtype is not int32 or histogram.ndim != 2 or histogram.shape[0] != experts or not histogram.shape[1]:
        got = f"{histogram.dtype} {list(histogram.shape)}"
        raise ShapeError(expected(f"int32 [{experts}, bins]", of="a router's histogram", got=got, do="pass one row of bins per expert"))
    if bin_bounds.dtype is not fp32 or tuple(bin_bounds.shape) != (2,):
        got = f"{bin_bounds.dtype} {list(bin_bounds.shape)}"
        raise ShapeError(expected("fp32 [2]", of="bin_bounds", got=got, do="pass the lower and the upper bound"))


def check_aux_loss(probs: TensorLike, tokens_per_expert: TensorLike, rows: int, columns: int) -> None:
    """Raise ``ShapeError`` unless ``probs`` is ``[rows, columns]`` and ``tokens_per_expert`` has one number per column."""
    check_shape(probs, (rows, columns), "probs of fused_moe_aux_loss_fwd")
    check_shape(tokens_per_expert, (columns,), "tokens_per_expert of fused_moe_aux_loss_fwd")
