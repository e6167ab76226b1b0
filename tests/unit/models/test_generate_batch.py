"""``generate``: prompts as lists or as padded tensors, in one call."""

from __future__ import annotations

import pytest
import torch
from tiny_language_models import BrokenModel, TinyModel

from fusible.errors import ArgumentError, DTypeError, ShapeError, ValuesError
from fusible.models.generation import Request, Sampling, generate

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def test_lists_of_any_lengths(model: TinyModel) -> None:
    made = generate(model, PROMPTS, 6)
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        assert model.whole([*prompt, *tokens]).argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens
    assert generate(model, PROMPTS, 6, sequences=1, page_size=2) == made
    assert generate(model, [], 6) == []


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_not_seen(model: TinyModel, left: bool) -> None:
    rows = [[0] * (4 - len(prompt)) + prompt if left else prompt + [0] * (4 - len(prompt)) for prompt in PROMPTS]
    prompts = torch.tensor(rows)
    made = generate(model, PROMPTS, 6)
    stop = made[1][2]
    given = generate(model, prompts, 6, attention_mask=prompts != 0, stop_tokens=[stop], pad_token=255)
    wanted = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in made]
    assert isinstance(given, torch.Tensor) and given.dtype is torch.int64 and torch.equal(given[:, :4], prompts)
    assert given[:, 4:].tolist() == [tokens + [255] * (max(map(len, wanted)) - len(tokens)) for tokens in wanted]
    assert generate(model, torch.tensor([PROMPTS[0]]), 6)[:, 4:].tolist() == [made[0]]  # type: ignore[call-overload]


def test_a_sampling_for_each(model: TinyModel) -> None:
    samplings = [Sampling(seed=3), Sampling(0), Sampling(2.0, top_k=9, seed=4)]
    together = generate(model, PROMPTS, 8, samplings)
    assert together == [generate(model, [prompt], 8, one)[0] for prompt, one in zip(PROMPTS, samplings, strict=True)]


def test_mistakes_are_one_sentence(model: TinyModel) -> None:
    mask = torch.ones(1, 3)
    for error, said, call in [
        (ShapeError, "sampling: expected one, or 3 as there are prompts, got 1", lambda: generate(model, PROMPTS, 3, [Sampling()])),
        (ShapeError, r"prompts: expected int64 \[batch, seq\], got \[3\]", lambda: generate(model, torch.ones(3, dtype=torch.int64), 3)),
        (DTypeError, r"prompts: expected int64 \[batch, seq\]", lambda: generate(model, torch.ones(1, 3), 3)),
        (ShapeError, "attention_mask: expected", lambda: generate(model, torch.ones(1, 2, dtype=torch.int64), 3, attention_mask=mask)),
        (ArgumentError, "prompt: expected at least one token", lambda: generate(model, [[]], 3)),
        (DTypeError, "prompts of generate: expected a list of tokens for each text, got 1; give a list of such", lambda: generate(model, [1, 2], 3)),
        (DTypeError, "prompts of generate: expected a list of tokens for each text, got 'ab'; encode it", lambda: generate(model, ["ab"], 3)),
        (DTypeError, "prompts of generate: expected tokens, which are integers, got True", lambda: generate(model, [[True]], 3)),
        (DTypeError, "prompts of generate: expected tokens, which are integers, got 'a'", lambda: generate(model, [["a"]], 3)),
        (DTypeError, "prompt: expected tokens, which are integers, got 1.0", lambda: Request((1.0,), 3)),
        (DTypeError, "sampling: expected a Sampling, or one for each prompt, got a float; give", lambda: generate(model, PROMPTS, 3, 0.5)),
        (DTypeError, "sampling: expected a Sampling, .*, got a dict", lambda: generate(model, PROMPTS, 3, [{}] * 3)),
        (DTypeError, "sampling: expected a Sampling, .*, got a NoneType", lambda: Request((1,), 3, None)),
        (DTypeError, "max_tokens: expected an integer of at least 1, got 2.5; pass one", lambda: generate(model, PROMPTS, 2.5)),
        (DTypeError, "max_tokens: expected an integer of at least 1, got True; pass one", lambda: generate(model, PROMPTS, True)),
        (ArgumentError, "max_tokens: expected an integer of at least 1, got 0; pass one", lambda: generate(model, PROMPTS, 0)),
        (DTypeError, "logprobs: expected an integer of at least 0, got 'all'; pass one", lambda: Request((1,), 3, logprobs="all")),
        (DTypeError, "the model that generates: expected a model with .*, got a Linear without", lambda: generate(torch.nn.Linear(1, 1), [[1]], 3)),
        (ArgumentError, "capacity: expected at most 256", lambda: generate(model, [[1]], 256)),
        (ValuesError, "the model: expected finite logits, got NaN or infinity after prompt 1", lambda: generate(BrokenModel(poison=9), PROMPTS, 3)),
    ]:
        with pytest.raises(error, match=said):
            call()
