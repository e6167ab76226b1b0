"""Where something that no compiler sees through cuts a pass: each region is given what its own ops take, and no more."""

from __future__ import annotations

import torch

from fusible.compute_pipeline import ComputePipeline, Plan, PlanRequest
from fusible.fusions import epoch
from fusible.nvte import DType, make_nvte_tensor
from fusible.ops import MMT, DotProductAttention, Dropout, Identity, Op
from fusible.quantized import DelayedScaling, Recipe

WIDTH = 48


class Counting(Identity):
    """An identity with an effect."""

    effects = True

    @property
    def transparent(self) -> bool:
        return self.hands_through

    def __init__(self, hands_through: bool = False) -> None:
        super().__init__()
        self.hands_through = hands_through


def plan(*ops: Op, recipe: Recipe | None = None) -> Plan:
    args = tuple(tuple((arg.dtype, True) for arg in op.args) for op in ops)
    return ComputePipeline(ops).plan(PlanRequest(recipe, DType.Float32, WIDTH, True, args, (True,) * len(ops), True, epoch()))


def mmt() -> MMT:
    return MMT(make_nvte_tensor(torch.zeros(WIDTH, WIDTH)))


def test_a_region_takes_those_values_of_the_call_that_its_own_ops_take() -> None:
    p = plan(Dropout(0.5), Counting(), Identity(), Counting(), DotProductAttention(2, 8))
    (segment,) = p.segments
    for regions in (segment.forward, segment.backward, p.inferred):
        assert [region.call_inputs for region in regions] == [("seed",), (), (), (), ("sequences",)]
    assert p.call_inputs == ("seed", "sequences")


def test_a_program_reads_the_scales_of_its_own_ops_and_what_is_called_may_read_all() -> None:
    p = plan(mmt(), Counting(), mmt(), recipe=DelayedScaling())
    (segment,) = p.segments
    forward, backward = ("0.x", "0.weight", "2.x", "2.weight"), ("0.dy", "2.dy")
    assert [region.scales for region in segment.forward] == [forward[:2], (*forward, *backward), forward[2:]]
    assert [region.scales for region in segment.backward] == [("0.dy",), backward, ("2.dy",)]
    assert [region.scales for region in p.inferred] == [forward[:2], forward, forward[2:]]


def test_a_program_reads_the_scale_by_which_it_writes_for_a_consumer_in_another_one() -> None:
    p = plan(mmt(), Counting(hands_through=True), mmt(), recipe=DelayedScaling())
    (segment,) = p.segments
    assert segment.forward[0].scales == ("0.x", "0.weight", "2.x") and segment.forward[2].scales == ("2.x", "2.weight")
    assert segment.backward[0].scales == ("0.dy",) and segment.backward[2].scales == ("0.dy", "2.dy")


def test_a_pass_in_one_region_reads_all_scales_of_its_direction() -> None:
    p = plan(mmt(), mmt(), recipe=DelayedScaling())
    (segment,) = p.segments
    assert [region.scales for region in (*segment.forward, *p.inferred)] == [p.state.forward] * 2
    assert [region.scales for region in segment.backward] == [p.state.backward]
