"""The HTTP server, asked by OpenAI's own client: what it answers is what the engine makes, whole and in streams."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import openai
import pytest
from serve_tiny import VOCABULARY, Running, served, serving, tokenizer
from tiny_language_models import TinyModel
from tiny_tokenizers import CHATML
from torch import Tensor

from fusible.cli.serving.limits import Limits
from fusible.cli.serving.server import bind
from fusible.models.generation import Engine, Request, Sampling
from fusible.models.text import ChatTemplate, TextStream
from fusible.pytorch import KVCache


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(served()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def alone(prompt: list[int], count: int, sampling: Sampling, before: bool = True) -> str:
    """What an engine of its own makes of it."""
    engine, text = Engine(TinyModel(VOCABULARY), sequences=1), TextStream(tokenizer(), (), prompt if before else ())
    engine.add(Request(tuple(prompt), count, sampling, tokenizer().stop_tokens))
    return "".join(text.push(event.token) for event in engine.run() if event.token is not None and event.ended != "stop") + text.finish()


def test_a_completion_is_what_the_engine_makes(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt="The class", max_tokens=20, temperature=0)
    prompt = tokenizer().encode("The class")
    assert made.choices[0].text == alone(prompt, 20, Sampling(0)) and made.choices[0].finish_reason == "length"
    assert made.usage is not None and made.usage.prompt_tokens == len(prompt) and made.usage.total_tokens == len(prompt) + 20
    drawn = client.completions.create(
        model="tiny", prompt="The class", max_tokens=20, seed=3, top_p=0.9, extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2}
    )
    assert drawn.choices[0].text == alone(prompt, 20, Sampling(1.0, 50, 0.9, 0.01, 1.2, 3))


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "naïve 日本", "max_tokens": 60, "seed": 1}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 10


def test_pieces_of_a_stream_do_not_wait_for_an_acknowledgement() -> None:
    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as sock:
            async with await asyncio.start_server(note, sock=sock):
                _, writer = await asyncio.open_connection(*sock.getsockname())
                writer.close()
                return await found

    assert asyncio.run(accepted())


def test_the_engine_has_the_thread_that_serves() -> None:
    threads = set()

    class Noting(TinyModel):
        def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
            threads.add(threading.current_thread())
            return super().next_logits(tokens, seq_lens, cache)

    with serving(served(Noting(VOCABULARY))) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        client.completions.create(model="tiny", prompt="The class", max_tokens=3)
        assert threads == {running.thread}


def test_a_chat_goes_by_its_template(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
    ]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    text = ChatTemplate(CHATML).render([messages[0], {"role": "user", "content": "Hello there"}])
    assert whole.choices[0].message.content == alone(tokenizer().encode(text, special=False), 30, Sampling(0), before=False)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_completion_without_a_count_has_sixteen_tokens(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="The class", temperature=0)
    assert whole.choices[0].text == alone(tokenizer().encode("The class"), 16, Sampling(0))
    with serving(served(), Limits(max_tokens=5)) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as other:
        short = other.completions.create(model="tiny", prompt="The class", temperature=0)
    assert short.usage is not None and short.usage.completion_tokens == 5 and whole.choices[0].text.startswith(short.choices[0].text)


def test_a_chat_without_a_count_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=0)
    assert made.usage is not None
    assert made.choices[0].finish_reason == "stop" or made.usage.total_tokens == 256


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "The class", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[10:16]
    for streamed in (False, True):
        answer = client.completions.create(**asked, stop=["never comes", stop], stream=streamed)
        choices = [chunk.choices[0] for chunk in (answer if streamed else [answer])]
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)] and choices[-1].finish_reason == "stop"


def test_several_prompts_and_prompts_of_tokens(client: openai.OpenAI) -> None:
    texts = ["The class", "a", "naïve"]
    asked = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    wanted = [client.completions.create(**asked, prompt=text).choices[0].text for text in texts]
    assert [choice.text for choice in client.completions.create(**asked, prompt=texts).choices] == wanted
    tokens = [tokenizer().encode(text) for text in texts]
    assert [choice.text for choice in client.completions.create(**asked, prompt=tokens).choices] == wanted
    assert client.completions.create(**asked, prompt=tokens[0]).choices[0].text == wanted[0]
    parts = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(**asked, prompt=texts, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(parts.values()) == wanted


def test_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    told = client.completions.create(**asked, prompt="The class", logprobs=3).choices[0].logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs
    assert len(told.tokens) == 8 and told.text_offset == [len("".join(told.tokens[:i])) for i in range(8)]
    assert [max(likeliest.values()) for likeliest in told.top_logprobs] == told.token_logprobs  # the likeliest was chosen
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked, **chat).choices[0].logprobs
    assert whole is not None and whole.content
    assert all(one.logprob == max(other.logprob for other in one.top_logprobs) and len(one.top_logprobs) == 2 for one in whole.content)
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, **chat, stream=True)]
    told_then = [one for part in streamed if part for one in part.content or []]
    assert [(one.token, one.bytes) for one in told_then] == [(one.token, one.bytes) for one in whole.content]
    # What is kept of a prompt was computed together with other tokens than when it is computed anew.
    assert [one.logprob for one in told_then] == pytest.approx([one.logprob for one in whole.content], abs=1e-4)
    assert client.completions.create(**asked, prompt="x").choices[0].logprobs is None


def test_models_and_health(client: openai.OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "fusible"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    before = client._client.get(f"{server.url}/health").json()
    client.completions.create(model="tiny", prompt="a", max_tokens=3)
    health = client._client.get(f"{server.url}/health").json()
    assert health["status"] == "ok" and before["chosen"] < health["chosen"] <= before["chosen"] + 3
