"""What the functions give, as far as code that calls them depends on it: a backend from outside the package is held to it.

Without that a method that returns None would be found out by whoever takes the result apart, and blamed on the arguments of that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from fusible.errors import BackendError, DTypeError, expected
from fusible.tex.activations import ELEMENTWISE
from fusible.tex.calls.argument_kinds import is_tensor, shown
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.formats import is_quantized, logical_shape
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.protocol import to_torch

__all__ = ["checked_method"]

_MANY = 2**31
"""More than any list has."""


def _gives_two(name: str) -> bool:
    """Whether it is the gradient of an activation with that of a bias, or of row scales, beside it."""
    first, *rest = name.split("_")
    return first == "dbias" or (first == "scaled" and any(word.startswith("d") for word in rest))


_SEVERAL: dict[str, tuple[int, int]] = {
    **dict.fromkeys(filter(_gives_two, DECLARATIONS), (2, 2)),
    "bgrad_group_quantize": (2, 2),
    "bgrad_quantize": (2, 2),
    "bulk_allocate": (0, _MANY),
    "dropout_fwd": (2, 2),
    "ep_prepare_and_dispatch": (0, _MANY),
    "fused_attn_bwd": (3, 5),
    "fused_attn_fwd": (1, _MANY),
    "fused_moe_aux_loss_fwd": (2, 2),
    "fused_moe_aux_loss_fwd_graph_safe": (2, 2),
    "fused_qkv_rope_forward": (3, 3),
    "fused_score_for_moe_aux_loss_fwd": (3, 3),
    "fused_topk_with_score_function_fwd": (3, 3),
    "fused_topk_with_score_function_qb_fwd": (5, 5),
    "generic_gemm": (4, 4),
    "get_fused_attn_backend": (2, 2),
    "get_stream_priority_range": (2, 2),
    "layernorm_bwd": (3, 3),
    "layernorm_fwd": (3, 3),
    "moe_permute_fwd": (3, 3),
    "moe_unpermute_bwd": (2, 2),
    "multi_tensor_l2norm": (2, 2),
    "multi_tensor_pad_last_dim": (0, _MANY),
    "multi_tensor_quantize": (0, _MANY),
    "multi_tensor_transpose_to_bhsd": (0, _MANY),
    "multi_tensor_unscale_l2norm": (2, 2),
    "prim_attention": (2, 2),
    "prim_attention_backward": (4, 4),
    "prim_attention_merge": (2, 2),
    "prim_begin_all_gather": (2, 2),
    "prim_begin_all_reduce": (2, 2),
    "prim_begin_reduce_scatter": (2, 2),
    "prim_dropout": (2, 2),
    "prim_exchange_groups": (2, 2),
    "prim_layernorm_bwd_add": (3, 3),
    "prim_pad_groups": (2, 2),
    "prim_split": (0, _MANY),
    "rmsnorm_bwd": (2, 2),
    "rmsnorm_bwd_add": (2, 2),
    "rmsnorm_fwd": (3, 3),
    "split_quantize": (0, _MANY),
    "splits_to_offsets_multi": (2, 2),
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": (3, 3),
    "te_general_grouped_gemm": (0, _MANY),
    "te_general_grouped_gemm_for_discrete_out": (0, _MANY),
}
"""The functions that give several things in a list or tuple: how many at least and at most. Others give one tensor, where they give ``Any``."""

_UNSAID = frozenset({"create_nvshmem_tensor", "group_requantize_inplace", "prim_end_collective"})
"""Functions that give nothing, or something, or something else than tensors."""

_LIKE: dict[str, str] = {
    **dict.fromkeys((row.name for row in ELEMENTWISE), "input"),
    "dequantize": "input",
    "layernorm_fwd": "input",
    "quantize": "tensor",
    "rmsnorm_fwd": "input",
}
"""By function the argument of whose shape its first result is; of whose dtype, too, where it is not quantized and no ``otype`` says another."""

_OURS = frozenset(DECLARATIONS)


def checked_method(backend: TEXBackendBase, declaration: Declaration) -> Callable[..., Any]:
    """The method of a backend that serves a function. One from outside the package raises ``BackendError`` where it gives something else than the
    function does."""
    method: Callable[..., Any] = getattr(backend, declaration.name)
    written_in = (getattr(method, "__module__", None) or "").partition(".")[0]
    if declaration.name not in _OURS or (written_in == __name__.partition(".")[0] and not backend.IMPL_ID):
        return method
    function, owner = getattr(method, "__func__", None), getattr(method, "__self__", None)

    def check(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrong = _wrong(declaration, result, args, kwargs)
        if wrong is not None:
            name = declaration.name.replace("prim_", "prim.")
            of, do = f"what the backend {backend.NAME} returns from {name}", f"let it return what help(tex.{name}) says"
            raise BackendError(expected(wrong[0], of=of, got=wrong[1], do=do))
        return result

    if function is None or owner is not backend:
        return functools.wraps(method)(lambda *args, **kwargs: check(method(*args, **kwargs), args, kwargs))

    @functools.wraps(function)
    def call(self: TEXBackendBase, *args: Any, **kwargs: Any) -> Any:
        return check(function(self, *args, **kwargs), args, kwargs)

    return MethodType(call, backend)


def _wrong(declaration: Declaration, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """What was expected of a result, and what came; None where it is that."""
    name, annotation = declaration.name, declaration.signature.return_annotation
    if name in _UNSAID or annotation in ("None", None):
        return None
    if annotation in ("int", "bool"):
        return None if isinstance(result, int) else (f"a result of {annotation}", shown(result))
    least, most = _SEVERAL.get(name, (1, 1))
    if name in _SEVERAL:
        if not isinstance(result, list | tuple) or not least <= len(result) <= most:
            return f"a list of {least}" if least == most else f"a list of at least {least}" if least else "a list", shown(result)
        if "fused_attn_backend" in name or "stream_priority" in name:
            return None
        place = next((place for place, item in enumerate(result) if not (item is None or isinstance(item, list | tuple) or _is_result(item))), None)
        if place is not None:
            return f"a tensor, or None, in place {place} of its list", shown(result[place])
    elif not _is_result(result):
        return "one tensor", shown(result)
    return _unlike(declaration, result[0] if name in _SEVERAL else result, args, kwargs) if name in _LIKE else None


def _is_result(x: Any) -> bool:
    return is_tensor(x) or is_grouped(x) or hasattr(x, "prepare_for_saving")


def _unlike(declaration: Declaration, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """How the first result differs in shape or dtype from what the arguments say."""
    named = dict(zip(declaration.signature.parameters, args, strict=False)) | kwargs
    like, otype = named[_LIKE[declaration.name]], named.get("otype")
    shape = logical_shape(like) if is_quantized(like) else tuple(like.shape)
    if not (is_tensor(result) or is_quantized(result)):
        return "a tensor as its first result", shown(result)
    found = logical_shape(result) if is_quantized(result) else tuple(result.shape)
    if tuple(found) != tuple(shape):
        return f"a tensor of shape {list(shape)}", shown(result) if not is_quantized(result) else f"one of {list(found)}"
    if named.get("quantizer") is not None and not is_quantized(result):
        return "a quantized tensor", shown(result)
    if is_quantized(result) or (otype is None and is_quantized(like)):
        return None
    try:
        wanted, dtype = to_torch(like.dtype if otype is None else otype), to_torch(result.dtype)
    except DTypeError:
        return None
    return None if dtype is wanted else (f"a tensor of {wanted}", shown(result))
