"""The package's own fusions: which there is for which ops, by its name, and what its text says of it."""

from __future__ import annotations

import pytest
import torch

from fusible import ops
from fusible.compute_pipeline import ComputePipeline, Plan, PlanRequest
from fusible.fusions import epoch, mmt_add, mmt_gelu, mmt_scale
from fusible.nvte import DType, make_nvte_tensor
from fusible.ops import GELU, MMT, Add, Op
from fusible.quantized import Float8CurrentScaling, Recipe
from fusible.tex.activations import ELEMENTWISE, Activation

WIDTH = 16


def plan(*members: Op, recipe: Recipe | None = None) -> Plan:
    args = tuple(tuple((arg.dtype, True) for arg in op.args) for op in members)
    return ComputePipeline(members).plan(PlanRequest(recipe, DType.Float32, WIDTH, True, args, (True,) * len(members), False, epoch()))


def add() -> Add:
    return Add(make_nvte_tensor(torch.ones(WIDTH)))


def mmt() -> MMT:
    return MMT(make_nvte_tensor(torch.zeros(WIDTH, WIDTH)))


@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.name)
def test_a_bias_before_an_activation_has_the_backward_of_that_activation(row: Activation) -> None:
    activation: Op = getattr(ops, row.title)()
    (group,) = plan(add(), activation).backward
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


def test_an_inference_gives_the_y_of_its_forward_and_no_contexts() -> None:
    bound = plan(mmt(), add()).ops
    x = make_nvte_tensor(torch.ones(3, WIDTH))
    y, contexts = mmt_add.mmt_add_fwd_fused(*bound, x)  # type: ignore[arg-type]
    found = mmt_add.mmt_add_inf_fused(*bound, x)  # type: ignore[arg-type]
    assert len(contexts) == 2 and found.type == y.type and torch.equal(found.data, y.data)
    assert found.data.any() and mmt_add.mmt_add_inf_fused.__doc__ == "y of ``mmt_add_fwd_fused``."


@pytest.mark.parametrize("place", [None, 0, 1, 2, 3])
def test_a_gradient_that_is_asked_for_in_8_bits_between_the_ops_of_a_fused_backward_keeps_them_apart(place: int | None) -> None:
    """That of a product is its operand, and may be in 8 bits, and so may the one that comes in."""
    members = [add(), GELU(), mmt(), add()]
    if place is not None:
        members[place] = members[place].with_(dy_dtype=DType.Float8E5M2)
    found = [group.fusion.name for group in plan(*members, recipe=Float8CurrentScaling()).backward if group.fusion is not None]
    assert ("add_gelu_mmt_add_bwd_fused" in found) is (place not in (0, 1))


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_an_input_that_is_asked_for_in_8_bits_between_the_ops_of_a_fused_forward_keeps_them_apart(place: int | None) -> None:
    members = [mmt(), add(), GELU()]
    if place is not None:
        members[place] = members[place].with_(x_dtype=DType.Float8E4M3)
    made = plan(*members, recipe=Float8CurrentScaling())
    for kind, groups in (("fwd", made.forward), ("inf", made.inference)):
        found = [group.fusion.name for group in groups if group.fusion is not None]
        assert (f"mmt_add_gelu_{kind}_fused" in found) is (place in (None, 0))
