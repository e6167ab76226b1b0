"""The three forms of a module's input, brought to one: tokens of all sequences one after another, ``[tokens, hidden]``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.nvte import DType, Sequences, Tensor
from fusible.pytorch.refusals import check_dense

__all__ = ["Batch", "read_batch"]


class Batch(NamedTuple):
    """``x``: ``[tokens, hidden]``; ``leading``: the dimensions to restore on the output; ``seq_lens``: int32 ``[sequences]``, None where uniform."""

    x: torch.Tensor
    leading: tuple[int, ...]
    seq_lens: torch.Tensor | None
    max_seqlen: int

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        """The output in the input's form."""
        return y if len(self.leading) == 1 else y.view(*self.leading, y.shape[-1])

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


def read_batch(x: torch.Tensor, seq_lens: torch.Tensor | None, apart: bool = False) -> Batch:
    """Read ``m(x [tokens, hidden], seq_lens [sequences])``, ``m(x [tokens, hidden])`` (one sequence) or ``m(x [batch, seq, hidden])``.

    ``apart``: as sequences that may differ in length, whichever form they came in. Raises ``ShapeError`` for another rank or lengths that do not add
    up, ``DTypeError`` for lengths that are no int32.
    """
    if not isinstance(x, torch.Tensor):
        raise DTypeError(expected("a torch.Tensor", of="x", got=type(x).__qualname__, do="convert it"))
    shape = tuple(x.shape)
    if len(shape) == 3 and seq_lens is None:
        lengths = torch.full(shape[:1], shape[1], dtype=torch.int32) if apart else None
        return Batch(x.reshape(shape[0] * shape[1], shape[2]), shape[:2], lengths, shape[1])
    if len(shape) != 2:
        wanted = "[tokens, hidden], as lengths are given," if seq_lens is not None else "[tokens, hidden] or [batch, seq, hidden]"
        raise ShapeError(expected(f"a tensor {wanted}", of="x", got=f"shape {list(shape)}", do="reshape it"))
    if seq_lens is None:
        return Batch(x, shape[:1], torch.tensor(shape[:1], dtype=torch.int32) if apart else None, shape[0])
    return Batch(x, shape[:1], seq_lens, _check_lengths(seq_lens, shape[0]))


def _check_lengths(seq_lens: torch.Tensor, tokens: int) -> int:
    if isinstance(seq_lens, torch.Tensor):
        check_dense(seq_lens, "seq_lens")
    if isinstance(seq_lens, torch.Tensor) and seq_lens.is_meta:
        raise ArgumentError(expected("a tensor with data", of="seq_lens", got="one on meta", do="make it on another device"))
    if not isinstance(seq_lens, torch.Tensor) or seq_lens.dtype != torch.int32 or seq_lens.ndim != 1:
        got = f"{seq_lens.dtype} {list(seq_lens.shape)}" if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__qualname__
        raise DTypeError(expected("an int32 tensor [sequences]", of="seq_lens", got=got, do="give one length per sequence"))
    lengths = seq_lens.tolist()
    if any(length < 0 for length in lengths):
        raise ArgumentError(expected("lengths of at least 0", of="seq_lens", got=f"{min(lengths)}", do="give one length per sequence"))
    if sum(lengths) != tokens:
        what = f"lengths that add up to the {tokens} tokens of x"
        raise ShapeError(expected(what, of="seq_lens", got=f"a sum of {sum(lengths)}", do="check the lengths"))
    return max(lengths, default=0)
