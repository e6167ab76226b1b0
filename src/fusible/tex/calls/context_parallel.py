"""The checks of the functions on sequences that are divided between devices, and what their words and their two forms of a call mean."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.interface.domains import is_flag
from fusible.tex.protocol import TensorLike, to_torch

__all__ = ["OutCorrection", "check_halves", "check_lse", "check_moved", "check_partition", "out_correction", "per_step_tokens"]

_WORDS = ("add", "copy", "zero", "none")


@dataclass(frozen=True)
class OutCorrection:
    """The arguments of ``thd_out_correction`` after the first two; ``old_lse`` is None where it is left out."""

    lse: Any
    lse_per_step: Any
    cu_seqlens: Any
    only_second_half: bool
    lse_packed: bool
    old_lse: Any = None


def out_correction(out: TensorLike, out_per_step: TensorLike, *arguments: Any) -> OutCorrection:
    """The arguments from ``old_lse`` on, None where left out: seven positional ones of a call stop before ``lse_packed``. Raises ``DTypeError`` where
    one but ``old_lse`` is missing."""
    old_lse, *rest = arguments if arguments[-1] is not None else (None, *arguments[:-1])
    for field, value in zip(fields(OutCorrection), rest, strict=False):
        if value is None:
            raise DTypeError(expected(field.name, of="thd_out_correction", got="None", do="pass all arguments but old_lse"))
    call = OutCorrection(*rest, old_lse=old_lse)
    if not is_flag(call.only_second_half):  # eight arguments, of which the last is None
        raise DTypeError(expected("a bool", of="lse_packed of thd_out_correction", got="None", do="pass True or False"))
    if out.dtype != out_per_step.dtype:
        got = f"{out.dtype} and {out_per_step.dtype}"
        raise DTypeError(expected("one dtype", of="out and out_per_step of thd_out_correction", got=got, do="cast one of the two"))
    tokens = out.shape[0] // 2 if call.only_second_half else out.shape[0]
    if out.ndim != 3 or tuple(out_per_step.shape[1:]) != tuple(out.shape[1:]) or out_per_step.shape[0] < tokens:
        got = f"{list(out.shape)} and {list(out_per_step.shape)}"
        raise ShapeError(expected(f"[t, h, d] and [{tokens}, h, d]", of="out and out_per_step of thd_out_correction", got=got, do="reshape them"))
    if not hasattr(call.cu_seqlens, "dtype") or to_torch(call.cu_seqlens.dtype) is not torch.int32:
        got = getattr(call.cu_seqlens, "dtype", call.cu_seqlens)
        raise DTypeError(expected("an int32 tensor", of="cu_seqlens of thd_out_correction", got=got, do="pass the cumulative lengths"))
    if call.cu_seqlens.ndim != 1 or call.cu_seqlens.shape[0] == 0:
        got = list(call.cu_seqlens.shape)
        raise ShapeError(expected("[b + 1]", of="cu_seqlens of thd_out_correction", got=got, do="pass the cumulative lengths"))
    for name, x in (("lse", call.lse), ("lse_per_step", call.lse_per_step), ("old_lse", call.old_lse)):
        if x is not None:
            if to_torch(x.dtype) not in (torch.float32, torch.float64):
                raise DTypeError(expected("float32 or float64", of=f"{name} of thd_out_correction", got=x.dtype, do="cast it"))
            check_lse(x, call.cu_seqlens, call.lse_packed, out.shape[1], f"{name} of thd_out_correction")
    return call


def check_lse(lse: TensorLike, cu_seqlens: TensorLike, packed: bool, heads: int, of: str) -> None:
    """Raise ``ShapeError`` unless ``lse`` is ``[h, t]`` where ``packed``, else ``[b, h, s]``, of ``heads`` heads and all sequences."""
    batch = cu_seqlens.shape[0] - 1
    if tuple(lse.shape[:-1]) != ((heads,) if packed else (batch, heads)):
        wanted = f"[{heads}, t]" if packed else f"[{batch}, {heads}, s]"
        raise ShapeError(expected(wanted, of=of, got=list(lse.shape), do="pass the logsumexp of all heads"))


def check_halves(tensor: TensorLike, half_idx: int) -> int:
    """The dimension of the tokens of ``thd_read_half_tensor``. Raises for what it refuses."""
    if half_idx not in (0, 1):
        raise ArgumentError(expected("0 or 1", of="half_idx of thd_read_half_tensor", got=half_idx, do="pass one of the two"))
    along = 1 if tensor.ndim == 4 else 0
    if tensor.ndim < 2:
        of, got = "tensor of thd_read_half_tensor", list(tensor.shape)
        raise ShapeError(expected("[t, h, d] or [2, t, h, d]", of=of, got=got, do="reshape it"))
    if tensor.shape[along] % 2:
        got = list(tensor.shape)
        raise ShapeError(expected("an even number of tokens", of="tensor of thd_read_half_tensor", got=got, do="pad each sequence to two halves"))
    return along


def per_step_tokens(grad: TensorLike, grad_per_step: TensorLike, first_half: str, second_half: str) -> int:
    """How many tokens a step's gradient has: those of ``grad``, or of one of its halves. Raises for words and shapes that do not fit."""
    for name, word in (("first_half", first_half), ("second_half", second_half)):
        if word not in _WORDS:
            of = f"{name} of thd_grad_correction"
            raise ArgumentError(expected(f"one of {', '.join(_WORDS)}", of=of, got=repr(word), do="pass one of these"))
    total, of_step = grad.shape[0], grad_per_step.shape[0]
    half = "none" in (first_half, second_half) or ("zero" in (first_half, second_half) and of_step < total)
    tokens = total // 2 if half else total
    if of_step < tokens or tuple(grad.shape[1:]) != tuple(grad_per_step.shape[1:]):
        got = list(grad_per_step.shape)
        wanted = f"[{tokens}, {', '.join(map(str, grad.shape[1:]))}]"
        raise ShapeError(expected(wanted, of="grad_per_step of thd_grad_correction", got=got, do="pass the gradient of the step"))
    return tokens


def check_partition(total: int, world: int, rank: int, function: str, tokens: int | None = None) -> None:
    """Raise unless ``world`` ranks share ``total`` tokens, which are all of the tensor's ``tokens``."""
    if not 0 <= rank < world:
        of = f"{'rank and world_size' if tokens is None else 'cp_size'} of {function}"
        raise ArgumentError(expected("a rank of the group", of=of, got=f"rank {rank} of {world}", do="pass 0 <= rank < world_size"))
    if total % world or (tokens is not None and tokens != total):
        got = total if tokens is None else f"{total} of {tokens}"
        raise ShapeError(expected(f"all tokens, a multiple of {world}", of=f"total_tokens of {function}", got=got, do="pad the sequences"))


def check_moved(out: TensorLike, inp: TensorLike, starts: TensorLike, ends: TensorLike) -> None:
    """Raise unless tokens can be copied from ``inp`` to ``out``."""
    function = "thd_copy_valid_tokens_from_per_split_to_rank_local"
    if tuple(out.shape) != tuple(inp.shape) or starts.shape != ends.shape:
        got = f"{list(out.shape)} and {list(inp.shape)}, {list(starts.shape)} and {list(ends.shape)}"
        raise ShapeError(expected("equal shapes", of=f"out and inp, and both cumulative lengths, of {function}", got=got, do="pass the same tokens"))
    if out.dtype != inp.dtype:
        raise DTypeError(expected(out.dtype, of=f"inp of {function}", got=inp.dtype, do="cast it"))
