"""``fusible generate`` on a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from fusible.cli.generation.loading import TextModel, default_sampling, encodes_text, load_text_model, make_engine
from fusible.cli.generation.options import check_counts, sampling_of
from fusible.cli.generation.printing import TextColumns
from fusible.cli.generation.sizes import parse_size
from fusible.cli.generation.texts_job import write_texts
from fusible.errors import ArgumentError, ValuesError, expected
from fusible.models.generation import Engine, Request, Sampling
from fusible.models.text import TextStream
from fusible.pytorch import parameter_bytes

__all__ = ["continue_prompts"]

_AT_ONCE, _TOKENS, _TEMPERATURE = 16, 200, 0.8


def continue_prompts(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    sampling_of(arguments, Sampling(_TEMPERATURE))  # what is wrong with the options is told before anything is read
    count = _TOKENS if arguments.max_tokens is None else arguments.max_tokens
    check_counts({"--max-tokens": count, "--page-size": arguments.page_size})
    memory = None if arguments.max_memory is None else parse_size(arguments.max_memory, "--max-memory")
    prompts, stop = arguments.prompt or ([] if arguments.chat else ["\n"]), arguments.stop or []
    if "" in stop or not prompts or ("" in prompts and arguments.chat):
        of = "--stop" if "" in stop else "--prompt"
        raise ArgumentError(expected("at least one character", of=of, got="none", do="give a text"))
    if encodes_text(Path(arguments.folder)):
        return write_texts(arguments, prompts, count, stop)
    if arguments.system is not None and not arguments.chat:
        raise ArgumentError(expected("--chat beside it", of="--system", got="none", do="give --chat, or leave it out"))
    loaded = load_text_model(Path(arguments.folder), arguments.format, arguments.device or "cpu", arguments.executor)
    sampling = sampling_of(arguments, default_sampling(loaded.generation, _TEMPERATURE))
    tokens = [_tokens(loaded, prompt, arguments) for prompt in prompts]
    ends = loaded.tokenizer.stop_tokens
    requests = [Request(prompt, count, replace(sampling, seed=arguments.seed + i), ends) for i, prompt in enumerate(tokens)]
    capacity = max(map(len, tokens)) + count
    engine = make_engine(loaded, sequences=min(len(prompts), _AT_ONCE), capacity=capacity, page_size=arguments.page_size, max_memory=memory)
    streams = [TextStream(loaded.tokenizer, stop, () if arguments.chat else prompt) for prompt in tokens]
    began = time.perf_counter()
    _run(engine, requests, streams, TextColumns(sys.stdout, ["" if arguments.chat else prompt for prompt in prompts]))
    _report(engine, loaded, time.perf_counter() - began, sum(map(len, tokens)))
    return 0


def _tokens(loaded: TextModel, prompt: str, arguments: argparse.Namespace) -> tuple[int, ...]:
    if not arguments.chat:
        tokens = tuple(loaded.tokenizer.encode(prompt))
        if not tokens:
            raise ArgumentError(expected("at least one token", of="--prompt", got="none", do="give a text to go on from"))
        return tokens
    if loaded.chat is None:
        raise ArgumentError(expected("a model with a chat template", of="--chat", got="one without", do="leave it out"))
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    text = loaded.chat.render([*system, {"role": "user", "content": prompt}])
    return tuple(loaded.tokenizer.encode(text, special=False))


def _run(engine: Engine, requests: Sequence[Request], streams: Sequence[TextStream], out: TextColumns) -> None:
    for request in requests:  # their numbers are their places
        engine.add(request)
    try:
        for event in engine.run():
            stream, ended = streams[event.id], event.ended is not None
            if event.ended == "failed":
                got, do = "NaN or infinity", "try another recipe, or look at the weights"
                raise ValuesError(expected("finite logits", of="the model", got=got, do=do))
            if stream.stopped or event.token is None:
                continue
            text = "" if event.ended == "stop" else stream.push(event.token)
            if stream.stopped:
                engine.cancel(event.id)
            out.add(event.id, text + (stream.finish() if ended else ""), ended or stream.stopped)
    finally:
        out.finish()


def _report(engine: Engine, loaded: TextModel, seconds: float, read: int) -> None:
    counts = engine.counts
    weights = f"weights {parameter_bytes(loaded.model) / 1e6:.2f} MB, " if isinstance(loaded.model, nn.Module) else ""
    kept = f" ({counts.reused} of them kept from others)" if counts.reused else ""
    made = f"{counts.chosen} tokens in {seconds:.2f} s ({counts.chosen / seconds:.0f} a second), from {read}{kept}"
    print(f"{made}; {weights}cache {engine.cache.nbytes / 1e6:.2f} MB", file=sys.stderr)
