"""Gradient checkpointing of converted models: the forward that backward repeats computes what the first one did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import BY_NAME, OPERAND, RECIPES, Family, transformers

import fusible

_BART = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))}
_BART |= {"vocab_size": 128, "d_model": 64, "dropout": 0.0, "decoder_start_token_id": 2, "max_position_embeddings": 64}
BART = Family("bart", "BartForConditionalGeneration", "BartConfig", _BART, ("q_proj", "v_proj"), "encoder-decoder")


def steps(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of two steps, and all gradients of the second."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.train()(**inputs).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found), torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("family", [BY_NAME["t5"], BART, BY_NAME["whisper"], BY_NAME["bert"], BY_NAME["llama"]], ids=lambda family: family.name)
def test_a_model_whose_forward_is_repeated_trains_as_one_that_keeps_all(family: Family, recipe: str, reentrant: bool) -> None:
    inputs = family.inputs()
    losses, gradients = steps(fusible.convert(family.make(), RECIPES[recipe]), inputs)
    model = fusible.convert(family.make(), RECIPES[recipe])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found, repeated = steps(model, inputs)
    # T5 keeps no keys when it is checkpointed, by which sums of fp32 have another order. Gradients that several layers give to a tensor are summed in
    # another order, too, by which single codes of 8 bits may turn, each by OPERAND: a thousandth of them, at most.
    assert torch.allclose(found, losses, rtol=16 * torch.finfo(torch.float32).eps)
    assert (repeated - gradients).norm() < OPERAND[recipe] / 1000**0.5 * gradients.norm()


def test_layers_of_models_that_are_called_by_themselves_compute_alone() -> None:
    x = torch.randn(2, 5, 64)
    model, other = fusible.convert(BY_NAME["bert"].make(), fusible.HighPrecision("float32")), BY_NAME["bert"].make()
    with torch.no_grad():
        for mine, theirs in zip(model.bert.encoder.layer, other.bert.encoder.layer, strict=True):
            assert torch.allclose(mine.intermediate(x), theirs.intermediate(x), atol=1e-5)
            assert torch.allclose(mine.intermediate.dense(x), theirs.intermediate.dense(x), atol=1e-5)
            assert torch.allclose(mine.feed_forward_chunk(x), theirs.feed_forward_chunk(x), atol=1e-5)
    assert isinstance(model, transformers.BertForMaskedLM)
