"""``fusible serve`` under load, asked by OpenAI's client: the time to the first token, tokens per second, and requests that were lost.

``python -m benchmarks.serving --url http://127.0.0.1:8000/v1`` asks a server that runs. Without ``--url`` it starts one of its own, in another
process, of a model with random weights: the times are those of a trained model of that size.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import openai
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from fusible.cli.serving.limits import Limits
from fusible.cli.serving.server import bind, run
from fusible.cli.serving.service import ServedModel, Service
from fusible.models.generation import Engine
from fusible.models.text import Tokenizer
from fusible.pytorch import GELU, KVCache, LayerNorm, Linear, MultiHeadedSelfAttention, Residual, Sequential

__all__ = ["main"]

_WORDS = "the of a class returns value object method name if module is list that an in function with be are".split()


class Decoder(nn.Module):
    """A decoder of bytes in bf16."""

    vocabulary, context = 256, 1024

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, hidden)
        blocks = []
        for _ in range(layers):
            attention = MultiHeadedSelfAttention(hidden, hidden // 64, rope_base=10000.0)
            blocks.append(Residual(LayerNorm(hidden), Linear(hidden, 3 * hidden), attention, Linear(hidden, hidden)))
            blocks.append(Residual(LayerNorm(hidden), Linear(hidden, 4 * hidden), GELU(), Linear(4 * hidden, hidden)))
        self.body = Sequential(*blocks, LayerNorm(hidden), Linear(hidden, self.vocabulary)).to(torch.bfloat16)
        self.eval()

    def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        return self.body(x, seq_lens, cache)[seq_lens.cumsum(0) - 1].float()

    def new_cache(self, sequences: int, capacity: int, page_size: int | None = None, pages: int | None = None) -> KVCache:
        return KVCache(sequences, capacity, page_size=page_size, pages=pages)


def _serve(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    engine = Engine(Decoder(given.layers, given.hidden), sequences=given.sequences, page_size=16)
    run(Service(ServedModel("own", engine, Tokenizer(library)), Limits()), bind("127.0.0.1", 0))


class Timed(NamedTuple):
    """Of one request, in seconds: until its first token, and until its last; the tokens that it got, or None where it was lost."""

    first: float
    last: float
    tokens: int | None


async def _ask(client: openai.AsyncOpenAI, model: str, prompt: str, count: int, turn: asyncio.Semaphore) -> Timed:
    async with turn:
        began, first, made = time.perf_counter(), 0.0, None
        try:
            stream = await client.completions.create(
                model=model, prompt=prompt, max_tokens=count, temperature=0, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                first = first or time.perf_counter()
                made = chunk.usage.completion_tokens if chunk.usage else made
        except openai.APIError as error:
            print(f"lost: {error}", file=sys.stderr)
        return Timed(first - began, time.perf_counter() - began, made)


async def _load(url: str, requests: int, at_once: int, count: int, seed: int) -> tuple[list[Timed], float]:
    draw = random.Random(seed)
    prompts = [" ".join(draw.choices(_WORDS, k=draw.randint(4, 40))) for _ in range(requests)]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=at_once), timeout=600) as http:
        client, turn = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http), asyncio.Semaphore(at_once)
        model = (await client.models.list()).data[0].id
        began = time.perf_counter()
        done = await asyncio.gather(*(_ask(client, model, prompt, count, turn) for prompt in prompts))
        return done, time.perf_counter() - began


def _row(at_once: int, done: Sequence[Timed], seconds: float) -> str:
    """A line of the table."""
    firsts = sorted(1e3 * one.first for one in done if one.tokens)
    between = [1e3 * (one.last - one.first) / (one.tokens - 1) for one in done if one.tokens and one.tokens > 1]
    made, lost = sum(one.tokens or 0 for one in done), sum(one.tokens is None for one in done)
    p99 = firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]
    figures = [
        at_once,
        len(done),
        lost,
        f"{statistics.median(firsts):.0f}",
        f"{p99:.0f}",
        f"{statistics.median(between):.1f}",
        f"{made / seconds:.0f}",
    ]
    return f"| {' | '.join(map(str, figures))} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs (default: one of its own)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.serve:
        _serve(given)
        return 0
    options = [f"--{name}={getattr(given, name)}" for name in ("layers", "hidden", "sequences")]
    own = (
        None if given.url else subprocess.Popen([sys.executable, "-m", "benchmarks.serving", "--serve", *options], stderr=subprocess.PIPE, text=True)
    )
    try:
        url = given.url or own.stderr.readline().split()[-1]
        asyncio.run(_load(url, 4, 4, 8, seed=0))  # the first calls plan their passes
        print("| at once | requests | lost | first token, ms: median | p99 | between tokens, ms | tokens per second |")
        print("|---:|---:|---:|---:|---:|---:|---:|")
        for at_once in given.at_once:
            print(_row(at_once, *asyncio.run(_load(url, given.requests, at_once, given.tokens, seed=at_once))), flush=True)
    finally:
        if own is not None:
            own.terminate()
            own.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
