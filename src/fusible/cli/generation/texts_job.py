"""``fusible generate`` on a directory whose model encodes a prompt, and writes another text."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusible.cli.devices import device_named
from fusible.cli.generation.loading import default_sampling
from fusible.cli.generation.options import sampling_of
from fusible.cli.generation.printing import TextColumns
from fusible.cli.weight_formats import recipe_of_format
from fusible.errors import ArgumentError, expected
from fusible.models.encoder_decoder_model import EncoderDecoderModel
from fusible.models.pretrained import from_pretrained
from fusible.models.text import TextStream, Tokenizer
from fusible.models.text.config_files import read_config
from fusible.pytorch import parameter_bytes

__all__ = ["write_texts"]

_OF_DECODERS = ("chat", "system", "page_size", "max_memory")
_TEMPERATURE = 0.8


def write_texts(arguments: argparse.Namespace, prompts: Sequence[str], count: int, stop: Sequence[str]) -> int:
    """Print the text that the model writes of each prompt, of ``count`` tokens at most: the exit code."""
    for name in _OF_DECODERS:
        if getattr(arguments, name) not in (None, False):
            of, got = f"--{name.replace('_', '-')}", "one that encodes the prompt"
            raise ArgumentError(expected("a model that goes on from its prompt", of=of, got=got, do="leave it out"))
    folder = Path(arguments.folder)
    recipe, dtype = recipe_of_format(folder, arguments.format), None if arguments.format is None else torch.bfloat16
    device, tokenizer = device_named(arguments.device or "cpu"), Tokenizer.from_folder(folder)
    sampling = sampling_of(arguments, default_sampling(read_config(folder, "generation_config.json"), _TEMPERATURE))
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(tokens):
        raise ArgumentError(expected("at least one token", of="--prompt", got="none", do="give a text to encode"))
    model = from_pretrained(folder, recipe, dtype=dtype, device=device)
    assert isinstance(model, EncoderDecoderModel)
    if arguments.executor is not None:
        model.compile(arguments.executor)
    samplings = [replace(sampling, seed=arguments.seed + i) for i in range(len(tokens))]
    ends = tokenizer.stop_tokens | set(model.blueprint.stop)
    began = time.perf_counter()
    texts = model.generate(tokens, count, samplings, stop_tokens=ends)
    seconds = time.perf_counter() - began
    columns = TextColumns(sys.stdout, [""] * len(texts))
    for place, text in enumerate(texts):
        stream = TextStream(tokenizer, stop)
        said = "".join(stream.push(token) for token in (text[:-1] if text[-1] in ends else text))
        columns.add(place, said + stream.finish(), ended=True)
    columns.finish()
    made = sum(map(len, texts))
    report = f"{made} tokens in {seconds:.2f} s ({made / seconds:.0f} a second), of {sum(map(len, tokens))} that were encoded"
    print(f"{report}; weights {parameter_bytes(model) / 1e6:.2f} MB", file=sys.stderr)
    return 0
