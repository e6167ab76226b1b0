"""A Llama of 1.1 billion parameters, written by transformers with random weights, beside transformers in bf16.

``python -m benchmarks.pretrained`` measures generation, all contestants taking turns in one process, and training steps, each in a process of its own
for the sake of its memory: ``python -m benchmarks.pretrained CONTESTANT DIR`` prints the milliseconds and the megabytes of one of them.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import fusible
from fusible.cli.training.memory import PeakMemory
from fusible.machine import keep_freed_memory
from fusible.models.generation import generate
from fusible.models.training import add_adapters
from fusible.models.weight_formats import WEIGHT_FORMATS

__all__ = ["pretrained"]

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
HELD = ("fp8", "mxfp8", "nvfp4")
HELD_MOMENTS = {"full, delayed, bf16 moments": (BF16, BF16), "full, delayed, fp8 moments": (torch.uint8, torch.float16)}
"""Steps in backward, and what moments are held in: as torch holds them beside parameters in bf16, and in fewer bits."""
STEPS = ("full, transformers", "full, delayed", *HELD_MOMENTS, "lora, transformers", "lora, delayed, weights in fp8")
_THREADS, _ROUNDS, _PROMPT, _TOKENS, _LONG = 2, 3, 32, 16, 512

Call = Callable[[], object]


def write_checkpoint(folder: Path) -> None:
    """The model, in bf16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(BF16).save_pretrained(folder)


def pretrained() -> list[dict[str, Any]]:
    """Milliseconds of generating and of training steps, and megabytes of these. No target."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        return [*_generation(Path(folder)), *_training(Path(folder))]


def _generation(folder: Path) -> list[dict[str, Any]]:
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).eval()
    ours = {name: fusible.from_pretrained(folder, WEIGHT_FORMATS[name], dtype=BF16).eval() for name in HELD}

    def by_transformers(prompts: torch.Tensor, tokens: int) -> Call:
        chosen = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return lambda: theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **chosen)

    rows = []
    with torch.inference_mode():
        for batch, length in ((1, _PROMPT), (8, _PROMPT), (1, _LONG)):
            prompts = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(batch))
            calls = {}
            for tokens in (1, 1 + _TOKENS):
                calls["transformers", tokens] = by_transformers(prompts, tokens)
                for name, model in ours.items():
                    calls[name, tokens] = lambda model=model, prompts=prompts, tokens=tokens: generate(model, prompts, tokens)
            times = _take_turns(calls)
            contestants = ["transformers", *ours]
            if length == _PROMPT:
                token = {name: (times[name, 1 + _TOKENS] - times[name, 1]) / _TOKENS for name in contestants}
                rows.append({"what": f"a further token of {batch} sequence{'s' * (batch > 1)}, ms", **token})
            else:
                rows.append({"what": f"a prompt of {length} tokens, ms", **{name: times[name, 1] for name in contestants}})
    return rows


def _take_turns(calls: dict[Any, Call]) -> dict[Any, float]:
    found: dict[Any, list[float]] = {key: [] for key in calls}
    for turn in range(1 + _ROUNDS):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                found[key].append(1e3 * (time.perf_counter() - start))
    return {key: median(times) for key, times in found.items()}


def _training(folder: Path) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STEPS}
    for _ in range(_ROUNDS):
        for name in STEPS:
            command = [sys.executable, "-m", "benchmarks.pretrained", name, str(folder)]
            found[name].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]))
    return [{"what": name, **{key: median(run[key] for run in runs) for key in ("ms", "MB")}} for name, runs in found.items()]


def _step(name: str, folder: str) -> Call:
    kind, contestant, *_ = name.split(", ")
    tokens = torch.randint(3, SIZES["vocab_size"], (1, _LONG), generator=torch.Generator().manual_seed(0))
    model: Any
    if contestant == "transformers":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).train()
        if kind == "lora":
            sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # PEFT asks for it, which raises where its compiled part is missing
            peft = importlib.import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    elif kind == "lora":
        model = fusible.from_pretrained(folder, WEIGHT_FORMATS["fp8"], dtype=BF16)
        model.recipe = fusible.DelayedScaling()
        add_adapters(model, 16, 32.0)
    else:
        model = fusible.from_pretrained(folder, fusible.DelayedScaling(), dtype=BF16, trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _in_backward(trained, *HELD_MOMENTS[name]) if name in HELD_MOMENTS else torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens).logits if contestant == "transformers" else model(tokens)
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).backward()
        optimizer.step()

    return step


def _in_backward(trained: list[torch.Tensor], first: torch.dtype, second: torch.dtype) -> torch.optim.Optimizer:
    optimizer = fusible.FusedAdam(trained, lr=1e-5, weight_decay=1e-2, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    optimizer.step_in_backward()
    return optimizer


def _begin() -> None:
    keep_freed_memory()
    torch.set_num_threads(_THREADS)


def _main(name: str, folder: str) -> None:
    _begin()
    with PeakMemory(interval=1e-2) as memory:
        step, times = _step(name, folder), []
        for _ in range(5):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"ms": median(times[2:]), "MB": memory.peak / 1e6}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _main(*sys.argv[1:])
    else:
        _begin()
        for row in pretrained():
            print({key: value if isinstance(value, str) else round(value, 1) for key, value in row.items()})
