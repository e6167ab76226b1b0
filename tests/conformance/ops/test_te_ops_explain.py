"""``explain`` of operations: of every one without an input at hand, and each quantizer in it once."""

from __future__ import annotations

import math
import re

import pytest
import torch
from te_ops_table import TE_TABLE

from fusible.pytorch import ops
from fusible.quantized import DelayedScaling, Float8CurrentScaling, Recipe


@pytest.mark.parametrize("name", TE_TABLE)
def test_an_input_is_found_that_the_operations_take(name: str) -> None:
    record = TE_TABLE[name]
    for more in ([], [ops.Linear(96 if "blocks of 3" in name else 64, 32)]):
        text = ops.Sequential(record.make(record.width, torch.float32), *more).explain()
        assert ", activations fp32\n" in text


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=repr)
def test_every_quantizer_is_told_once_and_none_of_what_only_passes(recipe: Recipe) -> None:
    """A product asks for its input, its weight and its gradient, whatever its neighbours ask for; what passes 8 bits on between them has none."""
    linear, between = (
        [f"{{}}.{name}" for name in ("x", "weight", "dy")],
        (
            [],
            [ops.Identity()],
            [ops.Quantize(), ops.Identity()],
            [ops.Quantize(forward=False, backward=True)],
            [ops.Quantize(backward=True)],
        ),
    )
    for passing in between:
        model = ops.Sequential(ops.BasicLinear(64, 64), *passing, ops.BasicLinear(64, 64))
        told = model.explain(recipe=recipe).partition("quantizers\n")[2].partition("\n\n")[0]
        wanted = [name.format(place) for place in (0, len(passing) + 1) for name in linear]
        assert [line.split()[0] for line in told.splitlines()] == wanted
    for place, around in enumerate(([], [ops.GELU()])):
        alone = ops.Sequential(*around, ops.Quantize(backward=True), *around).explain(recipe=recipe).partition("quantizers\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in alone.splitlines()] == [f"{place}.x", f"{place}.dy"]
    assert ops.Sequential(ops.GELU()).explain(recipe=recipe).count("quantizers: none") == 1


def test_no_fusion_that_was_chosen_is_told_as_one_that_did_not_match() -> None:
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64), ops.Linear(64, 64))
    text, _, missed = model.explain(recipe=Float8CurrentScaling()).partition("fusions that did not match\n")
    chosen = re.findall(r"^  (\d+)-(\d+) .* (\w+_fused)$", text, re.MULTILINE)
    assert len(chosen) > 5 and missed
    assert not [name for start, stop, name in chosen if f"{name} at {start}-{stop}: " in missed]


def test_a_fusion_of_which_the_last_op_alone_is_missing_is_told_with_what_stands_there() -> None:
    """Unless its first one is in another fusion."""
    wants = "  backward: gelu_mmt_bwd_fused at {0} (GELU): it wants MMT or RowParallelMMT next, and {1}"
    behind, end = ops.Sequential(ops.GELU(), ops.Dropout(0.1)).explain(), ops.Sequential(ops.Dropout(0.1), ops.GELU()).explain()
    assert wants.format(0, "1 is Dropout(p=0.1)") in behind.splitlines() and wants.format(1, "that is the end") in end.splitlines()
    fused = ops.Sequential(ops.Bias(64), ops.GELU(), ops.Dropout(0.1)).explain()
    assert "add_gelu_bwd_fused" in fused and wants.format(1, "2 is Dropout(p=0.1)") not in fused.splitlines()


def test_a_fusion_whose_first_ops_are_not_there_is_not_told() -> None:
    text = ops.Sequential(ops.Dropout(0.1), ops.Dropout(0.1), ops.Dropout(0.1)).explain()
    assert text.rstrip().endswith("fusions that did not match: none came near")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_gradient_of_an_input_is_told_where_it_is_wanted(wanted: bool) -> None:
    for first in (ops.Bias(64), ops.GELU()):
        text = ops.Sequential(first, ops.BasicLinear(64, 64)).explain(torch.zeros(3, 64, requires_grad=wanted))
        backward = text.partition("backward\n")[2].partition("\n\n")[0].splitlines()
        assert backward[-1].split("->")[-1].split()[0] == ("fp32" if wanted else "none")


def test_what_leaves_a_linear_is_told_by_its_own_type_and_not_by_that_between_its_bias_and_its_product() -> None:
    text = ops.Sequential(ops.Linear(64, 64)).explain(recipe=Float8CurrentScaling())
    backward = text.partition("backward\n")[2].partition("\n\n")[0].split()
    assert backward[backward.index("->") - 1 :][:5] == ["fp32", "->", "e5m2[current]", "->", "fp32"]


@pytest.mark.parametrize("columns", [1, 2, 8, 64])
@pytest.mark.parametrize("size", [None, 1, 2, 8, 16, 64])
def test_the_width_that_is_tried_is_the_least_that_all_operations_take(size: int | None, columns: int) -> None:
    """Up to two of the widest blocks that a gated activation interleaves, for parameters of one column as well."""
    gate = ops.SwiGLU(glu_interleave_size=size)
    fuser = ops.OperationFuser([gate, ops.Reshape((-1, columns)), ops.Linear(columns, 4)])
    width = math.lcm(columns, 2 * (size or 1))
    assert fuser.explain() == fuser.explain(torch.empty(0, width, requires_grad=True)) and fuser._width() == width
