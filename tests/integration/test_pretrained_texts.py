"""Texts that models of ``from_pretrained`` write of what they encode: T5 and Whisper, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import WORDS
from pretrained_models import ENCODER_DECODERS, drawn, given, reference, saved
from test_evaluate import with_tokenizer
from test_pretrained import FP32, close

from fusible.cli import main
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.models import EncoderDecoderModel, from_config, from_pretrained, save_pretrained
from fusible.models.checkpoints import open_checkpoint, write_checkpoint
from fusible.models.generation import Sampling
from fusible.models.text import Tokenizer
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch import KVCache

COUNT = 32
ONE = torch.ones(2, dtype=torch.int32)


def model_of(name: str, folder: Path, recipe: Any = None) -> EncoderDecoderModel:
    model = from_pretrained(saved(name, folder), recipe)
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    (inputs, _), theirs = given(name)
    theirs.pop("decoder_input_ids")
    options = {"do_sample": False, "max_new_tokens": COUNT, "min_new_tokens": COUNT}
    with torch.no_grad():
        wanted = reference(name).generate(**theirs, **options)[:, -COUNT:]
    assert model_of(name, tmp_path).generate(inputs, COUNT) == wanted.tolist()


@pytest.mark.parametrize("held", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_tokens_one_by_one_give_the_logits_of_all_at_once(name: str, held: str, tmp_path: Path) -> None:
    """A text that rests, prompts of different lengths, and pieces of several tokens."""
    model, (inputs, tokens) = model_of(name, tmp_path, WEIGHT_FORMATS[held]), given(name)[0]
    with torch.inference_mode():
        wanted = model(inputs, tokens)
        memory = model.remember(model.encode(inputs))
        cache, read = KVCache(2, 24, dtype=model.dtype), [0, 0]
        for counts in ((5, 2), (0, 3), (1, 1), (4, 0), (1, 1)):
            pieces = [row[start : start + count] for row, start, count in zip(tokens, read, counts, strict=True)]
            lengths = torch.tensor(counts, dtype=torch.int32)
            logits = model.next_logits(torch.cat(pieces), lengths, cache, memory)
            cache.advance(lengths)
            read = [start + count for start, count in zip(read, counts, strict=True)]
            for row, count in enumerate(counts):
                if count:
                    close(logits[row], wanted[row, read[row] - 1], FP32)
    assert logits.dtype is torch.float32


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_padding_of_a_text_takes_no_part(name: str, tmp_path: Path) -> None:
    model, (inputs, tokens) = model_of(name, tmp_path), given(name)[0]
    with torch.no_grad():
        padded = model(inputs, tokens, None, torch.tensor([24, 9]))
        whole = model(inputs, tokens)
    close(padded[0], whole[0], FP32)
    close(padded[1, :9], whole[1, :9], FP32)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_text_is_the_same_in_any_company(name: str, tmp_path: Path) -> None:
    """Sampled by a seed of its own, behind a prompt, until a token that ends it."""
    model, (inputs, _) = model_of(name, tmp_path), given(name)[0]
    samplings = [Sampling(0.8, seed=3), Sampling(1.2, top_k=20, repetition_penalty=1.3, seed=4)]
    prompts = [[1, 7, 9], [1]]
    both = model.generate(inputs, 12, samplings, prompts=prompts)
    assert [len(text) for text in both] == [12, 12] and both[0] != both[1]
    assert model.generate(inputs[1:], 12, samplings[1], prompts=prompts[1:]) == both[1:]
    last = both[0][4]
    stopped = model.generate(inputs, 12, samplings, prompts=prompts, stop_tokens=[last])
    assert stopped == [text[: text.index(last) + 1] if last in text else text for text in both]


def test_a_text_ends_where_the_configuration_says(tmp_path: Path) -> None:
    (features, _), _ = given("whisper")
    text = model_of("whisper", tmp_path).generate(features, 8)[0]
    config = {**reference("whisper").config.to_dict(), "eos_token_id": [text[3], WORDS - 1]}
    model = from_config(config)
    assert isinstance(model, EncoderDecoderModel) and model.blueprint.stop == (text[3], WORDS - 1)
    model.load_state_dict(model_of("whisper", tmp_path / "again").state_dict())
    assert model.eval().generate(features, 8)[0] == text[: text.index(text[3]) + 1]


def test_what_the_configuration_keeps_from_a_text_is_not_in_it(tmp_path: Path) -> None:
    """What would be chosen, kept from being the first or from being anywhere, as transformers does it; and a token of a larger vocabulary."""
    (features, _), theirs = given("whisper")
    theirs.pop("decoder_input_ids")
    model = model_of("whisper", tmp_path)
    plain = model.generate(features, 12)
    first, other = plain[0][0], next(token for token in plain[0] if token != plain[0][0])
    suppressed = {"suppress_tokens": [other], "begin_suppress_tokens": [first, 51000]}
    made = from_config({**reference("whisper").config.to_dict(), **suppressed})
    assert isinstance(made, EncoderDecoderModel)
    made.load_state_dict(model.state_dict())
    found = made.eval().generate(features, 12)
    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "suppress_tokens": [other], "begin_suppress_tokens": [first]}
        wanted = reference("whisper").generate(**theirs, **options)[:, -12:].tolist()
    assert found == wanted and found != plain
    assert all(text[0] != first and other not in text for text in found)


def test_a_new_whisper_has_transformers_sinusoids(tmp_path: Path) -> None:
    model = from_config(reference("whisper").config.to_dict())
    positions = dict(model.stored_parameters())["model.encoder.embed_positions.weight"]
    torch.testing.assert_close(positions, type(reference("whisper"))(reference("whisper").config).model.encoder.embed_positions.weight.detach())
    assert not positions.requires_grad


def test_biases_of_keys_stay_none(tmp_path: Path) -> None:
    """No checkpoint has them, so no step may change them: else what is saved would be another model."""
    model, (inputs, tokens) = from_pretrained(saved("whisper", tmp_path), trainable=True), given("whisper")[0]
    biases = [p for name, p in model.named_parameters() if p.shape in ((192,), (128,)) and name.endswith("bias")]
    assert len(biases) == 2 + 2 + 2
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(2):
        model(inputs, tokens).square().mean().backward()
        optimizer.step()
    for bias in biases:
        parts = bias.detach().split(64)
        assert not parts[-2].any() and all(part.any() for part in (*parts[:-2], parts[-1]))


def test_calls_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    model, (features, tokens) = model_of("whisper", tmp_path), given("whisper")[0]
    refusals: list[tuple[Any, type[Exception], str]] = [
        (lambda: model(features, tokens[:1]), ShapeError, r"tokens of a decoder: expected \[2, seq\], a row for each of the inputs, got \[1, 24\]"),
        (lambda: model(features[:, :, :40], tokens), ShapeError, r"features of a model that hears: expected \[batch, 16, 48\], got \[2, 16, 40\]"),
        (lambda: model(features, tokens, ONE), ArgumentError, "a call of a model that hears: expected features alone, got seq_lens"),
        (lambda: model(features, drawn(2, 65)), ArgumentError, "a sequence: expected at most 64 tokens, got 65"),
        (lambda: model.generate(features, 64), ArgumentError, "prompts and max_tokens: expected at most 64 tokens, the context of the model, got 65"),
        (lambda: model.generate(features, 0), ArgumentError, "max_tokens: expected an integer of at least 1, got 0"),
        (lambda: model.generate(features, 2.5), DTypeError, "max_tokens: expected an integer of at least 1, got 2.5"),
        (lambda: model.generate([1, 2], 4), DTypeError, "inputs of generate: expected a list of tokens for each text, got 1"),
        (
            lambda: model.generate(features, 4, prompts=["ab", "c"]),
            DTypeError,
            "prompts of generate: expected a list of tokens for each text, got 'ab'",
        ),
        (lambda: model.generate(features, 4, 0.5), DTypeError, "sampling: expected a Sampling, or one for each prompt, got a float"),
        (lambda: model.generate(features, 4, prompts=[[1]]), ShapeError, "prompts: expected 2, as there are inputs, got 1"),
        (lambda: model.generate(features, 4, [Sampling(0)] * 3), ShapeError, "sampling: expected 2, as there are inputs, got 3"),
        (lambda: model.generate(features, 4, prompts=[[1], []]), ArgumentError, "a prompt: expected at least one token, got none"),
        (lambda: model.generate(features, 4, prompts=[[1], [128]]), ArgumentError, "a prompt: expected tokens from 0 to 127, got 128"),
    ]
    for call, error, message in refusals:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


T5S = [name for name in ENCODER_DECODERS if name.startswith("t5")]


@pytest.mark.parametrize("name", T5S)
def test_padding_of_what_is_encoded_takes_no_part(name: str, tmp_path: Path) -> None:
    """As lengths, as a mask, and as lists of tokens."""
    model, (inputs, tokens) = model_of(name, tmp_path), given(name)[0]
    lengths = torch.tensor([9, 17])
    mask = torch.arange(17) < lengths[:, None]
    options = {"do_sample": False, "max_new_tokens": COUNT, "min_new_tokens": COUNT}
    with torch.no_grad():
        wanted = reference(name)(inputs, attention_mask=mask.long(), decoder_input_ids=tokens).logits
        close(model(inputs, tokens, lengths), wanted, FP32)
        close(model(inputs, tokens, mask), wanted, FP32)
        texts = reference(name).generate(inputs, attention_mask=mask.long(), **options)[:, -COUNT:].tolist()
    assert model.generate(inputs, COUNT, seq_lens=lengths) == texts
    assert model.generate([inputs[0, :9].tolist(), inputs[1].tolist()], COUNT) == texts
    assert model.generate([inputs[0, :9].tolist()], COUNT) == texts[:1]


def test_a_head_of_its_own_takes_hidden_states_as_they_are(tmp_path: Path) -> None:
    """Files of T5 1.1 say ``tie_word_embeddings``, and mean both."""
    checkpoint = open_checkpoint(saved("t5_gated", tmp_path))
    config = {key: value for key, value in checkpoint.config.items() if key != "scale_decoder_outputs"} | {"tie_word_embeddings": False}
    head = torch.randn(WORDS, 64, generator=torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "own", config, {**{name: checkpoint.tensor(name) for name in checkpoint.names}, "lm_head.weight": head})
    model, (ours, theirs) = from_pretrained(tmp_path / "own"), given("t5_gated")
    with torch.no_grad():
        hidden = reference("t5_gated")(**theirs, output_hidden_states=True).decoder_hidden_states[-1]
        close(model(*ours), hidden @ head.T, FP32)
    save_pretrained(model, tmp_path / "again")
    assert torch.equal(open_checkpoint(tmp_path / "again").tensor("lm_head.weight"), head)


def test_lists_of_tokens_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    model, inputs = model_of("t5", tmp_path), drawn(2, 17)
    with pytest.raises(ShapeError, match=r"tokens of an encoder: expected \[batch, seq\], or \[tokens\] with seq_lens, got \[17\]"):
        model.encode(inputs[0])
    with pytest.raises(ShapeError, match=r"inputs of an encoder with a decoder: expected \[batch, seq\], got \[17\]"):
        model.encode(inputs[0], torch.tensor([17]))
    with pytest.raises(ShapeError, match="token_types: expected none"):
        model.inputs(inputs, None, inputs)
    with pytest.raises(ArgumentError, match="each of the inputs: expected at least one token, got none"):
        model.generate([[1], []], 4)
    assert model.generate([], 4) == []


def test_the_command_encodes_a_prompt_and_prints_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(saved("t5", tmp_path), WORDS - 29)
    tokenizer, model = Tokenizer.from_folder(folder), model_of("t5", tmp_path)
    options = ["generate", str(folder), "--temperature", "0", "--max-tokens", "8"]
    texts = [tokenizer.decode(text) for text in model.generate([tokenizer.encode(prompt) for prompt in ("abc", "hello")], 8)]
    assert all(len(text) > 3 for text in texts) and texts[0] != texts[1]
    assert main([*options, "--prompt", "abc", "--prompt", "hello"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"[1]\n{texts[0]}\n[2]\n{texts[1]}\n" and "16 tokens in" in printed.err and "of 8 that were encoded" in printed.err
    assert main([*options, "--prompt", "abc", "--prompt", "hello", "--executor", "xla"]) == 0
    assert capsys.readouterr().out == printed.out
    assert main([*options, "--prompt", "abc", "--format", "mxfp8"]) == 0
    capsys.readouterr()
    assert main([*options, "--prompt", "abc", "--stop", texts[0][3]]) == 0
    assert capsys.readouterr().out == texts[0][: texts[0].index(texts[0][3])] + "\n"
    assert main([*options, "--prompt", "abc", "--chat"]) == 2
    refused = "--chat: expected a model that goes on from its prompt, got one that encodes the prompt; leave it out.\n"
    assert capsys.readouterr().err == refused
    assert main([*options, "--prompt", ""]) == 2
    assert capsys.readouterr().err == "--prompt: expected at least one token, got none; give a text to encode.\n"
