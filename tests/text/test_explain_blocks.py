"""Frozen text of ``explain``: the MLP block and the GPT block under each kind of recipe. Who reads it sees every fused pass and every type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusible import (
    GELU,
    DelayedScaling,
    Dropout,
    Float8CurrentScaling,
    HighPrecision,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    Recipe,
    Residual,
    Sequential,
    autocast,
)
from fusible.pytorch import ops


def mlp() -> Sequential:
    return Sequential(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64))


def gpt() -> Sequential:
    attention = Residual(LayerNorm(64), Linear(64, 192), MultiHeadedSelfAttention(64, 4), Linear(64, 64))
    return Sequential(attention, Residual(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64)))


def explained(model: Sequential, recipe: Recipe | None, x_grad: bool = True) -> str:
    x = torch.zeros(2, 5, 64, dtype=torch.bfloat16, requires_grad=x_grad)
    with autocast(enabled=recipe is not None, recipe=recipe):
        return model.to(torch.bfloat16).explain(x)


_MLP_DELAYED = """\
6 ops, 1 segments, recipe DelayedScaling(), activations bf16

forward
  0    LayerNorm                                bf16 -> e4m3[1.x]
  1-3  MMT(weight e4m3[1.weight]) + Add + GELU  e4m3[1.x] -> bf16 -> bf16 -> e4m3[4.x]  mmt_add_gelu_fwd_fused
  4-5  MMT(weight e4m3[4.weight]) + Add         e4m3[4.x] -> bf16 -> bf16               mmt_add_fwd_fused

backward
  2-5  Add + MMT + GELU + Add  bf16 -> e5m2[4.dy] -> bf16 -> bf16 -> e5m2[1.dy]  add_gelu_mmt_add_bwd_fused
  1    MMT                     e5m2[1.dy] -> bf16
  0    LayerNorm               bf16 -> bf16

inference
  0    LayerNorm                                bf16 -> e4m3[1.x]
  1-3  MMT(weight e4m3[1.weight]) + Add + GELU  e4m3[1.x] -> bf16 -> bf16 -> e4m3[4.x]  mmt_add_gelu_inf_fused
  4-5  MMT(weight e4m3[4.weight]) + Add         e4m3[4.x] -> bf16 -> bf16               mmt_add_inf_fused"""

_MLP_CURRENT = """\
6 ops, 1 segments, recipe Float8CurrentScaling(), activations bf16

forward
  0    LayerNorm                               bf16 -> e4m3[current]
  1-3  MMT(weight e4m3[current]) + Add + GELU  e4m3[current] -> bf16 -> bf16 -> e4m3[current]  mmt_add_gelu_fwd_fused
  4-5  MMT(weight e4m3[current]) + Add         e4m3[current] -> bf16 -> bf16                   mmt_add_fwd_fused

backward
  2-5  Add + MMT + GELU + Add  bf16 -> e5m2[current] -> bf16 -> bf16 -> e5m2[current]  add_gelu_mmt_add_bwd_fused
  1    MMT                     e5m2[current] -> bf16
  0    LayerNorm               bf16 -> bf16

inference
  0    LayerNorm                               bf16 -> e4m3[current]
  1-3  MMT(weight e4m3[current]) + Add + GELU  e4m3[current] -> bf16 -> bf16 -> e4m3[current]  mmt_add_gelu_inf_fused
  4-5  MMT(weight e4m3[current]) + Add         e4m3[current] -> bf16 -> bf16                   mmt_add_inf_fused"""

_MLP_NONE = """\
6 ops, 1 segments, recipe none, activations bf16

forward
  0    LayerNorm                      bf16 -> bf16
  1-3  MMT(weight bf16) + Add + GELU  bf16 -> bf16 -> bf16 -> bf16  mmt_add_gelu_fwd_fused
  4-5  MMT(weight bf16) + Add         bf16 -> bf16 -> bf16          mmt_add_fwd_fused

backward
  2-5  Add + MMT + GELU + Add  bf16 -> bf16 -> bf16 -> bf16 -> bf16  add_gelu_mmt_add_bwd_fused
  1    MMT                     bf16 -> bf16
  0    LayerNorm               bf16 -> bf16

inference
  0    LayerNorm                      bf16 -> bf16
  1-3  MMT(weight bf16) + Add + GELU  bf16 -> bf16 -> bf16 -> bf16  mmt_add_gelu_inf_fused
  4-5  MMT(weight bf16) + Add         bf16 -> bf16 -> bf16          mmt_add_inf_fused"""

_GPT_DELAYED = """\
16 ops, 2 segments, recipe DelayedScaling(), activations bf16

forward
  0      ResidualBegin                                    bf16 -> bf16
  1      LayerNorm                                        bf16 -> e4m3[2.x]
  2-3    MMT(weight e4m3[2.weight]) + Add                 e4m3[2.x] -> bf16 -> bf16                 mmt_add_fwd_fused
  4      DotProductAttention                              bf16 -> bf16|e4m3[5.x]
  5-7    MMT(weight e4m3[5.weight]) + Add + ResidualEnd   bf16|e4m3[5.x] -> bf16 -> bf16 -> bf16    mmt_add_residual_fwd_fused
  8      ResidualBegin                                    bf16 -> bf16
  9      LayerNorm                                        bf16 -> e4m3[10.x]
  10-12  MMT(weight e4m3[10.weight]) + Add + GELU         e4m3[10.x] -> bf16 -> bf16 -> e4m3[13.x]  mmt_add_gelu_fwd_fused
  13-15  MMT(weight e4m3[13.weight]) + Add + ResidualEnd  e4m3[13.x] -> bf16 -> bf16 -> bf16        mmt_add_residual_fwd_fused

backward
  15     ResidualEnd                bf16 -> bf16
  11-14  Add + MMT + GELU + Add     bf16 -> e5m2[13.dy] -> bf16 -> bf16 -> e5m2[10.dy]  add_gelu_mmt_add_bwd_fused
  10     MMT                        e5m2[10.dy] -> bf16
  8-9    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                                make_extra_layernorm_bwd_fused
  7      ResidualEnd                bf16 -> bf16
  5-6    Add + MMT                  bf16 -> e5m2[5.dy] -> bf16                          mmt_add_bwd_fused
  4      DotProductAttention        bf16 -> bf16
  2-3    Add + MMT                  bf16 -> e5m2[2.dy] -> bf16                          mmt_add_bwd_fused
  0-1    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                                make_extra_layernorm_bwd_fused

inference
  0      ResidualBegin                                    bf16 -> bf16
  1      LayerNorm                                        bf16 -> e4m3[2.x]
  2-3    MMT(weight e4m3[2.weight]) + Add                 e4m3[2.x] -> bf16 -> bf16                 mmt_add_inf_fused
  4      DotProductAttention                              bf16 -> bf16|e4m3[5.x]
  5-7    MMT(weight e4m3[5.weight]) + Add + ResidualEnd   bf16|e4m3[5.x] -> bf16 -> bf16 -> bf16    mmt_add_residual_inf_fused
  8      ResidualBegin                                    bf16 -> bf16
  9      LayerNorm                                        bf16 -> e4m3[10.x]
  10-12  MMT(weight e4m3[10.weight]) + Add + GELU         e4m3[10.x] -> bf16 -> bf16 -> e4m3[13.x]  mmt_add_gelu_inf_fused
  13-15  MMT(weight e4m3[13.weight]) + Add + ResidualEnd  e4m3[13.x] -> bf16 -> bf16 -> bf16        mmt_add_residual_inf_fused"""

_GPT_CURRENT = """\
16 ops, 2 segments, recipe Float8CurrentScaling(), activations bf16

forward
  0      ResidualBegin                                  bf16 -> bf16
  1      LayerNorm                                      bf16 -> e4m3[current]
  2-3    MMT(weight e4m3[current]) + Add                e4m3[current] -> bf16 -> bf16                   mmt_add_fwd_fused
  4      DotProductAttention                            bf16 -> bf16|e4m3[current]
  5-7    MMT(weight e4m3[current]) + Add + ResidualEnd  bf16|e4m3[current] -> bf16 -> bf16 -> bf16      mmt_add_residual_fwd_fused
  8      ResidualBegin                                  bf16 -> bf16
  9      LayerNorm                                      bf16 -> e4m3[current]
  10-12  MMT(weight e4m3[current]) + Add + GELU         e4m3[current] -> bf16 -> bf16 -> e4m3[current]  mmt_add_gelu_fwd_fused
  13-15  MMT(weight e4m3[current]) + Add + ResidualEnd  e4m3[current] -> bf16 -> bf16 -> bf16           mmt_add_residual_fwd_fused

backward
  15     ResidualEnd                bf16 -> bf16
  11-14  Add + MMT + GELU + Add     bf16 -> e5m2[current] -> bf16 -> bf16 -> e5m2[current]  add_gelu_mmt_add_bwd_fused
  10     MMT                        e5m2[current] -> bf16
  8-9    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                                    make_extra_layernorm_bwd_fused
  7      ResidualEnd                bf16 -> bf16
  5-6    Add + MMT                  bf16 -> e5m2[current] -> bf16                           mmt_add_bwd_fused
  4      DotProductAttention        bf16 -> bf16
  2-3    Add + MMT                  bf16 -> e5m2[current] -> bf16                           mmt_add_bwd_fused
  0-1    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                                    make_extra_layernorm_bwd_fused

inference
  0      ResidualBegin                                  bf16 -> bf16
  1      LayerNorm                                      bf16 -> e4m3[current]
  2-3    MMT(weight e4m3[current]) + Add                e4m3[current] -> bf16 -> bf16                   mmt_add_inf_fused
  4      DotProductAttention                            bf16 -> bf16|e4m3[current]
  5-7    MMT(weight e4m3[current]) + Add + ResidualEnd  bf16|e4m3[current] -> bf16 -> bf16 -> bf16      mmt_add_residual_inf_fused
  8      ResidualBegin                                  bf16 -> bf16
  9      LayerNorm                                      bf16 -> e4m3[current]
  10-12  MMT(weight e4m3[current]) + Add + GELU         e4m3[current] -> bf16 -> bf16 -> e4m3[current]  mmt_add_gelu_inf_fused
  13-15  MMT(weight e4m3[current]) + Add + ResidualEnd  e4m3[current] -> bf16 -> bf16 -> bf16           mmt_add_residual_inf_fused"""

_GPT_NONE = """\
16 ops, 2 segments, recipe none, activations bf16

forward
  0      ResidualBegin                         bf16 -> bf16
  1      LayerNorm                             bf16 -> bf16
  2-3    MMT(weight bf16) + Add                bf16 -> bf16 -> bf16          mmt_add_fwd_fused
  4      DotProductAttention                   bf16 -> bf16
  5-7    MMT(weight bf16) + Add + ResidualEnd  bf16 -> bf16 -> bf16 -> bf16  mmt_add_residual_fwd_fused
  8      ResidualBegin                         bf16 -> bf16
  9      LayerNorm                             bf16 -> bf16
  10-12  MMT(weight bf16) + Add + GELU         bf16 -> bf16 -> bf16 -> bf16  mmt_add_gelu_fwd_fused
  13-15  MMT(weight bf16) + Add + ResidualEnd  bf16 -> bf16 -> bf16 -> bf16  mmt_add_residual_fwd_fused

backward
  15     ResidualEnd                bf16 -> bf16
  11-14  Add + MMT + GELU + Add     bf16 -> bf16 -> bf16 -> bf16 -> bf16  add_gelu_mmt_add_bwd_fused
  10     MMT                        bf16 -> bf16
  8-9    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                  make_extra_layernorm_bwd_fused
  7      ResidualEnd                bf16 -> bf16
  5-6    Add + MMT                  bf16 -> bf16 -> bf16                  mmt_add_bwd_fused
  4      DotProductAttention        bf16 -> bf16
  2-3    Add + MMT                  bf16 -> bf16 -> bf16                  mmt_add_bwd_fused
  0-1    LayerNorm + ResidualBegin  bf16 -> bf16 -> bf16                  make_extra_layernorm_bwd_fused

inference
  0      ResidualBegin                         bf16 -> bf16
  1      LayerNorm                             bf16 -> bf16
  2-3    MMT(weight bf16) + Add                bf16 -> bf16 -> bf16          mmt_add_inf_fused
  4      DotProductAttention                   bf16 -> bf16
  5-7    MMT(weight bf16) + Add + ResidualEnd  bf16 -> bf16 -> bf16 -> bf16  mmt_add_residual_inf_fused
  8      ResidualBegin                         bf16 -> bf16
  9      LayerNorm                             bf16 -> bf16
  10-12  MMT(weight bf16) + Add + GELU         bf16 -> bf16 -> bf16 -> bf16  mmt_add_gelu_inf_fused
  13-15  MMT(weight bf16) + Add + ResidualEnd  bf16 -> bf16 -> bf16 -> bf16  mmt_add_residual_inf_fused"""


FROZEN = [
    pytest.param(mlp, DelayedScaling(), _MLP_DELAYED, id="mlp-delayed"),
    pytest.param(mlp, Float8CurrentScaling(), _MLP_CURRENT, id="mlp-current"),
    pytest.param(mlp, None, _MLP_NONE, id="mlp-none"),
    pytest.param(gpt, DelayedScaling(), _GPT_DELAYED, id="gpt-delayed"),
    pytest.param(gpt, Float8CurrentScaling(), _GPT_CURRENT, id="gpt-current"),
    pytest.param(gpt, None, _GPT_NONE, id="gpt-none"),
]


@pytest.mark.parametrize(("make", "recipe", "text"), FROZEN)
def test_a_block_is_explained(make, recipe: Recipe | None, text: str) -> None:
    assert explained(make(), recipe) == text


def test_explaining_changes_nothing_and_runs_nothing() -> None:
    model = gpt()
    text = explained(model, DelayedScaling())
    assert explained(model, DelayedScaling()) == text and not any("scaling" in name for name in model.state_dict())


def test_gradients_that_nobody_wants() -> None:
    lines = explained(mlp().requires_grad_(False), DelayedScaling()).splitlines()
    assert "  0    LayerNorm               bf16 -> bf16" in lines
    lines = explained(mlp(), DelayedScaling(), x_grad=False).splitlines()
    assert "  0    LayerNorm               bf16 -> none" in lines


def test_a_widened_recipe() -> None:
    first, *lines = explained(mlp(), HighPrecision(lowest="float32")).splitlines()
    assert first == "6 ops, 1 segments, recipe HighPrecision(lowest='float32'), activations fp32"
    assert "  0    LayerNorm                      bf16|fp32 -> fp32" in lines


def test_an_output_in_8_bits_is_shown_as_it_leaves() -> None:
    lines = ops.Sequential(ops.GELU(), ops.Quantize()).explain(torch.zeros(32, 64), recipe=Float8CurrentScaling()).splitlines()
    assert lines.count("  1  Quantize  e4m3[current] -> e4m3[current]") == 2  # forward and inference


def test_a_widened_output_is_shown_as_it_leaves() -> None:
    lines = explained(Sequential(Linear(64, 64, bias=False)), HighPrecision(lowest="float32")).splitlines()
    assert lines.count("  0  MMT(weight fp32)  bf16|fp32 -> fp32") == 2  # forward and inference


def test_parts_of_a_model() -> None:
    """A module that is not ours ends the text; one with hooks is named."""
    text = Sequential(Linear(64, 64), nn.Tanh(), Linear(64, 64)).explain(torch.zeros(3, 64))
    assert text.endswith("\n\nTanh, a module of its own; what follows is not explained")
    hooked = Sequential(Linear(64, 64), Dropout(0.1), Linear(64, 64))
    hooked[1].register_forward_hook(lambda *args: None)
    parts = hooked.explain(torch.zeros(3, 64)).split("\n\nDropout, called with its hooks\n")
    assert len(parts) == 2 and parts[0].startswith("2 ops") and parts[1].startswith("1 ops") and "\n\n2 ops" in parts[1]
