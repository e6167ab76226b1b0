"""Layers shared by two processes, against the same layer whole: forward, gradients, inference."""

from __future__ import annotations

from typing import Any

import parallel_cases as parallel
import pytest
import torch
from parallel_cases import CASES, IN, OUT, SIZE, STEPS, Case, Results
from parallel_jobs import JOBS
from process_group import check, run_jobs_once

Parts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """What each process made of its part of every case: one start of two processes for all tests."""
    jobs = [*((str(case), parallel.run_part, (case,)) for case in CASES), *((name, function, ()) for name, function in JOBS.items())]
    return run_jobs_once(tmp_path_factory, "parallel", jobs, SIZE)


def together(case: Case, results: list[Results]) -> Results:
    """The whole tensors of which the processes have parts; what each has whole must be the same in all."""

    def same(name: str) -> torch.Tensor:
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), name
        return results[0][name]

    first, last = case.mode or "column", case.mode or "row"
    names = {"rows": 0, "columns": -1}

    def joined(name: str, by: str | None) -> torch.Tensor:
        return same(name) if by is None else torch.cat([result[name] for result in results], names[by])

    by_rows = "rows" if case.sequence else None
    x = by_rows if first == "column" else "columns"
    y = by_rows if last == "row" else "columns"
    whole = {"dx": joined("dx", x), "y": joined("y", y), "inference": joined("inference", y)}
    for name in results[0]:
        if "weight" in name and "basic_ops" not in name and case.layer == "mlp":
            whole[name] = same(name)  # a norm's weight: each process has the gradient from its own rows, and they have been summed
        elif "weight" in name or "bias" in name:
            column = (case.mode or ("column" if name.startswith("1.") else "row")) == "column"
            whole[name] = joined(name, "rows" if column else "columns" if "weight" in name else None)
    return whole


def magnitudes(case: Case) -> Results:
    """For each result of one layer the sums of absolute values that were added up."""
    t = {name: value.abs() for name, value in parallel.whole_tensors().items()}
    y = t["x"] @ t["weight"].T + (t["bias"] if case.layer == "linear" else 0)
    dweight = t["dy"].T @ t["x"]
    return {"y": y, "inference": y, "dx": t["dy"] @ t["weight"], "weight": dweight, "bias": t["dy"].sum(0)}


def magnitude_of(name: str, sizes: Results) -> torch.Tensor:
    return sizes["bias" if "bias" in name else "weight" if "weight" in name else name]


SINGLE = [case for case in CASES if case.layer != "mlp"]
LENGTH = max(IN, OUT)


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_the_parts_make_the_whole_layer(parts: Parts, case: Case) -> None:
    """Both quantize alike (see ``whole_tensors``), so that they differ by the order of fp32 sums alone: ``length * eps`` of what is added up. Where
    gradients are accumulated, that is over all steps, whose ``x`` is up to ``STEPS`` times as large."""
    got, wanted, sizes = together(case, check(parts, str(case))), parallel.run_whole(case), magnitudes(case)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        bound = (LENGTH + 16) * torch.finfo(torch.float32).eps * magnitude_of(name, sizes) * (STEPS**2 if "main_grad" in name else 1)
        error = (got[name] - value).abs()
        assert got[name].shape == value.shape and (error <= bound).all(), f"{name}: {(error / bound).max():.3g} times the bound"


E4M3, E5M2 = 2.0**-4, 2.0**-3
HALF_STEPS = {"plain": (2.0**-24,) * 2, "delayed": (E4M3, E5M2), "current": (E4M3, E5M2), "mxfp8": (E4M3, E4M3), "block": (E4M3, E4M3)}
"""Half a unit in the last place, relative to the value: of x and weights (E4M3), and of dy (E5M2 where the recipe is hybrid)."""


@pytest.mark.parametrize("case", [case for case in SINGLE if not case.options], ids=str)
def test_the_parts_are_near_the_layer_in_float64(parts: Parts, case: Case) -> None:
    """Each operand is rounded once: an element of a product of A and B errs by at most ``(a + b + a b) |A| |B|``, with half steps a and b. A value
    below the smallest normal errs by half the smallest subnormal, ``2**-10`` over a scale of at least 12: ``2**-12`` of the mean of any row."""
    got, t = together(case, check(parts, str(case))), {name: value.double() for name, value in parallel.whole_tensors().items()}
    bias = t["bias"] if case.layer == "linear" else torch.zeros(OUT).double()
    forward, backward = HALF_STEPS[case.recipe]
    wanted = {"y": t["x"] @ t["weight"].T + bias, "dx": t["dy"] @ t["weight"], "weight": t["dy"].T @ t["x"], "bias": t["dy"].sum(0)}
    tiny = 0.0 if case.recipe == "plain" else 2.0**-12
    limits = {"y": forward * (2 + forward), "dx": forward + backward * (1 + forward), "bias": 0.0}
    limits["weight"], sizes = limits["dx"], magnitudes(case)
    for name, value in got.items():
        kind = "y" if name == "inference" else "bias" if "bias" in name else "weight" if "weight" in name else name
        work = (LENGTH + 16) * torch.finfo(torch.float32).eps
        bound = (limits[kind] + tiny * (kind != "bias") + work) * sizes[kind]
        error = (value - wanted[kind]).abs()
        assert (error <= bound).all(), f"{name}: {(error / bound).max():.3g} times the bound"


@pytest.mark.parametrize("case", [case for case in CASES if case.layer == "mlp"], ids=str)
def test_a_column_and_a_row_layer_make_a_whole_mlp(parts: Parts, case: Case) -> None:
    """What is between the two is quantized after sums in another order, so that an element may round the other way: by a step of E5M2, ``2**-2`` of
    it, at most. That happens to less than one in ``2**12`` (fp32 sums differ by 1e-5 of a step or so): by norm ``2**-2 * sqrt(2**-12) = 2**-8``."""
    got, wanted = together(case, check(parts, str(case))), parallel.run_whole(case)
    assert got.keys() == wanted.keys()
    limit = (LENGTH + 16) * torch.finfo(torch.float32).eps if case.recipe == "plain" else 2.0**-8
    for name, value in wanted.items():
        assert got[name].shape == value.shape
        assert (got[name] - value).norm() <= limit * value.norm(), f"{name}: {(got[name] - value).norm() / value.norm():.3g}"


def test_passes_that_communicate_are_replayed(parts: Parts) -> None:
    assert all(result["replayed"] for case in CASES for result in check(parts, str(case)))


@pytest.mark.parametrize("name", JOBS)
def test_in_every_process(parts: Parts, name: str) -> None:
    """The checks of ``parallel_jobs``, which run in each process of the group."""
    check(parts, name)
