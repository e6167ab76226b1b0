"""Steps of a ``Trainer`` beside a plain training of transformers' model in torch: the same losses and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_models import EPS, LENGTHS, RATE, WORDS, checkpoint, corpus_of, new_model, options, plain_steps

from fusible.errors import ArgumentError, ShapeError
from fusible.models import LanguageModel, from_config, from_pretrained, save_pretrained
from fusible.models.training import Cosine, Processes, StepOptions, Trainer, pack
from fusible.models.training.trainer import HELD
from fusible.pytorch import DelayedScaling, Float8CurrentScaling, HighPrecision, MXFP8BlockScaling


def loaded(folder: Path, recipe: Any = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return from_pretrained(folder, recipe or HighPrecision(), dtype=dtype, trainable=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_packed_steps_are_those_of_transformers_on_each_document_by_itself(kind: str, tmp_path: Path) -> None:
    """In fp32. Adam divides by the root of the second moment, so a gradient that rounding dominates moves by up to the learning rate: losses are
    compared more closely than parameters."""
    windows = pack(corpus_of(LENGTHS), 32)
    trainer = Trainer(loaded(checkpoint(tmp_path, kind)), windows, options())
    reference = new_model(kind)
    found, wanted = [trainer.step() for _ in range(6)], plain_steps(reference, windows, options(), 6)
    assert found == pytest.approx(wanted, rel=64 * EPS * 32)
    save_pretrained(trainer.model, tmp_path / "trained")
    theirs = dict(reference.named_parameters())
    ours = dict(type(reference).from_pretrained(tmp_path / "trained").named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        off = (parameter - theirs[name]).abs()
        if name.endswith("c_attn.bias"):
            off[32:64] = 0.0  # of keys: the softmax does not depend on it, so its gradient is nothing but rounding
        assert off.max() < 0.01 * sum(RATE(step) for step in range(6)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_sum_to_the_gradient_of_the_batch(dtype: torch.dtype, tmp_path: Path) -> None:
    """Windows of which few tokens are learned among others: a mean of means would differ by much."""
    corpus = corpus_of(LENGTHS)
    corpus.learned[: len(corpus) // 2] = torch.rand(len(corpus) // 2, generator=torch.Generator().manual_seed(0)) < 0.1
    windows, folder = pack(corpus, 32), checkpoint(tmp_path)
    gradients, losses = [], []
    for micro_batch in (8, 2, 1):
        trainer = Trainer(loaded(folder, dtype=dtype), windows, options(8, micro_batch, clip=0.0))
        losses.append(trainer.step())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]))
    eps = EPS if dtype is torch.float32 else 2.0**-8
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=16 * eps)
    for gradient in gradients[1:]:
        assert gradient.dtype is torch.float32 and (gradient - gradients[0]).norm() < 16 * eps * gradients[0].norm()


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()], ids=lambda recipe: type(recipe).__name__)
def test_losses_in_8_bits_fall_as_those_of_bf16(recipe: Any, tmp_path: Path) -> None:
    windows, folder = pack(corpus_of(LENGTHS), 32), checkpoint(tmp_path)
    runs = []
    for of in (HighPrecision(), recipe):
        trainer = Trainer(loaded(folder, of, torch.bfloat16), windows, options())
        before = trainer.evaluate(windows)
        runs.append([trainer.step() for _ in range(30)])
        assert trainer.evaluate(windows) < before - 0.4
    # An operand of 8 bits is off by 2^-4 at most, and errors of products of some dozens average out; the losses agree to a few percent.
    assert runs[1] == pytest.approx(runs[0], rel=2.0**-5)


@pytest.mark.parametrize("moments", [name for name in HELD if name != "fp32"])
def test_losses_of_moments_in_few_bits_fall_as_those_of_fp32(moments: str, tmp_path: Path) -> None:
    windows, folder = pack(corpus_of(LENGTHS), 32), checkpoint(tmp_path)
    runs = []
    for held in ("fp32", moments):
        trainer = Trainer(loaded(folder, HighPrecision(), torch.bfloat16), windows, options(moments=held))
        runs.append([trainer.step() for _ in range(30)])
        assert {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} == {HELD[held][0]}
        assert {state["exp_avg_sq"].dtype for state in trainer.optimizer.state.values()} == {HELD[held][1]}
    assert runs[0][-1] < runs[0][0] - 0.4
    assert runs[1] == pytest.approx(runs[0], rel=2.0**-5)  # a moment is off by 2^-4 at most, to either side, and a step of it is averaged by the next


def test_a_new_model_learns_tokens_by_heart(tmp_path: Path) -> None:
    config = new_model().config.to_dict()
    windows = pack(corpus_of([33] * 4), 32)
    trainer = Trainer(from_config(config, HighPrecision(), seed=1), windows, StepOptions(4, 4, Cosine(2e-2, 5, 60), weight_decay=0.0))
    losses = [trainer.step() for _ in range(60)]
    assert losses[0] == pytest.approx(6.4, abs=0.6) and losses[-1] < 1.0


def test_a_loss_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    windows = pack(corpus_of(LENGTHS), 32)
    model = loaded(checkpoint(tmp_path))
    with torch.no_grad():
        model.head.weight[5, 5] = float("nan")
    trainer = Trainer(model, windows, options())
    before = {name: p.clone() for name, p in trainer.parameters.items()}
    with pytest.raises(ArgumentError, match=r"step 1: expected a finite loss.*; lower --lr"):
        trainer.step()
    assert (
        all(
            torch.equal(
                before[name],
                p,
            )
            or name.startswith("head")
            for name, p in trainer.parameters.items()
        )
        and trainer.done == 0
    )


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"batch": 0}, {"micro_batch": 3}, {"clip": -1.0}, {"weight_decay": float("nan")}, {"moments": "fp4"}):
        with pytest.raises(ArgumentError):
            options(**wrong)
    with pytest.raises(ArgumentError, match="parameters that require gradients"):
        Trainer(from_config(new_model().config.to_dict()).requires_grad_(False), pack(corpus_of(LENGTHS), 32), options())


def test_packed_tokens_need_their_lengths() -> None:
    model = from_config(new_model().config.to_dict())
    with pytest.raises(ShapeError, match=r"\[batch, seq\], or \[tokens\] with seq_lens"):
        model(torch.arange(3, 9))
    assert model(torch.arange(3, 9), torch.tensor([2, 4])).shape == (6, WORDS)


def test_windows_that_processes_cannot_share_out_are_refused_before_the_model_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, windows = Processes(), pack(corpus_of(LENGTHS), 32)
    monkeypatch.setattr(processes, "parts", 3)
    monkeypatch.setattr(processes, "lay_out", lambda model: pytest.fail("laid out"))
    with pytest.raises(ArgumentError, match=r"^batch of StepOptions: expected a multiple of the 3 processes that share it, got 4; choose another\.$"):
        Trainer(from_config(new_model().config.to_dict(), seed=1), windows, options(), processes)
