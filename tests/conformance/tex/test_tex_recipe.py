"""The delayed-scaling update, against a scalar restatement of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tex_backends import Runner, on_backends

from fusible.errors import ArgumentError, ShapeError
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

pytestmark = on_backends("fused_amax_and_scale_update_after_reduction")


def update(history: list[float], buffer: float, scale: float, algorithm: str, largest: np.float32) -> tuple[list[float], float]:
    """One column: the new history and the new scale."""
    last = buffer if buffer != 0 else history[0]
    amax = last
    if algorithm == "max":
        amax = max([*history[1:], last]) if last != 0 else 0.0
    if last != 0:
        history = [*history[1:], last]
        history[0] = 0.0
    if math.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            new = largest / np.float32(amax)
        scale = FLT_MAX if np.isinf(new) else float(new)
    return history, scale


amaxes = st.sampled_from([0.0, 1.0, 0.3, 448.0, 1e-40, 1e30, math.inf])


@given(
    columns=st.lists(st.tuples(st.lists(amaxes, min_size=4, max_size=4), amaxes), min_size=3, max_size=3),
    length=st.integers(1, 4),
    algorithm=st.sampled_from(["max", "most_recent"]),
    margin=st.sampled_from([0, 2]),
    fp8=st.sampled_from(list(FP8_MAX)),
)
def test_update(runner: Runner, columns: list[tuple[list[float], float]], length: int, algorithm: str, margin: int, fp8: DType) -> None:
    histories = [
        torch.tensor([column[0][:length] for column in columns[:2]]).t().contiguous(),
        torch.tensor([columns[2][0][:length]]).t().contiguous(),
    ]
    scales = [torch.tensor([1.5, 2.5]), torch.tensor([3.5])]
    buffer = torch.tensor([column[1] for column in columns])
    expected = [
        update(
            [float(np.float32(a)) for a in column[0][:length]],
            float(np.float32(column[1])),
            scale,
            algorithm,
            np.float32(FP8_MAX[fp8] * 2.0**-margin),
        )
        for column, scale in zip(columns, (1.5, 2.5, 3.5), strict=True)
    ]
    runner(
        "fused_amax_and_scale_update_after_reduction",
        amax_reduction_buffer=buffer,
        amax_histories=histories,
        scales=scales,
        amax_compute_algo=algorithm,
        fp8_dtype=fp8,
        margin=margin,
    )
    assert torch.cat(histories, 1).t().tolist() == [history for history, _ in expected]
    assert torch.cat(scales).tolist() == [scale for _, scale in expected]


def test_a_nan_keeps_the_scale(runner: Runner) -> None:
    history, scale = torch.tensor([[0.0], [1.0]]), torch.tensor([2.0])
    runner(
        "fused_amax_and_scale_update_after_reduction",
        amax_reduction_buffer=torch.tensor([math.nan]),
        amax_histories=[history],
        scales=[scale],
        amax_compute_algo="max",
        fp8_dtype=DType.kFloat8E4M3,
        margin=0.0,
    )
    assert scale.item() == 2.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"amax_compute_algo": "mean"}, ArgumentError, "'max' or 'most_recent'"),
        ({"amax_reduction_buffer": torch.ones(3)}, ShapeError, "2 amaxes"),
        ({"scales": []}, ArgumentError, "scales .*: expected a list of 1"),
        ({"amax_histories": [torch.ones(4, 1)]}, ShapeError, r"scales\[0\] .*: expected shape \[1\]"),
    ],
)
def test_wrong_arguments_change_nothing(runner: Runner, changes: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "amax_reduction_buffer": torch.ones(2),
        "amax_histories": [torch.zeros(4, 2)],
        "scales": [torch.ones(2)],
        "amax_compute_algo": "max",
        "fp8_dtype": DType.kFloat8E4M3,
        "margin": 0,
    }
    with pytest.raises(error, match=message):
        runner("fused_amax_and_scale_update_after_reduction", **{**arguments, **changes})
    assert not arguments["amax_histories"][0].any() and (arguments["scales"][0] == 1).all()
