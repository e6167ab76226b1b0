"""The forms of a module's input, brought to one: tokens of all sequences one after another, ``[tokens, hidden]``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.nvte import DType, Sequences, Tensor
from fusible.pytorch.engine.refusals import check_dense

__all__ = ["Batch", "read_batch", "without_padding"]

_reshaped = torch.ops.aten._unsafe_view.default
"""``view``, whose result counts as a tensor of its own, as nobody else has ``y``: of a view FSDP warns, as a change in place would drop its hook. It
takes 2 microseconds more, so it is for groups of processes alone."""


class Batch(NamedTuple):
    """``x``: ``[tokens, hidden]``; ``leading``: the dimensions to restore on the output; ``seq_lens``: int32 ``[sequences]``, None where uniform.
    ``index``: int64 ``[tokens]``, where the tokens stand among those that came, some of which are padding; None where none is."""

    x: torch.Tensor
    leading: tuple[int, ...]
    seq_lens: torch.Tensor | None
    max_seqlen: int
    index: torch.Tensor | None = None

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        """The output in the input's form, zeros where that has padding."""
        if self.index is not None:
            y = y.new_zeros((math.prod(self.leading), y.shape[-1])).index_copy(0, self.index, y)
        if len(self.leading) == 1:
            return y
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return _reshaped(y, [*self.leading, y.shape[-1]])
        return y.view(*self.leading, y.shape[-1])

    def tokens(self, dy: torch.Tensor) -> torch.Tensor:
        """The rows of the tokens of ``dy``, which has the output's form: the inverse of ``restore``."""
        dy = dy.reshape(-1, dy.shape[-1])
        return dy if self.index is None else dy.index_select(0, self.index)

    def sequences(self) -> Sequences:
        """How the tokens divide into sequences."""
        device = self.x.device
        if self.seq_lens is None:
            count = self.leading[0] if len(self.leading) == 2 else 1
            cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=device) * self.max_seqlen
            return Sequences(Tensor(cu_seqlens, DType.Int32), count, self.max_seqlen, True)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        cu_seqlens = torch.cat([zero, self.seq_lens.to(device).cumsum(0, dtype=torch.int32)])
        # A bound will do for sequences of any length, and a power of two lets one compiled program serve most batches.
        bound = 1 << max(self.max_seqlen - 1, 0).bit_length()
        return Sequences(Tensor(cu_seqlens, DType.Int32), len(self.seq_lens), bound, False)


def read_batch(x: torch.Tensor, seq_lens: torch.Tensor | None, ragged: bool = False) -> Batch:
    """Read ``m(x [tokens, hidden], seq_lens [sequences])``, ``m(x [tokens, hidden])`` (one sequence), ``m(x [batch, seq, hidden])`` or, of sequences
    that are padded at their ends, ``m(x [batch, seq, hidden], seq_lens [batch])`` and ``m(x [batch, seq, hidden], mask [batch, seq])``.

    ``seq_lens``: of any integer dtype. A mask is bool, True for tokens and False for the padding behind them. ``ragged``: as sequences that may
    differ in length, whichever form they came in. Raises ``ShapeError`` for another rank or lengths that do not add up, ``DTypeError`` for lengths
    that are no integers, ``ArgumentError`` for lengths below 0 and for a mask of another kind.
    """
    if not isinstance(x, torch.Tensor):
        raise DTypeError(expected("a torch.Tensor", of="x", got=type(x).__qualname__, do="convert it"))
    shape = tuple(x.shape)
    if len(shape) == 3 and seq_lens is None:
        lengths = torch.full(shape[:1], shape[1], dtype=torch.int32, device="cpu") if ragged else None
        return Batch(x.reshape(shape[0] * shape[1], shape[2]), shape[:2], lengths, shape[1])
    if seq_lens is not None:
        _check_integers(seq_lens)
    if len(shape) not in (2, 3):
        raise ShapeError(expected("a tensor [tokens, hidden] or [batch, seq, hidden]", of="x", got=f"shape {list(shape)}", do="reshape it"))
    if seq_lens is None:
        return Batch(x, shape[:1], torch.tensor(shape[:1], dtype=torch.int32, device="cpu") if ragged else None, shape[0])
    if len(shape) == 3:
        return _padded(x, seq_lens)
    if seq_lens.dtype == torch.bool:
        raise ShapeError(expected("a tensor [batch, seq, hidden], as a mask is given", of="x", got=f"shape {list(shape)}", do="reshape it"))
    lengths = seq_lens.tolist()
    _check_least(lengths)
    if sum(lengths) != shape[0]:
        what = f"lengths that add up to the {shape[0]} tokens of x"
        raise ShapeError(expected(what, of="seq_lens", got=f"a sum of {sum(lengths)}", do="check the lengths"))
    return Batch(x, shape[:1], seq_lens.to(torch.int32), max(lengths, default=0))


def without_padding(y: Any, seq_lens: torch.Tensor | None) -> Any:
    """``y [batch, seq, hidden]`` with zeros for padding. A ``y`` of any other form, or without padding, is returned as it is."""
    if seq_lens is None or not isinstance(y, torch.Tensor) or y.ndim != 3:
        return y
    if seq_lens.dtype == torch.bool:
        there = seq_lens.to(y.device)
    else:
        there = torch.arange(y.shape[1], device=y.device) < seq_lens.to(y.device).unsqueeze(1)
    return torch.where(there.unsqueeze(2), y, torch.zeros((), dtype=y.dtype, device=y.device))


def _padded(x: torch.Tensor, seq_lens: torch.Tensor) -> Batch:
    """The batch of the tokens of ``x [batch, seq, hidden]``, without the padding."""
    count, longest, hidden = x.shape
    lengths = _lengths_of_mask(seq_lens, count, longest) if seq_lens.dtype == torch.bool else seq_lens
    if len(lengths) != count:
        what = f"one length for each of the {count} sequences of x"
        raise ShapeError(expected(what, of="seq_lens", got=len(lengths), do="check the lengths"))
    values = lengths.tolist()
    _check_least(values)
    if max(values, default=0) > longest:
        what = f"lengths of at most {longest}, the rows of a sequence of x"
        raise ShapeError(expected(what, of="seq_lens", got=max(values), do="check the lengths"))
    rows, lengths = x.reshape(count * longest, hidden), lengths.to(torch.int32)
    if sum(values) == count * longest:
        return Batch(rows, (count, longest), lengths, longest)
    there = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    index = there.flatten().nonzero().flatten().to(x.device)
    return Batch(rows.index_select(0, index), (count, longest), lengths, max(values), index)


def _lengths_of_mask(mask: torch.Tensor, count: int, longest: int) -> torch.Tensor:
    if tuple(mask.shape) != (count, longest):
        got = f"bool {list(mask.shape)}"
        raise ShapeError(expected(f"a mask [{count}, {longest}], of x's tokens", of="seq_lens", got=got, do="give one bool per token"))
    lengths = mask.sum(1)
    wrong = (mask != (torch.arange(longest, device=mask.device) < lengths.unsqueeze(1))).any(1) | (lengths == 0)
    if longest and wrong.any():
        row = int(wrong.nonzero()[0])
        what = "True for tokens and False for the padding behind them, in each row"
        do = "pad at the end, and turn a mask around that says True for padding"
        raise ArgumentError(expected(what, of="a mask as seq_lens", got=f"row {row} {_said_of(int(lengths[row]))}", do=do))
    return lengths


def _said_of(tokens: int) -> str:
    return f"with {tokens} otherwise placed" if tokens else "without one"


def _check_integers(seq_lens: torch.Tensor) -> None:
    if isinstance(seq_lens, torch.Tensor):
        check_dense(seq_lens, "seq_lens")
    if isinstance(seq_lens, torch.Tensor) and seq_lens.is_meta:
        raise ArgumentError(expected("a tensor with data", of="seq_lens", got="one on meta", do="make it on another device"))
    if not isinstance(seq_lens, torch.Tensor) or (seq_lens.dtype, seq_lens.ndim) not in _LENGTHS:
        got = f"{seq_lens.dtype} {list(seq_lens.shape)}" if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__qualname__
        do = "give one length per sequence"
        raise DTypeError(expected("an integer tensor [sequences], or a bool mask [batch, seq]", of="seq_lens", got=got, do=do))


_LENGTHS = frozenset({(torch.bool, 2), *((dtype, 1) for dtype in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))})


def _check_least(lengths: list[int]) -> None:
    if min(lengths, default=0) < 0:
        raise ArgumentError(expected("lengths of at least 0", of="seq_lens", got=f"{min(lengths)}", do="give one length per sequence"))
