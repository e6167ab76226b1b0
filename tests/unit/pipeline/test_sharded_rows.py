"""Which ops of a list have the rows of one process alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fusible.compute_pipeline import sharded_rows
from fusible.nvte import make_nvte_tensor
from fusible.ops import AllGather, AllReduce, ColumnParallelMMT, Identity, ReduceScatter
from fusible.ops.protocols import ShardsRows


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        ("...", "..."),
        ("..G..", "xx-.."),
        ("..S..", "..-xx"),
        ("..S..G..", "..-xx-.."),
        (".G.S.G.S.", "x-.-x-.-x"),
        (".R.G", "xxx-"),
        ("S.S.", "-x-x"),
        ("G.G.", "-x-."),
        ("S.P.", "-x-x"),  # a product that shares out columns alone leaves rows as they are
    ],
)
def test_rows_are_shared_out_between_what_scatters_and_what_gathers(marks: str, wanted: str) -> None:
    weight = make_nvte_tensor(torch.empty(4, 4, device="meta"))
    kinds = {".": Identity, "G": AllGather, "S": ReduceScatter, "R": AllReduce, "P": partial(ColumnParallelMMT, weight)}
    ops = [kinds[mark]() for mark in marks]
    found = sharded_rows(ops)
    assert "".join("-" if isinstance(op, ShardsRows) else "x" if span else "." for op, span in zip(ops, found, strict=True)) == wanted
