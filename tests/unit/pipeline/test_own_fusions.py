"""The package's own fusions: which there is for which ops, by its name, and what its text says of it."""

from __future__ import annotations

import pytest
import torch

from fusible import ops
from fusible.compute_pipeline import ComputePipeline, PlanRequest
from fusible.fusions import epoch, mmt_add, mmt_gelu, mmt_scale
from fusible.nvte import DType, make_nvte_tensor
from fusible.ops import Add, Op
from fusible.tex.activations import ELEMENTWISE, Activation

WIDTH = 16


@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.name)
def test_a_bias_before_an_activation_has_the_backward_of_that_activation(row: Activation) -> None:
    activation: Op = getattr(ops, row.title)()
    members = Add(make_nvte_tensor(torch.zeros(WIDTH))), activation
    request = PlanRequest(None, DType.Float32, WIDTH, True, (((DType.Float32, True),), ()), (True, True), False, epoch())
    (group,) = ComputePipeline(members).plan(request).backward
    assert group.fusion is not None and group.fusion.name == f"add_{row.name}_bwd_fused"


@pytest.mark.parametrize("module", [mmt_add, mmt_gelu, mmt_scale], ids=lambda module: module.__name__.rpartition(".")[2])
def test_an_inference_says_of_which_forward_it_gives_y(module: object) -> None:
    names = [name for name in vars(module)["__all__"] if "_inf_" in name]
    assert names
    for name in names:
        function = vars(module)[name]
        forward = name.replace("_inf_", "_fwd_")
        assert function.__name__ == function.__qualname__ == name and forward in vars(module)
        assert function.__doc__ == f"y of ``{forward}``."
