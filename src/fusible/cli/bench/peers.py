"""The table ``peers``: the decoder of ``generation`` beside llama.cpp."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fusible import pytorch as fusible
from fusible.cli.bench.generation import DECODER_1B, FusibleDecoder
from fusible.cli.bench.llama_cpp import PACKAGES, Times, TokenSource, installed, write_gguf
from fusible.cli.bench.plain import DecoderShape, PlainDecoder
from fusible.cli.bench.table import Measured, Row, Settings
from fusible.models.weight_formats import WEIGHT_FORMATS

__all__ = ["peers"]

_QUICK = DecoderShape(layers=2, hidden=64, heads=4, groups=2, inner=128, vocabulary=320)
_BESIDE = {"Q8_0": ("fp8",), "Q4_0": ("nvfp4", "mxfp4")}
"""The formats of weights that stand beside one of llama.cpp's."""
_TOKENS = {"Q8_0": 1.15, "Q4_0": 1.1}
_PROMPTS = 2.5
_MOST_ROUNDS = 5
_REST = 0.2
"""Seconds after which threads that wait for more by spinning have gone to sleep."""


class _Ours:
    def __init__(self, shape: DecoderShape, recipe: fusible.Recipe | None) -> None:
        self._decoder = FusibleDecoder(shape, recipe=recipe)

    def generate(self, prompt: Sequence[int], count: int) -> Times:
        decoder = self._decoder
        decoder.start(1, len(prompt) + count)
        began = time.perf_counter()
        token = decoder.step(torch.tensor([prompt])).argmax(-1, keepdim=True)
        first, after = int(token), time.perf_counter()
        for _ in range(count - 1):
            token = decoder.step(token).argmax(-1, keepdim=True)
        return Times(after - began, (time.perf_counter() - after) / (count - 1), first)


def peers(settings: Settings) -> Measured:
    """One sequence in FP8 beside llama.cpp in Q8_0, and in formats of 4 bits beside Q4_0, of the same weights, by whichever of its packages is
    installed: from the registry (``xllamacpp``), or built for this machine (``llama_cpp``). Its files are written by ``gguf``."""
    measured = Measured(beside="llama.cpp")
    found = [name for name in PACKAGES if installed(name)]
    if not found or not installed("gguf"):
        do = "pip install 'fusible[peers]', or gguf and llama-cpp-python, which is built for this machine"
        measured.notes.append(f"llama.cpp is left out, for it is not installed: {do}.")
        return measured
    shape, length, count = (_QUICK, 8, 4) if settings.quick else (DECODER_1B, 128, 32)
    prompt = torch.randint(shape.vocabulary, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = PlainDecoder(shape)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for theirs, beside in _BESIDE.items():
            file = Path(folder) / f"{theirs}.gguf"
            write_gguf(file, plain, theirs)
            sources: dict[str, TokenSource] = {name: PACKAGES[name](file, length + count, settings.threads) for name in found}
            sources |= {ours: _Ours(shape, WEIGHT_FORMATS[ours]) for ours in beside}
            times = _take_turns(sources, prompt, count, min(settings.rounds, _MOST_ROUNDS))
            for ours, name in itertools.product(beside, found):
                measured.rows += _rows(f"{ours.upper()} beside {theirs} of {name}", times[name], times[ours], length, _TOKENS[theirs])
            firsts = ", ".join(f"{name} {each.first}" for name, each in times.items())
            measured.notes.append(f"Beside {theirs}: the first token after the prompt is {firsts}.")
    return measured


def _rows(what: str, theirs: Times, ours: Times, length: int, target: float) -> Iterator[Row]:
    yield Row(f"{what}: decoding", "tokens/s", 1 / theirs.token, 1 / ours.token, target)
    yield Row(f"{what}: a prompt of {length}", "tokens/s", length / theirs.prompt, length / ours.prompt, _PROMPTS)


def _take_turns(sources: Mapping[str, TokenSource], prompt: Sequence[int], count: int, rounds: int) -> dict[str, Times]:
    """The medians of each. The first turn of each is not counted: it plans, and reads the file."""
    runs: dict[str, list[Times]] = {name: [] for name in sources}
    for turn, (name, source) in itertools.product(range(1 + rounds), sources.items()):
        time.sleep(_REST)
        times = source.generate(prompt, count)
        if turn:
            runs[name].append(times)
    return {
        name: Times(statistics.median(t.prompt for t in times), statistics.median(t.token for t in times), times[0].first)
        for name, times in runs.items()
    }
