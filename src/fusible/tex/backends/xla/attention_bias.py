"""A bias of attention over sequences that lie side by side: each pair of tokens reads the element of their sequence and of their places in it."""

from __future__ import annotations

from collections.abc import Sequence

from fusible import lazy
from fusible.errors import ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.formulas.attention import Tokens

__all__ = ["check_sequences", "gathered", "gathered_back"]


def _places(shape: Sequence[int], queries: Tokens, keys: Tokens) -> tuple[Tensor, Tensor]:
    """For each query the row of a bias as ``[b * sq, ..]`` that it reads, and for each key the column; those past its end read the last one: they are
    of no sequence."""
    b, _, sq, skv = shape
    sequence, row, column = (lazy.reshape(x, (-1,)) for x in (queries.sequence, queries.position, keys.position))
    return lazy.minimum(sequence, b - 1) * sq + lazy.minimum(row, sq - 1), lazy.minimum(column, skv - 1)


def check_sequences(bias: Tensor, count: int) -> None:
    """Raise ``ShapeError`` unless ``bias`` has rows for each of ``count`` sequences, or the same for all."""
    if bias.shape[0] not in (1, count):
        do = "pass one for the longest sequences"
        raise ShapeError(expected(f"{count} sequences or 1", of="Bias of attention", got=list(bias.shape), do=do))


def gathered(bias: Tensor, queries: Tokens, keys: Tokens) -> Tensor:
    """``[b or 1, h or 1, sq or 1, skv or 1] -> [1, h or 1, queries, keys or 1]``."""
    b, h, sq, skv = bias.shape
    rows, columns = _places(bias.shape, queries, keys)
    each = lazy.gather(lazy.reshape(lazy.permute(bias, (0, 2, 1, 3)), (b * sq, h, skv)), 0, rows)
    found = each if skv == 1 else lazy.gather(each, 2, columns)
    return lazy.permute(found, (1, 0, 2))[None]


def gathered_back(ds: Tensor, shape: Sequence[int], queries: Tokens, keys: Tokens) -> Tensor:
    """The gradient of a bias of ``shape``, of that of the scores ``[1, h, queries, keys]``, which is 0 where a query does not see a key: sums over
    all pairs that read an element, by products with what is 1 where they do."""
    b, h, sq, skv = shape
    ds = lazy.sum(ds[0], 0, keepdim=True) if h == 1 else ds[0]
    rows, columns = _places(shape, queries, keys)
    by_key = lazy.sum(ds, 2, keepdim=True) if skv == 1 else lazy.matmul(ds, _chosen(columns, skv))
    by_row = lazy.matmul(lazy.permute(_chosen(rows, b * sq), (1, 0)), by_key)
    return lazy.permute(lazy.reshape(by_row, (h, b, sq, skv)), (1, 0, 2, 3))


def _chosen(places: Tensor, size: int) -> Tensor:
    """``[n] -> [n, size]``: 1 at each place, else 0."""
    return lazy.cast(places[:, None] == lazy.iota((size,), 0, lazy.int32)[None], lazy.float32)
