"""Which ops of a list have the rows of one process alone."""

from __future__ import annotations

import pytest

from fusible.compute_pipeline import sharded_rows
from fusible.ops import AllGather, AllReduce, Identity, ReduceScatter
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
    ],
)
def test_rows_are_shared_out_between_what_scatters_and_what_gathers(marks: str, wanted: str) -> None:
    ops = [{".": Identity, "G": AllGather, "S": ReduceScatter, "R": AllReduce}[mark]() for mark in marks]
    found = sharded_rows(ops)
    assert "".join("-" if isinstance(op, ShardsRows) else "x" if span else "." for op, span in zip(ops, found, strict=True)) == wanted
