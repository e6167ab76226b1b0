"""Attention, ``seq_lens`` and a cache in ``ops.Sequential``: what ``fusible.Sequential`` makes of the same modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusible import DelayedScaling, KVCache, LayerNorm, Linear, MultiHeadedSelfAttention, MXFP8BlockScaling, Recipe, Residual, Sequential, autocast
from fusible.errors import ArgumentError, ShapeError
from fusible.pytorch import ops

WIDTH = 8
RECIPES = [
    pytest.param(None, id="none"),
    pytest.param(DelayedScaling(amax_history_len=3), id="delayed"),
    pytest.param(MXFP8BlockScaling(), id="mxfp8"),
]
FORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    "[batch, seq, hidden]": ((3, 5, WIDTH), None),
    "one sequence": ((7, WIDTH), None),
    "concatenated": ((12, WIDTH), torch.tensor([5, 0, 7])),
    "padded": ((3, 5, WIDTH), torch.tensor([5, 1, 3])),
    "masked": ((2, 3, WIDTH), torch.tensor([[True, True, False], [True, False, False]])),
}


def modules(causal: bool = False) -> list[nn.Module]:
    torch.manual_seed(1)
    attention = MultiHeadedSelfAttention(WIDTH, 2, causal=causal, rope_base=10000.0)
    return [Residual(LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), attention, Linear(WIDTH, WIDTH)), Linear(WIDTH, WIDTH)]


def run(model: nn.Module, x: Tensor, recipe: Recipe | None, *options: Any, **more: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf, *options, **more)
    y.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return [y.detach(), leaf.grad, *grads]  # type: ignore[list-item]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_both_containers_read_a_batch_alike(form: str, recipe: Recipe | None) -> None:
    shape, lens = FORMS[form]
    ours, theirs = Sequential(*modules()), ops.Sequential(*modules())
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert equal(run(theirs, x, recipe, seq_lens=lens), run(ours, x, recipe, lens))


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    """It was one sequence of all rows: each saw those before it."""
    model = ops.Sequential(*modules())
    x = torch.randn(3, 5, WIDTH)
    torch.testing.assert_close(model(x), torch.stack([model(part) for part in x]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hooked", [False, True], ids=["open", "hooked"])
@pytest.mark.parametrize("outer", [Sequential, ops.Sequential])
@pytest.mark.parametrize("inner", [Sequential, ops.Sequential])
def test_a_batch_goes_through_nested_containers_and_modules_of_others(outer: type, inner: type, hooked: bool) -> None:
    x, lens = torch.randn(3, 5, WIDTH), torch.tensor([5, 1, 3])
    wanted = Sequential(*modules(), nn.Tanh())(x, lens)
    model = outer(inner(*modules()), nn.Tanh())
    if hooked:
        model[0].register_forward_hook(lambda *args: None)
    assert torch.equal(model(x, seq_lens=lens), wanted)


def test_extra_tensors_have_the_batchs_form() -> None:
    add, branch = ops.AddExtraInput(), ops.MakeExtraOutput()
    model, plain = ops.Sequential(add, *modules(), branch), Sequential(*modules())
    x, extra = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH, requires_grad=True)
    for lens in (None, torch.tensor([3, 1])):
        y, out = model(x, extra, seq_lens=lens)
        wanted = plain(x + extra, lens)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(out, wanted)
        (grad,) = torch.autograd.grad(y.square().sum(), extra)
        (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), extra)
        torch.testing.assert_close(grad, wanted_grad)


def test_generating_with_a_cache() -> None:
    model = ops.Sequential(*modules(causal=True))
    x, cache = torch.randn(2, 6, WIDTH), KVCache(2, 6, dtype=torch.float32)
    with torch.no_grad():
        parts = []
        for tokens in x.split([4, 1, 1], dim=1):
            parts.append(model(tokens, cache=cache))
            cache.advance([tokens.shape[1]] * 2)
        torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"no_grad"):
        model(x, cache=cache)


@pytest.mark.parametrize("lens", [None, torch.tensor([5, 1, 3])], ids=["whole", "padded"])
def test_it_is_traced(lens: Tensor | None) -> None:
    x = torch.randn(3, 5, WIDTH)
    compiled = torch.compile(ops.Sequential(*modules()), backend="aot_eager", fullgraph=True)
    wanted = run(ops.Sequential(*modules()), x, None, seq_lens=lens)
    for a, b in zip(run(compiled, x, None, seq_lens=lens), wanted, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_no_batch_is_refused_beside_attention_alone() -> None:
    x = torch.randn(2, 3, 4, WIDTH)
    assert ops.Sequential(ops.Linear(WIDTH, WIDTH))(x).shape == x.shape
    for model, lens in ((ops.Sequential(*modules()), None), (ops.Sequential(ops.Linear(WIDTH, WIDTH)), torch.tensor([2, 3]))):
        with pytest.raises(
            ShapeError, match=r"^x.*: expected a tensor \[tokens, hidden\] or \[batch, seq, hidden\], got shape \[2, 3, 4, 8\]; .*\.$"
        ):
            model(x, seq_lens=lens)
