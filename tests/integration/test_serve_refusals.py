"""What the server refuses: in one sentence, in OpenAI's form, with the status that clients know; and it goes on serving."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from serve_tiny import Running, served, serving

from fusible.cli.serving.limits import Limits
from fusible.errors import ArgumentError
from fusible.models.text import Tokenizer

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = served()
    with serving(model, Limits(max_tokens=100, body_bytes=5000, body_seconds=1)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as made:
        yield made
    Running.wait(server.idle)


def check(answer: httpx.Response, status: int, said: str, param: str | None) -> None:
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[^\n]*: expected [^\n]*, got [^\n]*; [^\n]*\.", error["message"]) and said in error["message"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the request's body: expected JSON, got damaged text"),
        (b'{"model": "tiny", "prompt": ', "the request's body: expected JSON, got damaged text"),
        (b"\xff\xfe{}", "the request's body: expected JSON, got bytes that are no UTF-8"),
        (b"[1, 2]", "the request's body: expected an object, got another value"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'{"temperature": NaN}', "got NaN"),
        (b'{"seed": 1' + b"0" * 30 + b"}", "more than 64 bits"),
        (b'{"model": "tiny", "prompt": "\\uD83D", "messages": 3}', "expected characters of Unicode, got half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "half of a surrogate pair"),
        (b"[" * 4000, "brackets within one another"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_bodies_that_are_no_objects(http: httpx.Client, path: str, body: bytes, said: str) -> None:
    answer = http.post(path, content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "expected the name of a model, got none"),
        ({"model": 3}, "expected a text, got 3"),
        ({"prompt": None}, "expected a text, a list of tokens, or a list of these, got none"),
        ({"prompt": []}, "got another value"),
        ({"prompt": [1, "x"]}, "got another value"),
        ({"prompt": [True]}, "got another value"),
        ({"prompt": {"x": 1}}, "got another value"),
        ({"prompt": [600]}, "expected tokens from 0 to 599, got 600"),
        ({"prompt": [-1]}, "got -1"),
        ({"prompt": ["x"] * 65}, "expected at most 64 prompts, got 65"),
        ({"prompt": ""}, "expected at least one token"),
        ({"max_tokens": 0}, "expected an integer of at least 1, got 0"),
        ({"max_tokens": 1.5}, "got 1.5"),
        ({"max_tokens": True}, "got true"),
        ({"max_tokens": 101}, "expected at most 100, got 101"),
        ({"temperature": -0.1}, "expected a number from 0 to 2"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"top_p": 2}, "expected a number from 0 to 1"),
        ({"min_p": -1}, "expected a number from 0 to 1"),
        ({"top_k": -2}, "expected an integer of at least -1"),
        ({"repetition_penalty": 0}, "expected a positive number, got 0.0"),
        ({"seed": 2**63}, "expected an integer from"),
        ({"stop": [""]}, "expected a text or at most 16 of them"),
        ({"stop": ["x"] * 17}, "got a list of 17"),
        ({"stop": 3}, "got 3"),
        ({"stream": "yes"}, "expected true or false, got 'yes'"),
        ({"stream_options": []}, "expected an object, got []"),
        ({"n": 2}, "expected 1, as this server serves no other, got 2"),
        ({"best_of": 3}, "expected 1"),
        ({"echo": True}, "expected false"),
        ({"suffix": "x"}, "expected nothing"),
        ({"logit_bias": {"3": 1}}, 'expected {}, as this server serves no other, got {"3": 1}'),
        ({"logit_bias": {str(i): 1 for i in range(50)}}, "expected {}, as this server serves no other, got an object of 50 entries"),
        ({"presence_penalty": 0.5}, "expected 0"),
        ({"logprobs": 21}, "expected an integer from 0 to 20"),
        ({"tempreature": 1}, "expected a parameter that this server knows"),
    ],
)
def test_completions_that_are_wrong(http: httpx.Client, change: dict[str, Any], said: str) -> None:
    ((name, _),) = change.items()
    for stream in ({}, {"stream": True}):
        check(http.post(COMPLETIONS, json={**PROMPT, **stream, **change}), 400, said, name)


@pytest.mark.parametrize(
    ("change", "said", "param"),
    [
        ({"messages": None}, "expected a list of messages, got none", "messages"),
        ({"messages": []}, "expected a list of messages", "messages"),
        ({"messages": ["x"]}, "expected an object with a role", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "expected an object with a role", "messages[0]"),
        ({"messages": [CHAT["messages"][0], {"role": "user"}]}, "expected a text, or parts of the type text", "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type text", "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "as this server serves no other", "tools"),
        (
            {"response_format": {"type": "json_object"}},
            'expected {"type": "text"}, as this server serves no other, got {"type": "json_object"}',
            "response_format",
        ),
        ({"logprobs": 3}, "expected true or false, got 3", "logprobs"),
        ({"top_logprobs": 21}, "expected an integer from 0 to 20", "top_logprobs"),
        ({"top_logprobs": 2}, "expected logprobs true with it, got 2", "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "expected logprobs true with it, got 2", "top_logprobs"),
        ({"chat_template_kwargs": 3}, "expected an object, got 3", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 3}}, "expected variables of the template's own", "chat_template_kwargs"),
    ],
)
def test_chats_that_are_wrong(http: httpx.Client, change: dict[str, Any], said: str, param: str) -> None:
    check(http.post(CHATS, json={**CHAT, **change}), 400, said, param)


def test_a_variable_of_the_template_may_have_any_name(http: httpx.Client) -> None:
    assert http.post(CHATS, json={**CHAT, "chat_template_kwargs": {"self": 1, "more": 2, "context": 3}}).status_code == 200


@pytest.mark.parametrize(("path", "body", "param"), [(COMPLETIONS, PROMPT, "prompt"), (CHATS, CHAT, "messages")])
def test_a_text_that_the_vocabulary_has_no_tokens_for(path: str, body: dict[str, Any], param: str) -> None:
    model = served()
    model.tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>")))
    with serving(model) as running:
        check(httpx.post(running.url + path, json=body), 400, "the text: expected characters that the vocabulary has tokens for", param)


def test_whole_surrogate_pairs_are_characters(http: httpx.Client) -> None:
    escaped = http.post(COMPLETIONS, content=b'{"model": "tiny", "prompt": "\\ud83d\\ude42", "max_tokens": 5, "temperature": 0}')
    assert escaped.json()["choices"] == http.post(COMPLETIONS, json={**PROMPT, "prompt": "🙂", "max_tokens": 5, "temperature": 0}).json()["choices"]


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    common = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "x", "stop": None, "top_k": -1, "seed": None}
    assert http.post(COMPLETIONS, json={**PROMPT, **common, "echo": False, "best_of": 1}).status_code == 200
    chat = {**CHAT, **common, "tools": [], "response_format": {"type": "text"}, "metadata": {"x": "y"}, "parallel_tool_calls": True}
    assert http.post(CHATS, json=chat).status_code == 200


def test_clients_get_exceptions_of_their_own(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="model: expected 'tiny', got 'gpt-none'") as caught:
            client.completions.create(**{**PROMPT, "model": "gpt-none"})
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
        with pytest.raises(
            openai.BadRequestError, match=r"expected at most 256 tokens in all, got 1\d\d\d tokens of the prompt and 2 to add"
        ) as long:
            client.completions.create(**{**PROMPT, "prompt": "Ω" * 500})
        assert long.value.code == "context_length_exceeded" and long.value.param == "prompt"
        with pytest.raises(openai.BadRequestError, match="tokens of the prompt and 1 to add") as chat:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Ω" * 500}])
        assert chat.value.code == "context_length_exceeded" and chat.value.param == "messages"


def test_a_body_that_is_too_large(http: httpx.Client, server: Running) -> None:
    check(http.post(COMPLETIONS, json={**PROMPT, "prompt": "x" * 6000}), 413, "expected at most 5000 bytes", "the request's body")

    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    check(httpx.post(server.url + COMPLETIONS, content=parts()), 413, "expected at most 5000 bytes", "the request's body")


def test_a_body_that_is_too_slow(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in raw.recv(4096)


def test_paths_and_methods_that_are_none(http: httpx.Client) -> None:
    check(http.get("/v1/none"), 404, "got GET /v1/none", None)
    check(http.get(COMPLETIONS), 405, "got GET /v1/completions", None)


def test_a_model_without_a_chat_template() -> None:
    model = served()
    model.chat = None
    with serving(model) as running:
        check(httpx.post(running.url + CHATS, json=CHAT), 400, "expected a model with a chat template", "messages")


def test_limits_have_domains() -> None:
    for name, value in {"concurrency": 0, "queue_seconds": -1, "grace_seconds": float("nan"), "max_tokens": 0}.items():
        with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')}: expected a finite number of at least"):
            Limits(**{name: value})  # type: ignore[arg-type]
