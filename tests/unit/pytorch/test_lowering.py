"""``pytorch.lowering``: every op in its table gives in a program of ``torch.export`` what it gives by Fusible's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible import ops
from fusible.pytorch import ops as operations
from fusible.pytorch.lowering.registry import LOWERINGS
from fusible.tex.activations import ACTIVATIONS

BATCH, TOKENS, HEADS, WIDTH = 2, 6, 4, 16
HIDDEN = HEADS * WIDTH


class Each(nn.Module):
    """The outputs of several calls on one input."""

    def __init__(self, **calls: nn.Module | Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({name: call for name, call in calls.items() if isinstance(call, nn.Module)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: module(x) for name, module in self.inside.items()}


class Masked(nn.Module):
    """Attention with a mask that hides the first key from all but its own query."""

    def __init__(self, mask: torch.Tensor, **options: object) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.attention = fusible.Sequential(fusible.DotProductAttention(HEADS, WIDTH, causal=False, mask=True, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, extra_inputs=[self.mask])


class Across(nn.Module):
    """Attention over keys and values of another length, and a mask."""

    def __init__(self, kv: torch.Tensor, *mask: torch.Tensor, **options: Any) -> None:
        super().__init__()
        self.register_buffer("kv", kv)
        self.mask = mask
        self.attention = fusible.Sequential(fusible.CrossAttention(3 * HEADS, WIDTH, mask=bool(mask), **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kv = self.kv if x.ndim == 3 else self.kv[0]
        return self.attention(x, extra_inputs=[kv, *self.mask])


def _attention(**options: object) -> fusible.DotProductAttention:
    return fusible.DotProductAttention(HEADS, WIDTH, **options)


def _latent(key_width: int, rope_width: int, **options: Any) -> fusible.Sequential:
    attention = fusible.LatentAttention(HEADS, key_width, rope_width, **options)
    own = attention.groups * (key_width + (attention.value_width or 0))
    return fusible.Sequential(fusible.Linear(3 * HIDDEN, HEADS * (key_width + rope_width) + rope_width + own), attention)


def _seen() -> torch.Tensor:
    seen = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    seen[..., 1:, 0] = False
    return seen


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: _attention(),
    "full": lambda: _attention(causal=False),
    "grouped": lambda: fusible.Sequential(fusible.Linear(3 * HIDDEN, 2 * HIDDEN), _attention(groups=HEADS // 2)),
    "rope": lambda: _attention(rope_base=100.0, scale=0.3),
    "rope_in_part": lambda: _attention(rope_base=100.0, rope_width=8, rope_factors=(1.0, 0.5, 0.25, 0.1)),
    "window": lambda: _attention(window_size=(2, 0)),
    "two_sided": lambda: _attention(causal=False, window_size=(2, 1)),
    "ahead": lambda: _attention(causal=False, window_size=(-1, 1)),
    "soft_cap": lambda: _attention(soft_cap=2.0, window_size=(3, 0)),
    "alibi": lambda: _attention(alibi=True),
    "alibi_full": lambda: _attention(causal=False, alibi=(0.5, 0.25, 0.125, 0.0625)),
    "mask": lambda: Masked(_seen()),
    "mask_of_numbers": lambda: Masked(torch.randn(1, HEADS, TOKENS, TOKENS), soft_cap=3.0),
    "latents": lambda: _latent(WIDTH, 4, groups=1, rope_interleaved=True),
    "rotated_key_of_all": lambda: _latent(7, 6, value_width=9, groups=2, rope_factors=(1.0, 0.5, 0.1), rope_scale=1.25),
    "rotated_key_of_all_full": lambda: _latent(WIDTH, 4, value_width=8, groups=2, causal=False),
    "across": lambda: Across(torch.randn(BATCH, 5, 6 * HIDDEN)),
    "across_groups": lambda: Across(torch.randn(BATCH, 5, 2 * WIDTH), groups=1, scale=0.5),
    "across_masked": lambda: Across(torch.randn(BATCH, 5, 6 * HIDDEN), torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5), soft_cap=3.0),
    "normed": lambda: fusible.Sequential(fusible.QKNorm(HEADS, WIDTH, zero_centered_gamma=True), _attention(rope_base=100.0)),
}
_GROUPS: dict[str, Any] = {"expert_bias": True, "groups": 4, "top_groups": 2, "scaling_factor": 2.5}
OTHERS: dict[str, Any] = {
    **{row.title: getattr(fusible, row.title, None) or getattr(operations, row.nvidias_title) for row in ACTIVATIONS},
    "interleaved": lambda: operations.SwiGLU(glu_interleave_size=8),
    "LayerNorm": lambda: fusible.LayerNorm(3 * HIDDEN),
    "RMSNorm": lambda: fusible.RMSNorm(3 * HIDDEN, eps=1e-2, zero_centered_gamma=True),
    "l2": operations.L2Normalization,
    "scale": lambda: operations.ConstantScale(0.7),
    "Dropout": lambda: fusible.Dropout(0.5),
    "residual": lambda: fusible.Residual(fusible.LayerNorm(3 * HIDDEN), fusible.Residual(fusible.Linear(3 * HIDDEN, 3 * HIDDEN))),
    "experts": lambda: fusible.Residual(fusible.MixtureOfExperts(3 * HIDDEN, 32, experts=4, top_k=2)),
    "experts_of_all": lambda: fusible.MixtureOfExperts(3 * HIDDEN, 32, experts=4, top_k=3, normalized=False, activation="geglu"),
    "experts_by_sigmoids": lambda: fusible.MixtureOfExperts(3 * HIDDEN, 32, 8, 4, score_function="sigmoid", **_GROUPS),
    "experts_in_groups": lambda: fusible.MixtureOfExperts(3 * HIDDEN, 32, 8, 2, groups=4, top_groups=2, router_dtype=torch.float32),
    "sigmoids_of_experts": lambda: fusible.MixtureOfExperts(3 * HIDDEN, 32, 4, 1, score_function="sigmoid", normalized=False),
}


@pytest.mark.parametrize("made", [ATTENTION, OTHERS], ids=["attention", "others"])
@pytest.mark.parametrize("shape", [(BATCH, TOKENS), (TOKENS,)], ids=["batch", "tokens"])
def test_a_program_computes_what_kernels_compute(made: dict[str, Callable[[], nn.Module]], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Each(**{name: make() for name, make in made.items()}).eval(), torch.randn(*shape, 3 * HIDDEN)
    for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())):
        tensor.data += 0.1 * torch.randn_like(tensor)
    with torch.no_grad():
        want, found = model(x), torch.export.export(model, (x,)).module()(x)
    for name, y in want.items():
        assert y.shape == found[name].shape and y.dtype is found[name].dtype
        # sums of at most 192 products, in another order
        torch.testing.assert_close(found[name], y, rtol=0, atol=3 * HIDDEN * 2**-23 * max(1.0, y.abs().max().item()), msg=name)


def test_the_cases_cover_the_table() -> None:
    torch.manual_seed(0)
    seen = set()
    for make in [*ATTENTION.values(), *OTHERS.values()]:
        for module in make().modules():
            seen |= {type(bound.op) for bound in getattr(module, "bound_ops", list)()}
    assert set(LOWERINGS) - seen == {ops.Identity, ops.MakeExtra, ops.AddExtra}


def test_half_precision_is_rounded_once_an_op() -> None:
    torch.manual_seed(0)
    model = fusible.Sequential(fusible.LayerNorm(HIDDEN), fusible.SwiGLU()).to(torch.bfloat16).eval()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        found, want = torch.export.export(model, (x,)).module()(x), model(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, want, rtol=2**-7, atol=2**-9)  # where fp32 lies between two numbers of bf16, by one of them


class Own(operations.BasicOperation):
    """An operation in plain torch."""

    def op_forward(self, ctx: object, input_: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ + 1

    def op_backward(self, ctx: object, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return grad_output, ()


def test_an_operation_without_a_lowering_is_named() -> None:
    model = fusible.Sequential(fusible.Linear(8, 8), Own()).eval()
    with pytest.raises(
        fusible.errors.ArgumentError, match=r"a model to export: expected operations with a lowering, got Own.*; export what is before"
    ):
        torch.export.export(model, (torch.randn(2, 8),))
