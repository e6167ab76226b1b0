"""Where mixtures of experts lie in a list of ops, and what a list with another grouped product cannot be."""

from __future__ import annotations

import pytest

import fusible
from fusible.compute_pipeline import context_parallel, tensor_parallel
from fusible.compute_pipeline.mixtures import of_mixtures
from fusible.errors import ArgumentError
from fusible.ops import CombineTokens, DispatchTokens, GroupedMMT
from fusible.ops.sharing import Process


def test_a_mixture_is_from_where_tokens_are_dispatched_to_where_they_are_combined() -> None:
    norm, *_ = fusible.RMSNorm(8)._ops
    route, *mixture = fusible.MixtureOfExperts(8, 8, 4)._ops
    grouped = next(op for op in mixture if isinstance(op, GroupedMMT))
    ops = [norm, route, *mixture, norm, grouped, route, *mixture]
    found = [op for op, mixed in zip(ops, of_mixtures(ops), strict=True) if mixed]
    assert [type(op) for op in found] == 2 * [DispatchTokens, GroupedMMT, GroupedMMT, CombineTokens]
    assert of_mixtures([grouped, *mixture])[0] is False and of_mixtures([*mixture, grouped])[-1] is False


def test_groups_of_rows_that_no_mixture_has_made_are_not_shared_out() -> None:
    grouped = next(op for op in fusible.MixtureOfExperts(8, 8, 4)._ops if isinstance(op, GroupedMMT))
    for share in (context_parallel, lambda ops, *of: tensor_parallel(ops, *of, sequence_parallel=True)):
        with pytest.raises(ArgumentError, match="each row from that row alone, got .*GroupedMMT"):
            share([grouped], Process(0, 2), "0")
