"""The walk over an attention problem's pieces, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend import attention_math
from fusible.tex.backends.torch_backend.attention_fp8 import Amax
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.backends.torch_backend.attention_pieces import Piece, batches, keys_and_values, pieces, row_blocks, take
from fusible.tex.calls.attention_buffers import gradients, outputs
from fusible.tex.calls.attention_layout import QKVLayout, format_name
from fusible.tex.formulas.attention import Gradients
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import accumulator

__all__ = ["Backward", "attended"]


def attended(call: CallArguments, lay: QKVLayout, scores: Scores, seen: Amax, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """O (of ``dtype``), Stats and Max of a call. ``seen`` sees the probabilities that V is multiplied by."""
    name = format_name(call.o_format, lay.q)
    out, stats, largest = outputs(lay, name, call.Q, call.V, dtype=dtype, statistics=accumulator(call.Q.dtype))
    for piece in pieces(lay, call):
        for batch, rows in batches(piece, call, lay, _share(scores)):
            k, v = keys_and_values(lay, call, batch)
            for block in row_blocks(batch, rows):
                results = attention_math.forward(scores, block, take(call.Q, lay.q, block, kv=False), k, v, seen)
                for x, form, result in zip((out, stats, largest), (name, lay.statistics, lay.statistics), results, strict=True):
                    take(x, form, block, kv=False).copy_(result)
    return out, stats, largest


def _share(scores: Scores) -> int:
    """Of ``batches``. Dropout's words are 64-bit, and several at once: a mask takes four times what its scores do. A cap's derivative is as large as
    they are."""
    return 16 if scores.dropout else 8 if scores.soft_cap is not None else 4


class Backward:
    """The gradients of a call, in layout ``to``, filled piece by piece."""

    def __init__(
        self,
        call: Any,
        layouts: tuple[QKVLayout, QKVLayout],
        scores: Scores,
        stats: Tensor,
        offset: Tensor | None,
        dtypes: list[torch.dtype],
        seen: Amax,
    ) -> None:
        self.call, self.scores, self.seen = call, scores, seen
        self.lay, self.to = lay, to = layouts
        self.rows = (
            (call.O, format_name(call.o_format, lay.q)),
            (call.dO, format_name(call.do_format, lay.q)),
            (stats, lay.statistics),
        )
        device, heads = call.Q.device, call.Q.shape[lay.q.index("H")]
        self.dbias = None if scores.bias is None else torch.zeros(scores.bias.shape, dtype=accumulator(call.Q.dtype), device=device)
        self.doffset = None if offset is None else torch.zeros(1, heads, 1, 1, dtype=accumulator(call.Q.dtype), device=device)

        self.grads = gradients(to, lay, call.Q, call.K, call.V, (dtypes[0], dtypes[1], dtypes[2]))
        for piece in pieces(lay, call):
            if piece.sq and piece.skv:
                self.piece(piece)

    @property
    def bias_gradient(self) -> Tensor | None:
        """In the bias's dtype."""
        bias = self.scores.bias
        return None if self.dbias is None or bias is None else self.dbias.to(bias.dtype)

    def piece(self, piece: Piece) -> None:
        for batch, rows in batches(piece, self.call, self.lay, _share(self.scores)):
            k, v = keys_and_values(self.lay, self.call, batch)
            dk, dv = (take(x, self.to.kv, batch, kv=True) for x in self.grads[1:])
            sums: tuple[Tensor, Tensor] | None = None
            for block in row_blocks(batch, rows):
                g = self.block(block, k, v)
                sums = (g.k, g.v) if sums is None else (sums[0].add_(g.k), sums[1].add_(g.v))
            if sums is not None:
                dk.copy_(sums[0])
                dv.copy_(sums[1])

    def block(self, block: Piece, k: Tensor, v: Tensor) -> Gradients:
        """The gradients of one block of queries; those of Q, the bias and the offset are put where they belong."""
        sc = self.scores
        q = take(self.call.Q, self.lay.q, block, kv=False)
        o, do, stats = (take(x, name, block, kv=False) for x, name in self.rows)
        g = attention_math.backward(sc, block, (q, k, v), o, do, stats, self.seen)
        take(self.grads[0], self.to.q, block, kv=False).copy_(g.q)
        if self.dbias is not None:
            part = sc.bias_of(block, self.dbias)
            part.add_(g.scores.sum_to_size(part.shape), alpha=sc.scale if sc.pre_scale else 1.0)
        if self.doffset is not None and g.extra is not None:
            self.doffset.add_(g.extra.sum((0, 2), keepdim=True))
        return g
