"""``Tokenizer`` against transformers on the same directory, and what it says of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, save_tokenizer, trained
from tokenizers import models
from transformers import AutoTokenizer

from fusible.errors import ArgumentError, CheckpointError, MissingModuleError
from fusible.models.text import Tokenizer
from fusible.models.text.libraries import library

TEXTS = ["", "Hello, world!", "  two  spaces\n\tand more", "naïve 日本 🙂", "a<s>b</s> <|im_start|>user", "it 's . fine"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_and_writes_as_transformers_does(tmp_path: Path, kind: str) -> None:
    theirs, ours = save_tokenizer(tmp_path, kind), Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            tokens = ours.encode(text, special)
            assert tokens == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(tokens, skip) == theirs.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.vocabulary == len(theirs)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.stop_tokens == {theirs.eos_token_id}
    assert ours.token_of("<s>") == theirs.bos_token_id and ours.token_of("none of them") is None and ours.token_text(theirs.bos_token_id) == "<s>"


@given(text=st.text())
def test_bytes_come_back_as_they_were(text: str) -> None:
    ours = Tokenizer(trained())
    assert ours.decode(ours.encode(text), skip_special=False) == text


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("ends", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_what_stands_around_a_text_is_what_the_file_says(tmp_path: Path, kind: str, ends: dict) -> None:
    save_tokenizer(tmp_path, kind)
    change(tmp_path / "tokenizer_config.json", **ends)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    assert ours.encode("Hello") == theirs("Hello")["input_ids"]
    assert ours.encode("Hello", special=False) == theirs("Hello", add_special_tokens=False)["input_ids"]


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text() if path.exists() else "{}"), **values}))


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    change(tmp_path / "config.json", eos_token_id=7)
    assert Tokenizer.from_folder(tmp_path).stop_tokens == {2, 7}
    change(tmp_path / "generation_config.json", eos_token_id=[4, 5])
    assert Tokenizer.from_folder(tmp_path).stop_tokens == {2, 4, 5}
    change(tmp_path / "generation_config.json", eos_token_id=None)
    change(tmp_path / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert Tokenizer.from_folder(tmp_path).stop_tokens == {4}


def test_padding_and_truncation_of_the_file_are_left_out(tmp_path: Path) -> None:
    made = trained()
    made.enable_truncation(2)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("the class of all") == trained().encode("the class of all").ids


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", r"tokenizer.json: expected a tokenizer, got what the library refuses \("),
        ("tokenizer.json", None, "tokenizer.json: expected a file that can be read, got No such file"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: expected an object, got a list"),
        ("generation_config.json", '{"a": 1, "a": 2}', "generation_config.json: expected JSON, got 'a' twice"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_half_a_character_is_one_sentence() -> None:
    with pytest.raises(ArgumentError, match="the text: expected characters of Unicode, got half of a surrogate pair"):
        Tokenizer(trained()).encode("a\ud83d")


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="<unk>"),
        models.WordPiece({"a": 0}, unk_token="<unk>"),
        models.BPE({"a": 0}, [], unk_token="<unk>"),
        models.Unigram([("a", -1.0)]),
    ],
)
def test_what_the_vocabulary_lacks_is_one_sentence(model: models.Model) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(model))
    assert tokenizer.encode("a") == tokenizer.encode_places("a")[0] == [0]
    for encode in (tokenizer.encode, tokenizer.encode_places):
        with pytest.raises(ArgumentError, match=r"the text: expected characters that the vocabulary has tokens for, got what the library refuses \("):
            encode("z")


def test_a_missing_package_is_one_sentence() -> None:
    said = r"the package fusible_none: expected an installed package, got none; install fusible\[models\]\."
    with pytest.raises(MissingModuleError, match=said) as caught:
        library("fusible_none")
    assert caught.value.name == "fusible_none"
