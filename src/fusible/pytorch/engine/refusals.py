"""The error that a user sees when a call of modules has failed: it says which argument is wrong, or at least in which modules the call failed.

A call that succeeds pays nothing for this, as arguments are examined after a failure alone (for calls of tex: ``fusible.tex.calls.examination``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.autograd import forward_ad

from fusible.errors import ArgumentError, DTypeError, FusibleError, NotServedError, ShapeError, expected, subject, with_owner
from fusible.nvte import nvte_dtype
from fusible.quantized import GroupedTensorStorage, QuantizedTensor, QuantizedTensorStorage
from fusible.tex.operands import not_dense

__all__ = ["check_dense", "check_transforms", "refuse", "title_of", "transforms_active"]

_functions_transformed = torch._C._are_functorch_transforms_active
_recorded = torch._C._is_tracing
_mode_of, _PROXIES = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY

_NOT_THE_ARGUMENTS = (MemoryError, RecursionError, ImportError)
"""Errors that no argument explains."""
_SHOWN = 3


def title_of(modules: Iterable[Any]) -> str:
    """``Linear -> GELU``: modules in a sentence, each once, and of many the first."""
    names = [type(module).__name__ for module in {id(module): module for module in modules}.values()]
    return " -> ".join([*names[:_SHOWN], "..."] if len(names) > _SHOWN else names) or "an empty pipeline"


def check_dense(x: torch.Tensor, of: str) -> None:
    """Raise ``ArgumentError`` for a tensor whose values are no array: sparse, nested or of another library's layout."""
    if x.layout is not torch.strided:
        raise not_dense(x, of)


def transforms_active() -> bool:
    """Whether a transform of ``torch.func``, a level of forward-mode derivatives, or a recording of torch's operations is open."""
    return _functions_transformed() or forward_ad._current_level >= 0 or _recorder() is not None


def _recorder() -> str | None:
    """By what torch's operations are being recorded: it would miss what native kernels write, and its program give what happens to lie in memory. Not
    ``torch.compile`` and ``torch.export``, for which pipelines are operators of their own."""
    return "torch.jit.trace" if _recorded() else "make_fx" if _mode_of(_PROXIES) is not None else None


def check_transforms(modules: Iterable[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``NotServedError`` for a call of ``modules`` inside a transform of ``torch.func``, under forward-mode derivatives, or where torch's
    operations are recorded: a pass is no sequence of these."""
    if (got := _recorder()) is not None:
        do = "write a program by fusible.export_program"
        raise NotServedError(expected("torch.compile or torch.export", of=f"a recording of {title_of(modules)}", got=got, do=do))
    if _functions_transformed():
        got, do = "a transform such as grad, vjp, jvp or vmap", "call torch.autograd.grad of it, and give x a batch dimension"
        raise NotServedError(expected("functional_call alone", of=f"torch.func around {title_of(modules)}", got=got, do=do))
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        do = "call torch.autograd.grad of it"
        raise NotServedError(expected("tensors without tangents", of=f"a call of {title_of(modules)}", got="a dual tensor", do=do))


def refuse(error: Exception, known: Set[str], title: str, arguments: Mapping[str, Any]) -> None:
    """Raise a better error than ``error``, where an argument explains it. Otherwise ``error`` stays, and "of ``title``" (the modules) is added to its
    subject, unless it has one of the words ``known``, which tell the user where to look.

    ``arguments``: the tensors of the call by what they are called in a sentence, the input first.
    """
    if isinstance(error, _NOT_THE_ARGUMENTS):
        return
    wrong = _wrong(arguments, title)
    if wrong is not None and not (isinstance(error, FusibleError) and _speaks_of(error, arguments)):
        raise wrong from error
    if isinstance(error, FusibleError) and subject(str(error)) and known.isdisjoint(_words(str(error))):
        error.args = (with_owner(str(error), title), *error.args[1:])


def _wrong(arguments: Mapping[str, Any], title: str) -> FusibleError | None:
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, value in arguments.items():
        of = f"{name} of {title}"
        if isinstance(value, (QuantizedTensor, QuantizedTensorStorage, GroupedTensorStorage)):
            continue
        if not isinstance(value, torch.Tensor):
            return DTypeError(expected("a torch.Tensor", of=of, got=type(value).__qualname__, do="convert it"))
        try:
            check_dense(value, of)
            nvte_dtype(value.dtype)
        except DTypeError:
            got = str(value.dtype).removeprefix("torch.")
            return DTypeError(expected("fp64, fp32, fp16, bf16, int32 or int64", of=of, got=got, do="cast it"))
        except ArgumentError as wrong:
            return wrong
        tensors.append((of, value))
    if tensors and tensors[0][1].ndim == 0:
        return ShapeError(expected("at least one dimension", of=tensors[0][0], got="a number", do="pass rows of columns"))
    return _of_devices(tensors)


def _of_devices(tensors: Sequence[tuple[str, torch.Tensor]]) -> FusibleError | None:
    devices = {x.device.type for _, x in tensors}
    if "meta" not in devices or len(devices) == 1:
        return None
    of = next(of for of, x in tensors if x.is_meta)
    return ArgumentError(expected("a tensor with data", of=of, got="one on meta", do="make it on another device"))


def _speaks_of(error: FusibleError, arguments: Mapping[str, Any]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", subject(str(error))) for name in arguments)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
