"""What a layout costs, against the plans of models that are laid out so, and against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch

import fusible
from fusible.compute_pipeline import ComputePipeline, PlanRequest, between_rows, fusion_epoch, messages_of, tensor_parallel
from fusible.distributed.cost import ARCHITECTURES, Architecture, Layout, block_messages, traffic
from fusible.errors import ArgumentError, ShapeError
from fusible.nvte import DType
from fusible.ops.collectives import RowsOfAll
from fusible.ops.sharing import Process
from fusible.quantized import Recipe

SMALL = Architecture(layers=2, hidden=64, heads=4, groups=2, inner=96, vocabulary=128)
TOKENS = 256
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}


def test_the_parameters_are_those_that_were_published() -> None:
    """Llama 2: 6,738,415,616 and 68,976,648,192."""
    assert ARCHITECTURES["llama-7b"].parameters == 6_738_415_616
    assert ARCHITECTURES["llama-70b"].parameters == 68_976_648_192


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_sends_what_each_block_of_a_model_sends(recipe: str, sequence: bool) -> None:
    """Of two blocks after one another, without what scatters and gathers rows at their ends."""
    process = Process(0, 2)
    whole = tensor_parallel([*SMALL.block(), *SMALL.block()], process, None, sequence_parallel=sequence)
    found = []
    for r in whole:
        shapes = {name: list(getattr(r.op, name).shape) for name in r.holdings}
        for name, holding in r.holdings.items():
            if holding.dim is not None:
                shapes[name][holding.dim] //= 2
        found.append(r.op.with_(**{name: fusible.nvte.make_nvte_tensor(torch.empty(shape, device="meta")) for name, shape in shapes.items()}))
    *before, end = between_rows(found)
    ops = [each for op, put in zip(found, before, strict=True) for each in (put, op) if each is not None] + ([end] if end is not None else [])
    args = tuple(tuple((DType.Float32, True) for _ in op.arg_names) for op in ops)
    request = PlanRequest(RECIPES[recipe], DType.BFloat16, 64, True, args, (True,) * len(ops), False, fusion_epoch())
    plan = ComputePipeline(ops).plan(request)
    sent = [s for kind in ("forward", "backward") for s in messages_of(plan, kind, TOKENS) if not isinstance(s.op, RowsOfAll)]  # type: ignore[arg-type]
    one = block_messages(SMALL, Layout(tp=2, sequence_parallel=sequence), RECIPES[recipe], TOKENS)
    assert sorted(s.message for s in sent) == sorted(2 * [s.message for s in one]) and one


def test_figures_that_are_worked_out_by_hand() -> None:
    """Of 70 billion parameters: two sums forward and two backward of 8,192 tokens times 8,192 columns in bf16, each of which costs a process twice
    seven eighths of that; with rows shared out, and scaled as a whole, what is gathered is half as large."""
    big, tokens = ARCHITECTURES["llama-70b"], 8192
    one = tokens * 8192 * 2 * 7 / 8
    assert traffic(big, Layout(tp=8), None, tokens).tp == 80 * 4 * 2 * one
    rows = Layout(tp=8, sequence_parallel=True)
    assert traffic(big, rows, None, tokens).tp == 80 * 10 * one  # gathered: x twice, and dy, of two products each; scattered: as often y, and dx
    low = traffic(big, rows, fusible.Float8CurrentScaling(), tokens).tp
    assert low == pytest.approx(80 * (4 + 6 / 2) * one, rel=1e-6)
    shards = traffic(big, Layout(tp=8, dp_shard=4, dp_replicate=2), None, tokens)
    norms = (2 * 80 + 1) * 8192  # which every process along tp has whole
    held = 2 * ((big.parameters - norms) / 8 + norms)
    ends = 2 * (2 * 32000 * 8192 / 8 + 8192)  # embedding, output and last norm are gathered before forward alone
    assert shards.dp_shard == (3 * held - ends) * 3 / 4 and shards.dp_replicate == 2 * held / 4 / 2


def test_along_the_tokens() -> None:
    """Heads are exchanged by 1 / n of q, k, v and o, there and back; keys and values go round n - 1 times forward, and their gradients with them."""
    size, tokens, width = 4, 128, 16
    wide = Architecture(layers=1, hidden=64, heads=4, groups=4, inner=96, vocabulary=128)
    exchanged = traffic(wide, Layout(cp=size), None, tokens).cp
    assert exchanged == 2 * (3 * 64 + 64) * tokens * 2 * (size - 1) / size
    kv = 2 * 2 * width * tokens
    passed = traffic(SMALL, Layout(cp=size, context="ring"), None, tokens).cp
    assert passed == SMALL.layers * (2 * kv * (size - 1) * 2 + kv * 4 * size)


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(ShapeError, match="the query heads that are shared out: expected a multiple of 8"):
        traffic(SMALL, Layout(tp=8), None, TOKENS)
    with pytest.raises(ArgumentError, match="context of a Layout: expected 'all_to_all' or 'ring', got 'star'"):
        traffic(SMALL, Layout(cp=2, context="star"), None, TOKENS)
