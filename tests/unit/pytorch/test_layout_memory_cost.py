"""The memory and the time of a layout, against figures worked out by hand; and the search for the best."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusible
from fusible import tex
from fusible.distributed.cost import (
    ARCHITECTURES,
    H100,
    Architecture,
    Layout,
    best_layouts,
    exchanged_with_experts,
    layouts,
    memory,
    plan_of,
    step_time,
    traffic,
)
from fusible.distributed.cost.passes import pass_memory
from fusible.errors import ArgumentError
from fusible.nvte import DType
from fusible.tex.protocol import PlannedGroup

SEVEN, SEVENTY, MIXED = (ARCHITECTURES[name] for name in ("llama-7b", "llama-70b", "llama-400b-moe"))
SMALL = Architecture(layers=4, hidden=256, heads=4, groups=4, inner=512, vocabulary=512)
LOW = fusible.DelayedScaling()


def _of_block(architecture: Architecture, layout: Layout, recipe: fusible.Recipe | None, tokens: int, dtype: torch.dtype = torch.bfloat16):
    plan = plan_of("block", architecture, architecture.kinds[0], layout, recipe, dtype, DType.Float32)
    return pass_memory(plan, layout.rows(tokens), tokens // layout.rows(tokens))


def test_experts_have_the_parameters_that_were_published() -> None:
    """400 billion, of which a token passes through 17. A feed-forward layer ``inner`` wide has three matrices of ``hidden * inner``."""
    h, attention = 5120, 2 * 5120 * 5120 + 2 * 5120 * 8 * 128
    dense, mixed = 3 * h * 16384, 3 * h * 8192
    blocks = 48 * (attention + 2 * h) + 24 * dense + 24 * (129 * mixed + 128 * h)
    assert MIXED.parameters == blocks + h + 2 * 202048 * h
    assert MIXED.active_parameters == MIXED.parameters - 24 * 127 * mixed
    assert round(MIXED.parameters / 1e9) == 401 and round(MIXED.active_parameters / 1e9) == 17


def test_what_a_block_keeps_is_what_is_published_of_it() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 4: without masks of dropout, in bf16, 2 bytes each of the two inputs of norms, of two
    normed inputs of products, of q, k, v and of what attention gives; and of the operands of the activation and of the product behind it. Beside that
    there are here the q and k that positions have yet to be turned into, as v is a view of all three; a number for each row of a norm and each row of
    a head; and a seed."""
    tokens, h, inner = 4096, SEVEN.hidden, SEVEN.inner
    published = tokens * 2 * (2 * h + 2 * h + 3 * h + h + 2 * inner + inner)
    assert _of_block(SEVEN, Layout(), None, tokens).kept == published + tokens * (2 * 2 * h + 2 * 4 + SEVEN.heads * 4) + 16


def test_operands_of_products_are_kept_in_8_bits_under_a_recipe() -> None:
    """Of the published ones the inputs of four products, one byte instead of two; o is kept beside what is quantized of it."""
    tokens, h = 4096, SEVEN.hidden
    high, low = (_of_block(SEVEN, Layout(), recipe, tokens) for recipe in (None, LOW))
    assert high.kept - low.kept == pytest.approx(tokens * (h + h - h + SEVEN.inner), rel=1e-3)
    assert low.copies == pytest.approx(SEVEN.block_parameters, rel=1e-3) and high.copies == pytest.approx(2 * SEVEN.block_parameters, rel=1e-3)


def test_processes_share_out_what_is_kept() -> None:
    """Along ``tp`` all but the inputs of norms and of the first products; with rows shared out, those too."""
    tokens, h = 4096, SEVEN.hidden
    alone, columns, rows = (_of_block(SEVEN, Layout(tp=n, sequence_parallel=s), None, tokens).kept for n, s in ((1, False), (4, False), (4, True)))
    whole = tokens * 2 * 4 * h
    assert columns == pytest.approx(whole + (alone - whole) / 4, rel=1e-3) and rows == pytest.approx(alone / 4, rel=1e-3)


def test_a_run_depends_on_the_tokens_alone() -> None:
    """Twice as many tokens keep twice as much, whatever the lengths of the sequences on which the passes are run."""
    one, two, odd = (_of_block(SMALL, Layout(), LOW, tokens).kept for tokens in (512, 1024, 1025))
    assert two == pytest.approx(2 * one, rel=1e-3) and odd == pytest.approx(two * 1025 / 1024, rel=1e-3)


def test_parameters_are_shared_out_along_every_dimension() -> None:
    whole = memory(SEVENTY, Layout(), LOW, 4096)
    assert whole.weights == 4 * SEVENTY.parameters and whole.gradients == whole.weights and whole.optimizer == 2 * whole.weights
    for layout in (Layout(dp_shard=8), Layout(cp=8), Layout(tp=8, sequence_parallel=True), Layout(tp=2, dp_shard=2, cp=2)):
        assert memory(SEVENTY, layout, LOW, 4096).weights == pytest.approx(whole.weights / 8, rel=1e-3)
    assert memory(SEVENTY, Layout(dp_replicate=8), LOW, 4096).weights == whole.weights
    assert memory(SEVENTY, Layout(dp_shard=8), None, 4096).copies == 0 and memory(SEVENTY, Layout(), None, 4096).copies > 0


def test_experts_are_shared_out_along_ep_and_by_rows_along_tp() -> None:
    layout = Layout(ep=128)
    experts, routers_and_norms = 24 * 128 * 3 * 5120 * 8192, (24 * 128 + 97) * 5120
    others = MIXED.parameters - experts
    assert memory(MIXED, layout, None, 4096).weights / 4 == others + experts / 128
    rows_too = Layout(tp=8, ep=16, sequence_parallel=True)
    of_columns = routers_and_norms + (others - routers_and_norms) / 8
    assert memory(MIXED, rows_too, None, 4096).weights / 4 == of_columns + experts / 128
    assert memory(MIXED, Layout(tp=8, ep=16), None, 4096).weights / 4 == of_columns + experts / 16
    assert exchanged_with_experts(MIXED, MIXED.kinds[1], rows_too, 4096) == exchanged_with_experts(MIXED, MIXED.kinds[1], layout, 512)
    rows, numbers_of_rows = 4 * 4096 * 5120 * 2, 2 * 128 * 8  # in bf16 there and back, twice; int64 of each expert, in forward and in backward
    of_block = (rows + numbers_of_rows) * 127 / 128
    assert exchanged_with_experts(MIXED, MIXED.kinds[1], layout, 4096) == of_block
    assert exchanged_with_experts(MIXED, MIXED.kinds[0], layout, 4096) == 0
    assert traffic(MIXED, layout, None, 4096).ep == 24 * of_block + 2 * 4 * others * 127 / 128
    shards = Layout(ep=128, dp_shard=2)  # of what is gathered in bf16 gradients come so
    assert traffic(MIXED, shards, None, 4096).ep == 24 * of_block + 2 * 2 * others * 127 / 128


def test_stages_have_micro_batches_under_way() -> None:
    """The first of four has four, the last one; and the last has the logits."""
    stages = [memory(SEVENTY, Layout(pp=4), LOW, 4096, microbatches=8, stage=stage) for stage in range(4)]
    assert stages[0].activations == pytest.approx(4 * stages[3].activations, rel=0.02)  # and the inputs of the head
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    few = memory(SEVENTY, Layout(pp=4), LOW, 4096, microbatches=2)
    assert few.activations == stages[2].activations
    with pytest.raises(ArgumentError, match="expected a divisor of 80 blocks as pp, got 3"):
        memory(SEVENTY, Layout(pp=3), LOW, 4096)
    with pytest.raises(ArgumentError, match="expected a stage from 0 to 3, got 4"):
        memory(SEVENTY, Layout(pp=4), LOW, 4096, stage=4)


def test_gradients_come_as_what_is_kept_goes_unless_they_are_added_up() -> None:
    one, two = (memory(SMALL, Layout(), None, 4096, microbatches=n) for n in (1, 2))
    assert two.peak == one.peak + one.gradients  # what is kept is the larger here
    few = memory(SMALL, Layout(), None, 128)
    assert few.peak == few.weights + few.optimizer + few.copies + few.gradients + few.working


def test_the_time_of_products_is_theirs() -> None:
    """Six products for each parameter and token, of which attention's are 6 tokens sequence hidden a block; 8 bits are twice as fast."""
    tokens = sequence = 4096
    weights = SEVEN.parameters - SEVEN.vocabulary * SEVEN.hidden - (2 * SEVEN.layers + 1) * SEVEN.hidden
    attention = 6 * tokens * sequence * SEVEN.hidden * SEVEN.layers / (989e12 * 0.6)
    high, low = (step_time(SEVEN, Layout(), recipe, tokens, sequence) for recipe in (None, LOW))
    assert high.products == pytest.approx(6 * tokens * weights / (989e12 * 0.6) + attention)
    assert low.products == pytest.approx(6 * tokens * weights / (1979e12 * 0.6) + attention)
    assert high.total == high.products + high.memory and high.hidden == 1.0 and high.tokens == tokens
    halves = step_time(SEVEN, Layout(tp=2, sequence_parallel=True), None, tokens, sequence)
    assert halves.products == pytest.approx(high.products / 2, rel=1e-2)


def test_what_hides_and_what_does_not() -> None:
    tokens = 8192
    rows = step_time(SEVEN, Layout(tp=8, sequence_parallel=True), None, tokens, tokens)
    sent = traffic(SEVEN, Layout(tp=8, sequence_parallel=True), None, tokens).tp / 450e9
    assert rows.exposed == {"tp": sent} and rows.total == pytest.approx(rows.products + rows.memory + sent)
    shards = step_time(SEVEN, Layout(dp_shard=64), None, tokens, tokens)
    once = 2 * SEVEN.vocabulary * SEVEN.hidden + SEVEN.hidden  # embedding, norm and output stay whole between forward and backward
    gathered = (3 * SEVEN.parameters - once) * 2 * 63 / 64 / 50e9
    assert shards.sent["dp_shard"] == pytest.approx(gathered)
    assert shards.exposed["dp_shard"] == pytest.approx(max(0.0, gathered - shards.products - shards.memory))
    slow = step_time(SEVEN, Layout(dp_shard=64), None, tokens, tokens, machine=replace(H100, outside=1e9))
    assert slow.exposed["dp_shard"] > 0 and slow.hidden < 1


def test_stages_wait_for_one_another() -> None:
    made = step_time(SEVENTY, Layout(pp=4), None, 4096, 4096, microbatches=12)
    assert made.bubble / made.total == pytest.approx(3 / (12 + 3))


def test_links_are_those_within_a_node_as_far_as_it_reaches() -> None:
    layout = Layout(tp=4, dp_shard=2, dp_replicate=4)
    assert [H100.link(layout, name) for name in ("tp", "dp_shard", "dp_replicate")] == [450e9, 450e9, 50e9]
    assert H100.link(Layout(tp=4, dp_shard=4), "dp_shard") == 50e9
    assert H100.products(8) == 1979e12 * 0.6 and H100.products(4) == 1979e12 * 0.6 and H100.products(16) == 989e12 * 0.6


def test_layouts_divide_the_processes_and_the_architecture() -> None:
    found = list(layouts(MIXED, 64))
    assert len(set(found)) == len(found) and all(layout.processes == 64 for layout in found)
    assert all(48 % layout.pp == 0 and 128 % layout.ep == 0 and layout.cp == 1 for layout in found)
    assert any(layout.cp > 1 for layout in layouts(SEVENTY, 64, sequence=32768)) and not any(layout.ep > 1 for layout in layouts(SEVENTY, 64))


def test_the_best_layout_is_the_fastest_that_fits() -> None:
    found = best_layouts(SEVEN, 16, LOW, batch=2**18, count=1000)
    assert found == sorted(found, key=lambda one: one.time.total) and len(found) > 5
    for one in found:
        assert one.layout.processes == 16 and one.memory.peak <= 80e9 * H100.usable
        assert one.tokens * one.microbatches * one.layout.batches * one.layout.cp == 2**18
    assert not any(one.layout == Layout(dp_replicate=16) for one in found)  # 16 bytes a parameter are more than there are
    assert best_layouts(SEVEN, 16, LOW, batch=2**18, count=2) == found[:2]
    roomy = best_layouts(SEVEN, 1, LOW, batch=2**14, machine=replace(H100, memory=800e9))
    assert [one.layout for one in roomy] == [Layout()]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_layouts(SEVEN, 0, None), "the number of GPUs: expected at least 1, got 0"),
        (lambda: best_layouts(SEVEN, 8, None, batch=5000), "the tokens of a batch: expected a multiple of 4096, a sequence's, got 5000"),
        (lambda: best_layouts(SEVEN, 1, None), "1 GPUs: expected a layout that fits in the 80 GB of one H100 SXM, got .* GB at least"),
        (lambda: best_layouts(SEVEN, 4096, None, batch=4096), "got none that divides them so that each has a sequence"),
        (lambda: Layout(tp=0), "tp of a Layout: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_collectives_of_a_group_that_is_planned_give_shapes() -> None:
    group, x = PlannedGroup(4), torch.empty(8, 3, device="meta")
    assert tex.prim.all_gather(x, group).shape == (32, 3) and tex.prim.reduce_scatter(x, group).shape == (2, 3)
    for same in (tex.prim.all_reduce(x, group), tex.prim.all_to_all(x, group), tex.prim.ring_shift(x, group)):
        assert same.is_meta and same.shape == x.shape
    with pytest.raises(fusible.errors.ShapeError, match="a first dimension that 4 divides"):
        tex.prim.reduce_scatter(torch.empty(6, device="meta"), group)
