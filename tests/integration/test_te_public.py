"""Every public class and function of NVIDIA's Python package: computed by that package on tex and by Fusible under its names, with equal results."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import te_cases
import te_cases_ops
import te_cases_tensors
import torch
from doc_pages import ROOT
from te_client import package, relative_error
from te_draws import DRAWS, drawn
from te_op_draws import OPERATIONS
from te_public import CASES, Side, public, sides

from fusible.compat.te_gaps import GPU_ALONE, UNSERVED

assert CASES and te_cases and te_cases_ops and te_cases_tensors  # their cases are registered as they are imported

DRAWN = {drawn(kind, seed)[0].name for kind in DRAWS for seed in range(8)} | {f"ops.{name}" for name in OPERATIONS}
"""The names that ``test_te_draws`` compares."""
ELSEWHERE = {"DotProductAttention", "GatedDeltaNet2Attention", "GatedDeltaNetAttention", "GatedDeltaProductAttention"}
"""Compared by ``test_te_twins_attention``, and as a part of other modules; and by ``test_te_linear_attention``."""


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield te


def test_every_public_name_is_compared_or_on_a_list(te: Any) -> None:
    """A name that a new version brings fails here until it has a case, or a reason."""
    compared = DRAWN | ELSEWHERE | {name for case in CASES.values() for name in case.names}
    lists = (compared, GPU_ALONE, UNSERVED.keys())
    names = set(public())
    assert names == set().union(*lists)
    assert sum(map(len, lists)) == len(names), "a name stands twice"
    assert len(names) > 130


def test_what_is_not_served_is_at_most_one_name_in_fifty(te: Any) -> None:
    _, ours = sides()
    served = [name for name in public() if _found(ours, name)]
    assert len(public()) - len(served) == len(UNSERVED) <= 0.02 * len(public())


def _found(side: Side, name: str) -> bool:
    try:
        operator.attrgetter(name)(side)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_says_what_it_would_take(te: Any, name: str) -> None:
    assert not _found(sides()[1], name)
    reason = UNSERVED[name]
    assert any(f"`{name}`" in line and reason in line for line in (ROOT / "docs/compat.md").read_text().splitlines())


ON_A_GPU = {
    "CusolverMpCtx": lambda te: te.CusolverMpCtx(None),
    "FusedMLAQUpProjFunction": lambda te: te.FusedMLAQUpProjFunction.apply(torch.ones(32, 32), torch.ones(32, 32), None, None),
    "FusedMLAQUpProjRopeQuant": lambda te: te.FusedMLAQUpProjRopeQuant(32, 32, 2, 16)(torch.ones(32, 32)),
    "initialize_ub": lambda te: te.initialize_ub([32, 32], 1),
    "newton_schulz": lambda te: te.newton_schulz(torch.ones(4, 4), te.CusolverMpCtx(None)),
    "newton_schulz_tp": lambda te: te.newton_schulz_tp(torch.ones(4, 4), te.CusolverMpCtx(None)),
}


@pytest.mark.parametrize("name", [*GPU_ALONE, *UNSERVED])
def test_what_is_said_to_need_a_gpu_the_package_refuses_without(te: Any, name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever it raises
        ON_A_GPU[name](te)


@pytest.mark.parametrize("name", CASES)
def test_both_give_the_same(te: Any, name: str) -> None:
    case, results = CASES[name], []
    for side in sides():
        results.append(list(case.run(side)))
        assert side.asked >= set(case.names), set(case.names) - side.asked
    assert [key for key, _ in results[0]] == [key for key, _ in results[1]]
    for (key, wanted), (_, found) in zip(*results, strict=True):
        check(key, wanted, found, case.bound)


def check(key: str, wanted: Any, found: Any, bound: float) -> None:
    if not isinstance(wanted, torch.Tensor):
        assert found == wanted, key
        return
    assert isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype), key
    if not torch.equal(found, wanted):
        assert bound and relative_error(found, wanted) <= bound, key


def test_a_side_notes_what_it_is_asked_for() -> None:
    side = Side(lambda module, name: (module, name))
    assert side.ops.Linear == ("transformer_engine.pytorch.ops", "Linear") and side.Linear == ("transformer_engine.pytorch", "Linear")
    assert side.asked == {"ops.Linear", "Linear"}
