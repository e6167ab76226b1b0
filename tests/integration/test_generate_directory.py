"""``fusible generate`` and ``fusible serve`` on Hugging Face directories, with a tiny model in the place of the one that a directory has."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tiny_language_models import BrokenModel, SlowModel, TinyModel
from tiny_tokenizers import CHATML, save_tokenizer

from fusible.cli import main
from fusible.cli.generation import loading
from fusible.cli.generation.sizes import bytes_per_token, pages_within, parse_size
from fusible.cli.serving import server
from fusible.errors import ArgumentError
from fusible.models.generation import Sampling, generate
from fusible.models.text import ChatTemplate, TextStream, Tokenizer

GREEDY = ("--temperature", "0")
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}  # keys and values of a token take 512 bytes in fp32


class Loader:
    """In the place of ``load_language_model``."""

    def __init__(self, model: TinyModel) -> None:
        self.model, self.asked = model, []

    def __call__(self, folder: Path, format: str | None, device: torch.device, executor: str | None) -> TinyModel:
        assert device.type == "cpu"
        self.asked.append(format)
        return self.model


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader(TinyModel(600))
    monkeypatch.setattr(loading, "load_language_model", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tiny-model"
    save_tokenizer(place)
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def said(folder: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", str(folder), *options]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def made_of(folder: Path, prompt: str, count: int, sampling: Sampling) -> list[int]:
    """The tokens that follow, with one that ends a text: whether there is one hangs on the tokenizer, and so on the text that it was made of."""
    tokenizer = Tokenizer.from_folder(folder)
    (made,) = generate(TinyModel(600), [tokenizer.encode(prompt)], count, sampling, stop_tokens=tokenizer.stop_tokens)
    return list(made)


def continued(folder: Path, prompt: str, count: int, sampling: Sampling, chat: bool = False) -> str:
    tokenizer = Tokenizer.from_folder(folder)
    tokens, made = tokenizer.encode(prompt), made_of(folder, prompt, count, sampling)
    text = TextStream(tokenizer, (), () if chat else tokens)
    return "".join(text.push(token) for token in made if token not in tokenizer.stop_tokens) + text.finish()


def test_it_goes_on_from_a_prompt(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    text, report = said(folder, "--prompt", "The class", "--max-tokens", "30", *GREEDY, capsys=capsys)
    assert text == "The class" + continued(folder, "The class", 30, Sampling(0)) + "\n"
    count = len(made_of(folder, "The class", 30, Sampling(0)))
    assert report.startswith(f"{count} tokens in ") and ", from " in report and "; weights 0." in report and "cache 0." in report
    drawn, _ = said(folder, "--prompt", "The class", "--seed", "4", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01", capsys=capsys)
    assert drawn == "The class" + continued(folder, "The class", 200, Sampling(0.8, 40, 0.9, 0.01, seed=4)) + "\n"
    assert said(folder, "--format", "mxfp8", "--max-tokens", "1", capsys=capsys)
    assert loader.asked[0] is None and loader.asked[-1] == "mxfp8"


def test_prompts_of_different_lengths_are_continued_as_each_would_be_alone(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The class of all", "x", "naïve 日本", ""] + [f"number {i}" for i in range(20)]
    options = [word for prompt in prompts[:3] + prompts[4:] for word in ("--prompt", prompt)]
    together, _ = said(folder, *options, "--max-tokens", "20", *GREEDY, "--page-size", "4", capsys=capsys)
    alone = [prompt + continued(folder, prompt, 20, Sampling(0)) for prompt in prompts if prompt]
    assert together == "".join(f"[{i + 1}]\n{text}\n" for i, text in enumerate(alone))


def test_a_chat(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = said(folder, "--chat", "--system", "Be brief.", "--prompt", "Hello", "--max-tokens", "20", *GREEDY, capsys=capsys)
    rendered = ChatTemplate(CHATML).render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    assert text == continued(folder, rendered, 20, Sampling(0), chat=True) + "\n"


def test_stop_strings_and_what_the_directory_recommends(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 0, "do_sample": true, "eos_token_id": [2, 3]}')
    whole, _ = said(folder, "--prompt", "The class", "--max-tokens", "30", capsys=capsys)
    assert whole == "The class" + continued(folder, "The class", 30, Sampling(0)) + "\n"
    stop = whole[20:24]
    cut, _ = said(folder, "--prompt", "The class", "--max-tokens", "30", "--stop", "never comes", "--stop", stop, capsys=capsys)
    assert cut == whole[: whole.index(stop, 9)] + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens: expected at least 1, got 0"),
        (("--top-p", "1.5"), "--top-p: expected a number from 0 to 1, got 1.5"),
        (("--repetition-penalty", "0"), "--repetition-penalty: expected a positive number"),
        (("--stop", ""), "--stop: expected at least one character"),
        (("--prompt", ""), "--prompt: expected at least one token"),
        (("--chat",), "--prompt: expected at least one character"),
        (("--bytes", "3"), "--bytes: expected a run of 'fusible train', got a Hugging Face directory"),
        (("--executor", "tvm"), "--executor: expected eager or xla, got 'tvm'; name one of these."),
        (("--recipe", "delayed"), "--recipe: expected a run of 'fusible train', got a Hugging Face directory"),
        (("--format", "int9"), "--format: expected one of bf16, fp8, "),
        (("--device", "cuda:99"), "--device: expected a device that torch has here, got 'cuda:99'; name another, such as cpu."),
        (("--device", "meta"), "--device: expected a device that torch has here, got 'meta'"),
        (("--max-memory", "much"), "--max-memory: expected an amount of memory, got 'much'"),
        (("--max-memory", "1MB"), "the memory: expected 0.00 GiB for the keys and values of"),
        (("--max-tokens", "256"), "the tokens of a sequence: expected at most 256, the context of the model"),
        (("--page-size", "0"), "--page-size: expected at least 1, got 0"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, loader: Loader, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message) and printed.err.count("\n") == 1 and not printed.out


def test_options_of_directories_are_none_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (("--chat",), ("--top-p", "0.5"), ("--stop", "x"), ("--max-tokens", "0"), ("--format", "x"), ("--device", "cpu")):
        assert main(["generate", str(tmp_path), *option]) == 2
        assert capsys.readouterr().err.startswith(f"{option[0]}: expected a Hugging Face directory")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"DIR {tmp_path}: expected a Hugging Face directory, got none")


def test_logits_that_are_no_numbers_are_told(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.model = BrokenModel(poison=Tokenizer.from_folder(folder).encode("x")[0])
    assert main(["generate", str(folder), "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("the model: expected finite logits, got NaN or infinity")


def test_sizes() -> None:
    sizes = {"24GiB": 24 * 2**30, "1 kb": 1000, "1.5m": 1500000, "2e9": 2 * 10**9, "7": 7, "1TiB": 2**40}
    assert {text: parse_size(text, "x") for text in sizes} == sizes
    for wrong in ("", "x", "-1", "0", "1e", "1GiBs", "0.1", "9" * 50):
        with pytest.raises(ArgumentError, match="--x: expected an amount of memory"):
            parse_size(wrong, "--x")


def test_memory_for_keys_and_values() -> None:
    assert bytes_per_token(CONFIG, 4) == 2 * 2 * 32 * 4
    assert bytes_per_token({"text_config": {**CONFIG, "num_key_value_heads": 1, "head_dim": 8}}, 2) == 2 * 2 * 8 * 2
    assert bytes_per_token({"n_layer": 3, "n_head": 4, "n_embd": 8}, 1) == 2 * 3 * 8
    assert bytes_per_token({"hidden_size": 8}, 2) is None
    assert pages_within(1000, 10, sequences=4, capacity=30, page_size=10) == 10
    assert pages_within(10**9, 10, sequences=4, capacity=31, page_size=10) == 16
    with pytest.raises(ArgumentError, match="the memory: expected"):
        pages_within(299, 10, sequences=4, capacity=30, page_size=10)


def test_serve_runs_until_it_is_told_to_end(
    folder: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loader.model = SlowModel(600, 0.001)
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    made: list[server.Server] = []

    class Kept(server.Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(server, "Server", Kept)
    codes: list[int] = []
    command = ["serve", str(folder), "--port", "0", "--context", "100", "--sequences", "2", "--max-memory", "64GiB", "--concurrency", "3"]
    thread = threading.Thread(target=lambda: codes.append(main(command)))
    thread.start()
    while not (made and made[0].started):
        assert thread.is_alive()
    service = made[0]._service
    port = made[0].servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tiny-model", "prompt": "The class", "max_tokens": 9}
        assert client.completions.create(**asked).choices[0].text == client.completions.create(**asked).choices[0].text  # its own temperature
        with pytest.raises(openai.BadRequestError, match="max_tokens: expected at most 100, got 101"):
            client.completions.create(**{**asked, "max_tokens": 101})
    assert service.limits.concurrency == 3 and service.served.engine.capacity == 100
    made[0].handle_exit(signal.SIGTERM, None)
    thread.join()
    assert codes == [0]
    assert capsys.readouterr().err == f"Serving tiny-model at http://127.0.0.1:{port}/v1\n"


def test_an_address_that_is_taken(folder: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    with server.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"--host and --port: expected an address that is free, got 127.0.0.1:{port} (Address already in use); name another.\n"
    )
    assert not loader.asked
