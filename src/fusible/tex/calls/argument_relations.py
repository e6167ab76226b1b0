"""How the arguments of a function must fit one another, where dtypes and shapes alone do not say it: asked of calls that failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusible.errors import ArgumentError, FusibleError, ShapeError, expected
from fusible.tex.calls.optimizer import HELD

__all__ = ["unrelated"]

Named = Mapping[str, Any]


def unrelated(function: str, named: Named, of: str) -> FusibleError | None:
    """What is wrong between the arguments of ``function``, which is called ``of`` in the sentence; None where nothing is."""
    relation = _RELATIONS.get(function, _alike if "tensor_lists" in named else None)
    return relation(named, of) if relation else None


def _broadcast(named: Named, of: str) -> FusibleError | None:
    a, b = named["a"], named["b"]
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    if all(1 in (m, n) or m == n for m, n in pairs):
        return None
    return ShapeError(expected(f"a shape that broadcasts with {list(a.shape)}", of=f"b of {of}", got=list(b.shape), do="reshape one of a and b"))


def _reshaped(named: Named, of: str) -> FusibleError | None:
    x, shape = named["x"], list(named["shape"])
    count = math.prod(x.shape)
    if math.prod(shape) == count or (shape.count(-1) == 1 and math.prod(shape) and count % math.prod(shape) == 0):
        return None
    return ShapeError(expected(f"{count} elements, those of x {list(x.shape)}", of=f"shape of {of}", got=shape, do="pass a shape of as many"))


def _dim(dim: int, rank: int, of: str) -> FusibleError | None:
    if -rank <= dim < rank:
        return None
    return ArgumentError(expected(f"one of the {rank} dimensions of x", of=f"dim of {of}", got=dim, do="pass a dimension that there is"))


def _split(named: Named, of: str) -> FusibleError | None:
    x, sizes, dim = named["x"], list(named["sizes"]), int(named["dim"])
    wrong = _dim(dim, len(x.shape), of)
    if wrong is not None or sum(sizes) == x.shape[dim]:
        return wrong
    wanted = f"pieces that add up to the {x.shape[dim]} of dimension {dim} of x"
    return ShapeError(expected(wanted, of=f"sizes of {of}", got=sizes, do="pass the sizes of all pieces"))


def _concatenated(named: Named, of: str) -> FusibleError | None:
    tensors, dim = named["tensors"], int(named["dim"])
    if not tensors:
        return ArgumentError(expected("at least one tensor", of=f"tensors of {of}", got="none", do="pass one"))
    first = list(tensors[-1].shape)
    wrong = _dim(dim, len(first), of)
    if wrong is not None:
        return wrong
    for i, x in enumerate(tensors):
        shape = list(x.shape)
        if len(shape) != len(first) or any(m != n for place, (m, n) in enumerate(zip(shape, first, strict=True)) if place != dim % len(first)):
            wanted = f"the shape {first} but for dimension {dim}"
            return ShapeError(expected(wanted, of=f"tensors[{i}] of {of}", got=shape, do="pass tensors that differ there alone"))
    return None


def _groups_within(named: Named, of: str) -> FusibleError | None:
    multiple = named["multiple"]
    if multiple < 1:
        return ArgumentError(expected("at least 1", of=f"multiple of {of}", got=multiple, do="pass what sizes are padded to"))
    x, sizes, rows = named["x"], named["sizes"], named.get("rows")
    if math.prod(sizes.shape) == 0:
        return ShapeError(expected("at least one group", of=f"sizes of {of}", got=list(sizes.shape), do="pass the rows of each group"))
    if rows is not None and x.shape[0] == 0:
        return ShapeError(expected("rows", of=f"x of {of}", got=list(x.shape), do="pass what was padded so"))
    if rows is not None:
        padded = sum(-(-int(size) // multiple) * multiple for size in sizes)
        if padded > x.shape[0]:
            return ShapeError(expected(f"{padded} rows, those of the padded groups", of=f"x of {of}", got=x.shape[0], do="pass what was padded so"))
    return None


def _mapped(rows: str) -> Callable[[Named, str], FusibleError | None]:
    def check(named: Named, of: str) -> FusibleError | None:
        row_id_map, x = named["row_id_map"], named[rows]
        if not isinstance(row_id_map, torch.Tensor) or not row_id_map.numel() or int(row_id_map.max()) < x.shape[0]:
            return None
        got = int(row_id_map.max())
        return ShapeError(expected(f"rows below {x.shape[0]}, those of {rows}", of=f"row_id_map of {of}", got=got, do="pass the map of these rows"))

    return check


def _as_many(named: Named, of: str) -> FusibleError | None:
    """For functions to which tensors that belong together are rows of numbers, in whatever shape."""
    return _together(named, of, math.prod)


def _held_as_many(named: Named, of: str) -> FusibleError | None:
    """``_as_many`` of all but the scales, of which a tensor has one or none."""
    scales = {place for _, place in HELD}
    return _together({"tensor_lists": [x for place, x in enumerate(named["tensor_lists"]) if place not in scales]}, of, math.prod)


def _alike(named: Named, of: str) -> FusibleError | None:
    return _together(named, of, list)


def _together(named: Named, of: str, size: Callable[[Any], Any]) -> FusibleError | None:
    for i, tensors in enumerate(zip(*named["tensor_lists"], strict=False)):
        shapes = [list(x.shape) for x in tensors if math.prod(x.shape) != 1]
        if any(size(shape) != size(shapes[0]) for shape in shapes):
            return ShapeError(expected("equal shapes", of=f"tensor_lists[..][{i}] of {of}", got=shapes, do="order the lists alike"))
    return None


def _attention_backward(named: Named, of: str) -> FusibleError | None:
    rank = len(named["Q"].shape)
    for name in ("O", "dO"):
        if len(named[name].shape) != rank:
            return ShapeError(expected(f"{rank} dimensions, as Q has", of=f"{name} of {of}", got=list(named[name].shape), do="reshape it"))
    stats = named["Aux_CTX_Tensors"][0] if named["Aux_CTX_Tensors"] else None
    if stats is not None and (len(stats.shape) != rank or stats.dtype is not torch.float32):
        wanted, got = f"float32 Stats of {rank} dimensions", f"{stats.dtype} {list(stats.shape)}"
        return ShapeError(expected(wanted, of=f"Aux_CTX_Tensors[0] of {of}", got=got, do="pass what the forward returned"))
    return None


def _given_amaxes(named: Named, of: str) -> FusibleError | None:
    for way in ("rowwise", "columnwise"):
        if getattr(named["quantizer"], f"{way}_usage", False) and named[f"{way}_amax"] is None:
            return ArgumentError(expected(f"the amaxes of the {way} copy", of=f"{way}_amax of {of}", got="None", do="pass one per member"))
    return None


_RELATIONS: dict[str, Callable[[Named, str], FusibleError | None]] = {
    "fused_attn_bwd": _attention_backward,
    "moe_permute_bwd": _mapped("input"),
    "moe_unpermute_bwd": _mapped("input_fwd"),
    "moe_unpermute_fwd": _mapped("input"),
    **dict.fromkeys(("multi_tensor_adam", "multi_tensor_scale", "multi_tensor_sgd"), _as_many),
    **dict.fromkeys(("multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0"), _as_many),
    "multi_tensor_adam_scaled": _held_as_many,
    "nvfp4_group_quantize_with_amax": _given_amaxes,
    "prim_add": _broadcast,
    "prim_concatenate": _concatenated,
    "prim_pad_groups": _groups_within,
    "prim_reshape": _reshaped,
    "prim_split": _split,
    "prim_unpad_groups": _groups_within,
}
