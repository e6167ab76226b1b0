"""``fusible generate``: from a saved run, or a Hugging Face directory, to text."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from fusible.cli.generation.directory_job import continue_prompts
from fusible.cli.generation.engine import generate
from fusible.cli.generation.loading import is_model_folder
from fusible.cli.generation.options import check_counts, named_as_options
from fusible.cli.generation.printing import TextStream
from fusible.cli.training.checkpoint import Checkpoint
from fusible.cli.training.layout import load_runs
from fusible.cli.training.model import ByteGPT
from fusible.cli.training.options import check_executor
from fusible.errors import ArgumentError, expected
from fusible.machine import available_memory
from fusible.models.generation import Sampling
from fusible.pytorch import KVCache, MultiHeadedSelfAttention, parameter_bytes, quantize_parameters

__all__ = ["generate_text"]

_BYTES, _TEMPERATURE, _EXECUTOR = 200, 0.8, "eager"
_OF_RUNS = ("bytes", "recipe")
_OF_DIRECTORIES = ("chat", "system", "max_tokens", "top_p", "min_p", "repetition_penalty", "stop", "format", "device", "max_memory")


def generate_text(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if arguments.executor is not None:
        check_executor(arguments.executor)
    if is_model_folder(Path(arguments.folder)):
        _refuse(arguments, _OF_RUNS, "a run of 'fusible train'", "a Hugging Face directory")
        return continue_prompts(arguments)
    _refuse(arguments, _OF_DIRECTORIES, "a Hugging Face directory", "another DIR")
    return _continue_bytes(arguments)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], wanted: str, got: str) -> None:
    """Options of the other kind of DIR: what they ask for is not silently left out."""
    for name in names:
        if getattr(arguments, name) is not None and getattr(arguments, name) is not False:  # 0 is given
            raise ArgumentError(expected(wanted, of=f"--{name.replace('_', '-')}", got=got, do="leave it out"))


def _continue_bytes(arguments: argparse.Namespace) -> int:
    count = _BYTES if arguments.bytes is None else arguments.bytes
    with named_as_options():
        sampling = Sampling(_TEMPERATURE if arguments.temperature is None else arguments.temperature, arguments.top_k)
    check_counts({"--bytes": count})
    prompts = [prompt.encode() for prompt in arguments.prompt or ["\n"]]
    if not all(prompts):
        raise ArgumentError(expected("at least one byte", of="--prompt", got="none", do="give a text to go on from"))
    model = load_model(Path(arguments.folder), arguments.recipe, arguments.executor or _EXECUTOR)
    longest = max(map(len, prompts)) + count
    _check_memory(model, len(prompts) * longest)
    cache = KVCache(len(prompts), longest, page_size=arguments.page_size, dtype=model.activation)
    stream = TextStream(sys.stdout, prompts)
    generator = torch.Generator().manual_seed(arguments.seed)
    began, made = time.perf_counter(), 0
    try:
        for tokens in generate(model.next_bytes, [list(prompt) for prompt in prompts], count, sampling, generator, cache):
            stream.add(tokens)
            made += len(tokens)
    finally:
        stream.finish()
    seconds = time.perf_counter() - began
    weights = parameter_bytes(model)
    report = f"{made} bytes in {seconds:.2f} s ({made / seconds:.0f} a second); weights {weights / 1e6:.2f} MB, cache {cache.nbytes / 1e6:.2f} MB"
    print(report, file=sys.stderr)
    return 0


def _check_memory(model: ByteGPT, tokens: int) -> None:
    """Raises ``ArgumentError`` if the keys and values of ``tokens`` do not fit in memory, before anything is allocated."""
    layers = sum(isinstance(module, MultiHeadedSelfAttention) for module in model.modules())
    needed, there = 2 * layers * tokens * model.hidden * model.activation.itemsize, available_memory()
    if needed > there:
        what = f"at most the {there / 2**30:,.1f} GiB of memory that are left"
        got = f"{tokens} bytes in all, whose keys and values need {needed / 2**30:,.1f} GiB"
        raise ArgumentError(expected(what, of="the prompts and --bytes", got=got, do="give fewer"))


def load_model(folder: Path, recipe: str | None, executor: str = "eager") -> ByteGPT:
    """The model of a run, its weights held as its recipe quantizes them alone."""
    checkpoint = _checkpoint(folder, recipe)
    model = ByteGPT(replace(checkpoint.options, executor=executor), checkpoint.recipe)
    model.load_state_dict(checkpoint.model)
    model.eval()
    return model if model.recipe.high_precision() else quantize_parameters(model, recipe=model.recipe)


def _checkpoint(folder: Path, recipe: str | None) -> Checkpoint:
    _, checkpoints = load_runs(folder, "DIR")
    if recipe is None:
        if len(checkpoints) == 1:
            return next(iter(checkpoints.values()))
        recipe = next((name for name in ("delayed", "current") if name in checkpoints), next(iter(checkpoints)))
    if recipe not in checkpoints:
        raise ArgumentError(expected(f"one of {', '.join(checkpoints)}", of="--recipe", got=recipe, do="name a recipe that was trained"))
    return checkpoints[recipe]
