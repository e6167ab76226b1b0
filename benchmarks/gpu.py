"""Steps, casts and generation on a GPU: plain torch, Fusible on each backend that serves it there, and Transformer Engine and transformers where they
are installed.

``python -m benchmarks.gpu [--json FILE]``; it needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusible
from fusible import autocast, tex
from fusible.cli.bench.machine import describe_machine
from fusible.models import LanguageModel, from_pretrained
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.quantized import Float8CurrentScalingQuantizer, Recipe
from fusible.tex import DType
from fusible.tex.selection.registry import registry

__all__ = ["casts", "decoding", "mlp"]

Step = Callable[[], object]
ROUNDS, CALLS, WARM_UP = 7, 4, 6
TEXTS, TOKENS = 3, 12
"""How often a prompt is gone on from, behind one that warms up, and by how many tokens."""
SIZES = ((256, 256), (2048, 1024), (8192, 4096))
"""Tokens and width; the width inside is four times as much."""
RECIPES: dict[str, Recipe | None] = {"bf16": None, "delayed": fusible.DelayedScaling(), "current": fusible.Float8CurrentScaling()}


def mlp() -> list[dict[str, Any]]:
    """Milliseconds of forward and backward of ``LayerNorm, Linear, GELU, Linear`` with fp32 parameters under bf16, by each contestant."""
    rows = []
    for tokens, width in SIZES:
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        steps = {name: step for name, step in _contestants(width, x)}
        times = _side_by_side(steps)
        rows.append({"tokens x width": f"{tokens} x {width}", **{f"{name}_ms": seconds for name, seconds in times.items()}})
    return rows


def casts() -> list[dict[str, Any]]:
    """Milliseconds of a cast to E4M3 by the tensor's own scale, with the transpose, by each backend."""
    rows = []
    for rows_, columns in ((2048, 1024), (16384, 8192)):
        x = torch.randn(rows_, columns, device="cuda", dtype=torch.bfloat16)
        steps = {backend: _on(backend, partial(_cast, x)) for backend in _backends()}
        rows.append({"shape": f"{rows_} x {columns}", **{f"{name}_ms": seconds for name, seconds in _side_by_side(steps).items()}})
    return rows


def _cast(x: torch.Tensor) -> object:
    return tex.quantize(x, Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda")))


def decoding() -> list[dict[str, Any]]:
    """Milliseconds of a prompt and of a token behind it, of a Llama of 1.1 billion parameters: transformers in bf16, Fusible in each held format."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=32000, tie_word_embeddings=False)
    with torch.device("cuda"):
        theirs: Any = transformers.LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        theirs.to(torch.bfloat16).eval().save_pretrained(folder)
        read = {"transformers bf16": partial(_by_transformers, theirs)}
        for name, recipe in WEIGHT_FORMATS.items():
            read[f"Fusible {name}"] = partial(_by_fusible, from_pretrained(folder, recipe, dtype=torch.bfloat16, device="cuda"))
    rows = []
    for sequences, prompt in ((1, 128), (8, 128), (1, 1024)):
        tokens = torch.randint(3, 32000, (sequences, prompt), generator=torch.Generator().manual_seed(0)).cuda()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in read}
        for i in range(TEXTS + 1):
            for name, generate in read.items():
                found = generate(tokens)
                if i > 0:
                    times[name].append((found[0], statistics.median(found[1:])))
        for at, what in enumerate(("prompt", "token")):
            medians = {f"{name}_ms": 1e3 * statistics.median(pair[at] for pair in each) for name, each in times.items()}
            rows.append({"what": f"{what} of {sequences} x {prompt}", **medians})
    return rows


@torch.inference_mode()
def _by_fusible(model: LanguageModel, prompt: torch.Tensor) -> list[float]:
    lengths = torch.full((len(prompt),), prompt.shape[1], dtype=torch.int32)
    cache, tokens, times = model.new_cache(len(prompt), prompt.shape[1] + TOKENS), prompt.flatten(), list[float]()
    for _ in range(TOKENS):
        began = time.perf_counter()
        tokens = model.next_logits(tokens, lengths, cache).argmax(-1)
        tokens.tolist()
        cache.advance(lengths)
        times.append(time.perf_counter() - began)
        lengths = torch.ones_like(lengths)
    return times


@torch.inference_mode()
def _by_transformers(model: Any, prompt: torch.Tensor) -> list[float]:
    cache, tokens, times = None, prompt, list[float]()
    for _ in range(TOKENS):
        began = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
        tokens.tolist()
        times.append(time.perf_counter() - began)
    return times


def _backends() -> list[str]:
    return [name for name in ("torch", "nvidia") if registry.reason_unavailable(registry.find(name)) is None]


def _on(backend: str, step: Step) -> Step:
    def run() -> object:
        with tex.set_backend(backend):
            return step()

    return run


def _contestants(width: int, x: torch.Tensor) -> Iterator[tuple[str, Step]]:
    plain = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)).to("cuda", torch.bfloat16)
    yield "plain torch bf16", _step(plain, x)
    for backend in _backends():
        for name, recipe in RECIPES.items():
            layers = fusible.LayerNorm(width), fusible.Linear(width, 4 * width), fusible.GELU(), fusible.Linear(4 * width, width)
            model = fusible.Sequential(*layers).to("cuda", torch.bfloat16)
            yield f"{backend} {name}", _on(backend, _step(model, x, autocast, recipe))
    if "nvidia" in _backends():
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]
        from transformer_engine.common import recipe as recipes  # type: ignore[import-not-found]

        theirs = {"bf16": None, "delayed": recipes.DelayedScaling(), "current": recipes.Float8CurrentScaling()}
        for name, recipe in theirs.items():
            model = te.LayerNormMLP(width, 4 * width, params_dtype=torch.bfloat16, device="cuda")
            yield f"Transformer Engine {name}", _step(model, x, te.autocast, recipe)


def _step(model: nn.Module, x: torch.Tensor, autocast: Any = None, recipe: Any = None) -> Step:
    dy = torch.randn_like(x)

    def run() -> None:
        with nullcontext() if autocast is None else autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(dy)

    return run


def _side_by_side(steps: dict[str, Step]) -> dict[str, float]:
    """Milliseconds of each, medians over rounds in which all take turns; by events, so the launches count where the GPU waits for them."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            with _clock(times[name]):
                for _ in range(CALLS):
                    step()
    return {name: statistics.median(each) / CALLS for name, each in times.items()}


@contextmanager
def _clock(into: list[float]) -> Iterator[None]:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    yield
    ended.record()
    ended.synchronize()
    into.append(began.elapsed_time(ended))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    results = {"machine": {**describe_machine(), "gpu": torch.cuda.get_device_name()}, "mlp": mlp(), "casts": casts(), "decoding": decoding()}
    print(json.dumps(results, indent=2))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
