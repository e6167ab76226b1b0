"""Whether a bad call of tex that was accepted did what its declaration says, or what anybody would expect of such a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from bad_calls import BadCall

from fusible.tex.calls.examination import examine
from fusible.tex.interface.declare import DECLARATIONS

__all__ = ["UNREAD", "contradiction"]

NUMBERS = ("of ", "sparse")
"""Values that are numbers still, in lists sparse ones: what comes of them must be what comes of the same numbers, dense and of the right type."""
NOT_OF_NUMBERS = {
    "copy_data_ptrs_to_device": "addresses",
    "dropout_fwd": "random",
    "prim_empty": "memory as it is found",
    "swizzle_scales_and_pack_ptrs_for_discrete_weights": "addresses",
}
"""Functions of which two calls differ whatever they are given, and why."""
UNREAD = {
    ("prim_empty", "like"): "nothing but its device is asked for",
    ("fused_attn_fwd", "Bias"): "where bias_type asks for none, as in NVIDIA's",
    ("te_general_grouped_gemm", "bias"): "an empty one is none, wherever it is",
    ("te_general_grouped_gemm", "m_splits"): "documented to change nothing: the shapes of A and B say it",
    ("te_general_grouped_gemm", "pre_gelu_out"): "an empty one is none, wherever it is",
    ("te_general_grouped_gemm", "workspace"): "documented to change nothing",
}
"""Arguments that a call may not read, so that nothing looks into their lists, and why: a closed list."""


def contradiction(call: BadCall, run: Callable[..., Any], result: Any, arguments: dict[str, Any]) -> str:
    """In what an accepted call contradicts its declaration, or nothing. ``arguments``: those of the call as they were before it."""
    declaration = DECLARATIONS[call.function]
    wrong = examine(declaration, {name: value for name, value in arguments.items() if name in declaration.signature.parameters})
    numbers = _kind(call.what).startswith(NUMBERS) and call.function not in NOT_OF_NUMBERS
    if numbers and (wrong is not None or not _declared(call)):
        return _other_numbers(call, run, result, arguments)
    return "" if wrong is None or (call.function, call.argument) in UNREAD else str(wrong)


def _declared(call: BadCall) -> bool:
    """Whether the declaration names the types that the argument may have, each of which is served in its own way."""
    text = DECLARATIONS[call.function].where.get(call.argument)
    return text is not None and "any" not in text


def _kind(what: str) -> str:
    return what.removeprefix("first ").removeprefix("first ")


def _other_numbers(call: BadCall, run: Callable[..., Any], result: Any, arguments: dict[str, Any]) -> str:
    """In what the result, or what was written, differs from that of the same numbers in dense tensors of the right type."""
    good = call.sample.arguments[call.argument]
    again = {name: deepcopy(_in(value, good) if name == call.argument else value) for name, value in arguments.items()}
    right = [*_tensors(run(**again)), *_tensors(list(again.values()))]
    found = [*_tensors(result), *_tensors(list(call.arguments.values()))]
    if len(found) != len(right):
        return f"{len(found)} tensors instead of {len(right)}"
    return next((f"{a.dtype} {list(a.shape)} with other numbers" for a, b in zip(found, right, strict=True) if not _same(a, b)), "")


def _in(value: Any, good: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(good, torch.Tensor):
        if good.dtype.itemsize == 1 < value.dtype.itemsize:
            return value  # bytes stand for numbers of a format, and others for themselves
        dense = _dense(value)
        return (dense.real if dense.is_complex() and not good.is_complex() else dense).to(good.dtype)
    if isinstance(value, list | tuple) and isinstance(good, list | tuple):
        return [_in(item, like) for item, like in zip(value, good, strict=True)]
    return value


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() if x.layout is not torch.strided else x


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        yield _dense(value.detach())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("fusible."):
        for _, part in sorted(vars(value).items()):
            yield from _tensors(part)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are of the same numbers, as far as their types tell them apart: a result in another dtype is rounded otherwise."""
    if a.shape != b.shape or a.is_meta != b.is_meta:
        return False
    a, b = (x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (a, b))
    return a.is_meta or torch.allclose(a.to(torch.complex128), b.to(torch.complex128), rtol=2.0**-6, atol=2.0**-6, equal_nan=True)
