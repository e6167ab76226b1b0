"""The server under load: 64 requests at once, cut connections, full queues, failing models, and an end in the middle of work."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_tiny import VOCABULARY, Running, served, serving, tokenizer
from tiny_language_models import BrokenModel, SlowModel, TinyModel

from fusible.cli.serving.limits import Limits
from fusible.pytorch import KVCache

COUNT = 64
SLOW = {"model": "tiny", "prompt": "x", "max_tokens": 200, "temperature": 0}


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def _ask(client: openai.AsyncOpenAI, asked: dict[str, Any], stream: bool) -> tuple[str, str | None]:
    if not stream:
        choice = (await client.completions.create(**asked)).choices[0]
        return choice.text, choice.finish_reason
    choices = [chunk.choices[0] async for chunk in await client.completions.create(**asked, stream=True)]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


async def _all(url: str, asked: list[dict[str, Any]], at_once: bool) -> list[tuple[str, str | None]]:
    limits = httpx.Limits(max_connections=COUNT)
    async with httpx.AsyncClient(limits=limits) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        if at_once:
            return await asyncio.gather(*(_ask(client, one, index % 3 > 0) for index, one in enumerate(asked)))
        return [await _ask(client, one, False) for one in asked]


@pytest.mark.parametrize("settings", [{}, {"sequences": 16, "capacity": 100, "page_size": 4, "pages": 60, "tokens_per_step": 64}])
def test_64_requests_at_once_each_get_what_they_get_alone(settings: dict[str, Any]) -> None:
    draw = random.Random(0)
    words = "the class of all objects naïve 日本 returns a value".split()
    asked = [
        {
            "model": "tiny",
            "prompt": " ".join(draw.choices(words, k=draw.randint(1, 12))),
            "max_tokens": draw.randint(1, 24),
            "temperature": 0 if i % 2 else 0.8,
            "seed": i,
        }
        for i in range(COUNT)
    ]
    with serving(served(**settings)) as running:
        together = asyncio.run(_all(running.url, asked, at_once=True))
        counts = running.service.served.engine.counts
        assert counts.calls < counts.chosen / 3 and (counts.preempted > 0) == bool(settings)
        assert together == asyncio.run(_all(running.url, asked, at_once=False))
        Running.wait(running.idle)


def _cut(running: Running, body: dict[str, Any], after: int, declared: int | None = None) -> None:
    """Send a request, read so many bytes, and close the connection."""
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {declared or len(content)}\r\n\r\n"
        raw.sendall(head.encode() + content)
        while after > 0:
            after -= len(raw.recv(min(after, 4096)))


def test_cut_connections_free_their_slots() -> None:
    with serving(served(SlowModel(VOCABULARY, 0.005), sequences=2)) as running:
        for _ in range(4):
            _cut(running, {**SLOW, "stream": True}, 300)
            _cut(running, {**SLOW, "stream": True}, 0)
            _cut(running, SLOW, 0)
            _cut(running, SLOW, 0, declared=10000)  # in the middle of its body
        Running.wait(running.idle)
        assert running.service.served.engine.counts.chosen < 200
        with client(running) as openai_client:
            stream = openai_client.completions.create(**SLOW, stream=True)
            next(iter(stream))
            assert running.service.open == 1
            stream.close()
            Running.wait(running.idle)
            assert openai_client.completions.create(model="tiny", prompt="x", max_tokens=3).usage is not None


def test_more_requests_than_allowed_are_told_so() -> None:
    with serving(served(SlowModel(VOCABULARY), sequences=1), Limits(concurrency=2)) as running, client(running) as openai_client:
        streams = [openai_client.completions.create(**SLOW, stream=True)]
        waiting = threading.Thread(target=_cut, args=(running, SLOW, 100))
        waiting.start()
        Running.wait(lambda: running.service.open == 2)
        with pytest.raises(openai.RateLimitError, match="the server: expected at most 2 requests at once, got one more") as caught:
            openai_client.completions.create(**SLOW)
        assert caught.value.response.headers["retry-after"] == "1"
        streams[0].close()
        waiting.join()
        with pytest.raises(openai.BadRequestError, match="prompt: expected at most 2, the requests at once of this server, got 3; send several"):
            openai_client.completions.create(**{**SLOW, "prompt": ["x"] * 3})  # that could never begin: it is not to be sent again
        Running.wait(running.idle)


def test_requests_that_wait_too_long_are_told_so() -> None:
    with serving(served(SlowModel(VOCABULARY), sequences=1), Limits(queue_seconds=0.2)) as running, client(running) as openai_client:
        stream = openai_client.completions.create(**SLOW, stream=True)
        for streamed in (False, True):
            with pytest.raises(openai.InternalServerError, match=r"the request: expected to begin within 0\.2 seconds") as caught:
                openai_client.completions.create(**SLOW, stream=streamed)
            assert caught.value.status_code == 503 and caught.value.code == "overloaded"
        assert len(list(stream)) > 10


def test_a_request_has_so_much_time() -> None:
    with serving(served(SlowModel(VOCABULARY)), Limits(request_seconds=0.3)) as running, client(running) as openai_client:
        made = openai_client.completions.create(**SLOW)
        assert made.usage is not None and made.choices[0].finish_reason == "length" and 1 <= made.usage.completion_tokens < 30
        assert made.choices[0].text


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off() -> None:
    content = json.dumps({**SLOW, "prompt": ["x"] * 60, "stream": True, "logprobs": 20}).encode()
    limits = Limits(request_seconds=3)
    with serving(served(SlowModel(VOCABULARY, 0), sequences=60), limits) as running, socket.socket() as raw:
        running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", running.port))
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        Running.wait(lambda: running.service.open == 60)
        Running.wait(lambda: not running.service.served.engine.busy)
        assert running.service.open == 60  # what was made waits to be sent
        Running.wait(running.idle)


def test_a_model_that_fails_once_costs_nobody_anything_and_one_that_fails_on_ends_its_requests() -> None:
    wanted = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "logprobs": 0}
    with serving(served(TinyModel())) as running, client(running) as openai_client:
        text = openai_client.completions.create(**wanted).choices[0].text
    with serving(served(BrokenModel(fails={2, 8, 9}))) as running, client(running) as openai_client:
        assert openai_client.completions.create(**wanted).choices[0].text == text
        with pytest.raises(openai.InternalServerError, match="the request: expected a model that computes"):
            openai_client.completions.create(**wanted)  # calls 8 and 9 are its first
        assert openai_client.completions.create(**wanted).choices[0].text == text
        Running.wait(running.idle)


class ChokingModel(TinyModel):
    """One that raises where ``chokes`` says so of the token rows that it is called on, of which each has its place in its sequence."""

    def __init__(self, chokes: Callable[[list[list[int]], list[int]], bool]) -> None:
        super().__init__(VOCABULARY)
        self.chokes = chokes

    def next_logits(self, tokens: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        rows = [part.tolist() for part in tokens.split(seq_lens.tolist())]
        if self.chokes([row for row in rows if row], [length for length, row in zip(cache.lengths, rows, strict=True) if row]):
            raise RuntimeError("choked")
        return super().next_logits(tokens, seq_lens, cache)


CHOKES: dict[str, tuple[Callable[[list[list[int]], list[int]], bool], bool]] = {
    "on a prompt": (lambda rows, read: any(77 in row for row in rows), True),
    "after a long prompt": (lambda rows, read: any(length >= 40 for length in read), True),
    "on several at once": (lambda rows, read: len(rows) > 1, False),
    "on several at once, in the middle": (lambda rows, read: len(rows) > 1 and max(read) > 8, False),
}
"""By name: where a model raises, and whether that is the fault of one request, whose prompt is long and has token 77."""


@pytest.mark.parametrize("case", CHOKES)
def test_who_is_not_at_fault_goes_on_where_a_model_raises(case: str) -> None:
    chokes, of_one = CHOKES[case]
    prompts = [[5, 6, 7], [*range(60, 99)], [9, 8], [11, 12, 13, 14]]
    asked = [{"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]
    with serving(served(TinyModel(VOCABULARY))) as running:
        alone = asyncio.run(_all(running.url, asked, at_once=False))
    with serving(served(ChokingModel(chokes))) as running:
        together = asyncio.run(_each(running.url, asked))
        Running.wait(running.idle)
    assert [isinstance(one, openai.InternalServerError) for one in together] == [of_one and 77 in prompt for prompt in prompts]
    assert all(one == wanted for one, wanted in zip(together, alone, strict=True) if not isinstance(one, Exception))


async def _each(url: str, asked: list[dict[str, Any]]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(_ask(client, one, False) for one in asked), return_exceptions=True)


def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    with serving(served(BrokenModel(fails={4, 5}))) as running, client(running) as openai_client:
        stream = openai_client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=9, temperature=0, logprobs=0, stream=True)
        seen = []
        with pytest.raises(openai.APIError, match="the request: expected a model that computes"):
            seen += [chunk.choices[0].text for chunk in stream]
        assert running.service.served.engine.counts.chosen == 3
        Running.wait(running.idle)


def test_the_end_lets_what_runs_finish_and_refuses_what_is_new() -> None:
    with serving(served(SlowModel(VOCABULARY))) as running, client(running) as openai_client:
        stream = openai_client.completions.create(**{**SLOW, "max_tokens": 40}, stream=True)
        first = next(iter(stream))
        with socket.create_connection(("127.0.0.1", running.port)) as raw:  # a connection that is there already
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Le")
            running.server.handle_exit(signal.SIGTERM, None)
            raw.sendall(b"ngth: 0\r\n\r\n")
            assert b'"closing"' in raw.recv(4096) or running.server.should_exit
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            openai_client.completions.create(**SLOW)
        text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
        running.thread.join()
        with serving(served(SlowModel(VOCABULARY, 0))) as other, client(other) as whole:
            assert whole.completions.create(**{**SLOW, "max_tokens": 40}).choices[0].text == text


def test_what_outlasts_the_time_of_grace_is_ended() -> None:
    with serving(served(SlowModel(VOCABULARY)), Limits(grace_seconds=0.2)) as running, client(running) as openai_client:
        stream = openai_client.completions.create(**SLOW, stream=True)
        next(iter(stream))
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="the request: expected a server that runs on, got one that shuts down"):
            list(stream)
        running.thread.join()
        assert running.idle()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_in_peace(sent: signal.Signals) -> None:
    program = [sys.executable, str(Path(__file__).with_name("serve_tiny.py")), "10"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as openai_client:
            stream = openai_client.completions.create(**{**SLOW, "max_tokens": 30}, stream=True)
            next(iter(stream))
            process.send_signal(sent)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert process.wait(20) == 0 and process.stderr.read() == ""


def test_tokens_of_the_prompt_are_kept_between_requests() -> None:
    with serving(served()) as running, client(running) as openai_client:
        messages = [{"role": "user", "content": "Tell me of the class statement, and what it returns."}]
        first = openai_client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0).choices[0].message.content
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
        openai_client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
        assert running.service.served.engine.counts.reused >= len(tokenizer().encode(messages[0]["content"]))
