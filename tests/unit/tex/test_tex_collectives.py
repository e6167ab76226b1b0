"""Functions between processes, in a process that is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import lazy, tex
from fusible.errors import ArgumentError
from fusible.pytorch import ops as te_ops

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "begin_all_gather", "begin_all_reduce", "begin_reduce_scatter")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_process_without_others_is_told_to_meet_them(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"prim.{name}: expected processes that know one another, got no process group; call torch.distributed"):
        getattr(tex.prim, name)(torch.zeros(2, 2))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_compiled_program_refuses_them_with_the_reason(name: str) -> None:
    decision = tex.explain(f"prim.{name}", lazy.Tensor([1.0]), None)
    assert decision.backend is None
    assert dict(decision.others)["xla"] == "compiles programs of one process, and it takes those of a group"


@pytest.mark.parametrize(
    "make",
    [
        te_ops.AllGather,
        te_ops.AllReduce,
        te_ops.ReduceScatter,
        lambda: te_ops.BasicLinear(4, 4, tensor_parallel_mode="column"),
        lambda: te_ops.Linear(4, 4, tensor_parallel_mode="row"),
        lambda: te_ops.Bias(4, tensor_parallel=True),
    ],
)
def test_so_are_layers(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="'s process group: expected an initialized torch.distributed, got none; call torch.distributed"):
        make()


def test_layers_that_nobody_shares_need_no_group() -> None:
    layer = te_ops.BasicLinear(4, 6, sequence_parallel=True, userbuffers_options={"comm_name": "qkv"})
    assert layer.weight.shape == (6, 4) and not layer.sequence_parallel and te_ops.Bias(5).local_size == 5
    with pytest.raises(ArgumentError, match="None, 'column' or 'row'"):
        te_ops.Linear(4, 4, tensor_parallel_mode="columns")
