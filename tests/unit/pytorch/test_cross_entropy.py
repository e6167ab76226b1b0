"""``CrossEntropyLoss`` against the same formula of torch's own functions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusible
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.pytorch import cross_entropy

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 2.0**-52}
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "reduction": "sum", "ignore_index": 5},
    {"reduction": "none", "z_loss": 0.1, "ignore_index": 0},
    {"label_smoothing": 1.0},
]


def _drawn(dtype: torch.dtype, *leading: int, vocabulary: int = 300, spread: float = 4.0, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = (spread * torch.randn(*leading, vocabulary, generator=generator)).to(dtype)
    target = torch.randint(vocabulary, leading, generator=generator)
    return logits, torch.where(torch.rand(leading, generator=generator) < 0.2, ignore_index, target)


def _formula(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """torch's cross entropy, and the term of ``z_loss``, in float64."""
    x, y = logits.flatten(0, -2), target.flatten()
    losses = F.cross_entropy(x, y, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    losses = losses + torch.where(y == ignore_index, 0.0, z_loss * x.logsumexp(-1).square())
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (y != ignore_index).sum() if reduction == "mean" else losses.sum()


def _with_gradient(call: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    loss = call(x, target)
    weights = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    (loss * weights).sum().backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_loss_and_gradient_are_the_formulas(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, target = _drawn(dtype, 3, 7, ignore_index=options.get("ignore_index", -100))
    loss, grad = _with_gradient(fusible.CrossEntropyLoss(**options), logits, target)
    wanted, wanted_grad = _with_gradient(lambda x, y: _formula(x, y, **options), logits.double(), target)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and grad.dtype == dtype
    wide = min(EPS[torch.float32], EPS[dtype])
    torch.testing.assert_close(loss.double(), wanted, rtol=300 * wide, atol=300 * wide)
    # Each gradient is a difference of two numbers of at most its row's weight, and is rounded once.
    scale = wanted_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=EPS[dtype], atol=300 * wide * max(scale, 1e-3))


def test_blocks_of_rows_give_what_all_rows_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = _drawn(torch.float32, 50)
    loss = fusible.CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3)
    whole = _with_gradient(loss, logits, target)
    monkeypatch.setattr(cross_entropy, "_BLOCK", 7 * 300)
    for got, wanted in zip(_with_gradient(loss, logits, target), whole, strict=True):
        assert torch.equal(got, wanted)


def test_large_logits_neither_overflow_nor_lose_the_target() -> None:
    logits, target = _drawn(torch.float32, 20, spread=3e4)
    loss, grad = _with_gradient(fusible.CrossEntropyLoss(reduction="none"), logits, target)
    wanted, wanted_grad = _with_gradient(lambda x, y: _formula(x, y, reduction="none"), logits.double(), target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-2)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-5, atol=1e-5)


def test_a_row_that_does_not_count_may_hold_anything() -> None:
    logits, target = _drawn(torch.float32, 6)
    target[:] = torch.tensor([1, -100, 2, -100, 3, 4])
    poisoned = torch.where((target == -100)[:, None], torch.nan, logits)
    for got, wanted in zip(*(_with_gradient(fusible.CrossEntropyLoss(), x, target) for x in (poisoned, logits)), strict=True):
        assert torch.equal(got, wanted)
    assert fusible.CrossEntropyLoss()(logits, torch.full((6,), -100)).isnan() and F.cross_entropy(logits, torch.full((6,), -100)).isnan()


def test_it_is_traced_whole() -> None:
    logits, target = _drawn(torch.float32, 4, 5)
    loss = fusible.CrossEntropyLoss(z_loss=1e-2)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(_with_gradient(compiled, logits, target), _with_gradient(loss, logits, target), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fusible.CrossEntropyLoss(label_smoothing=1.5), ArgumentError, "label_smoothing .*: expected a number from 0 to 1"),
        (lambda: fusible.CrossEntropyLoss(z_loss=-1.0), ArgumentError, "z_loss .*: expected .*at least 0"),
        (lambda: fusible.CrossEntropyLoss(reduction="max"), ArgumentError, "reduction .*: expected 'mean', 'sum' or 'none'"),
        (
            lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([0, 3])),
            ArgumentError,
            "target.*: expected .*indices from 0 to 2.*got 3",
        ),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([0, -1])), ArgumentError, "got -1"),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3), torch.ones(2)), DTypeError, "target .*: expected an integer dtype"),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3).int(), torch.tensor([0, 1])), DTypeError, "logits.*: expected .*.*got int32"),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([0])), ShapeError, r"for each row .* got \[1\] for logits \[2, 3\]"),
        (lambda: fusible.CrossEntropyLoss()(None, torch.tensor([0])), DTypeError, "logits .*: expected a torch.Tensor"),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3).to_sparse(), torch.tensor([0, 1])), ArgumentError, "logits.*: expected"),
        (lambda: fusible.CrossEntropyLoss()(torch.ones(2, 3, device="meta"), torch.tensor([0, 1])), ArgumentError, "on meta, where the logits are"),
    ],
)
def test_what_it_cannot_take_is_said(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^.*{message}.*\\.$"):
        call()


def test_an_embedding_is_tied_to_the_output_by_its_weight() -> None:
    """One parameter, whose gradient is the sum of both ways."""
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(40, 16), fusible.Linear(16, 40, bias=False)
    head.weight = table.weight
    model = fusible.Sequential(table, fusible.Residual(fusible.LayerNorm(16), fusible.Linear(16, 16)), head)
    tokens = torch.randint(40, (2, 6))
    loss = fusible.CrossEntropyLoss()(model(tokens), tokens.roll(-1, 1))
    loss.backward()
    weight = table.weight.detach().double().requires_grad_()
    norm, inner = (model[1]._modules[name] for name in ("0", "1"))
    x = F.embedding(tokens, weight)
    y = x + F.linear(F.layer_norm(x, (16,), norm.weight.double(), norm.bias.double()), inner.weight.double(), inner.bias.double())  # type: ignore[union-attr]
    wanted = F.cross_entropy(F.linear(y, weight).flatten(0, 1), tokens.roll(-1, 1).flatten())
    wanted.backward()
    assert len({id(parameter) for parameter in model.parameters()}) == 5
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(table.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
