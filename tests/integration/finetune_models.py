"""What trainings of models start from: small checkpoints of transformers with tokenizers, and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from convert_families import transformers
from tiny_tokenizers import LICENSE, save_tokenizer
from torch.nn import functional as F

from fusible.models.training import Corpus, Cosine, Order, PackedBatch, StepOptions, Windows

__all__ = [
    "EPS",
    "KINDS",
    "LENGTHS",
    "RATE",
    "SMALL",
    "WORDS",
    "checkpoint",
    "corpus_of",
    "documents",
    "metrics",
    "new_model",
    "options",
    "pieces",
    "plain_steps",
    "small_run",
    "texts",
]

WORDS = 600
SMALL = "--seq-len 32 --batch 4 --micro-batch 2 --lr 3e-3 --warmup 2 --decay-steps 8".split()
RATE = Cosine(3e-3, 2, 12, 0.1)
EPS = 2.0**-24
"""Of a rounding in fp32, relative."""
LENGTHS = [5, 40, 17, 1, 33, 2, 64, 9, 20, 70, 31, 12, 55, 8, 44, 90]
"""Of documents: shorter and longer than a window of 32."""

_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA |= {"vocab_size": WORDS, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": False}
_LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS, "initializer_range": 0.1, "attn_pdrop": 0.0}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 8}),
}


def new_model(kind: str = "llama", seed: int = 0) -> Any:
    """transformers' model of a kind, in fp32."""
    torch.manual_seed(seed)
    model, config, options = KINDS[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**options)).eval()


def checkpoint(folder: Path, kind: str = "llama") -> Path:
    """The directory that transformers writes of it, with a tokenizer."""
    new_model(kind).save_pretrained(folder)
    save_tokenizer(folder, vocabulary=WORDS)
    return folder


def texts(count: int = 6) -> list[str]:
    """Of 2,000 letters each."""
    whole = LICENSE.read_text(encoding="utf-8")
    return [whole[start : start + 2000] for start in range(0, count * 1000, 1000)]


def documents(path: Path, count: int = 6) -> Path:
    """A file of JSON lines."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(count)))
    return path


def corpus_of(lengths: list[int], seed: int = 1) -> Corpus:
    """Documents of these lengths, of tokens at random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (sum(lengths),), generator=generator, dtype=torch.int32)
    return Corpus(tokens, torch.ones(len(tokens), dtype=torch.bool), torch.tensor(lengths))


def pieces(batch: PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(tokens, targets)`` of each sequence by itself."""
    lengths = batch.seq_lens.tolist()
    return list(zip(batch.tokens.split(lengths), batch.targets.split(lengths), strict=True))


def options(batch: int = 4, micro_batch: int = 2, **more: Any) -> StepOptions:
    return StepOptions(batch, micro_batch, RATE, seed=3, **more)


def plain_steps(model: Any, windows: Windows, of: StepOptions, count: int) -> list[float]:
    """The same training with torch alone: every sequence by itself, the loss a mean over all tokens, torch's AdamW."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": of.weight_decay}]
    groups.append({"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=of.betas, eps=of.eps)
    order, losses = Order(len(windows), of.seed), list[float]()
    for step in range(count):
        batch = windows.batch(order.places(step, of.batch))
        summed = sum(F.cross_entropy(model(tokens[None]).logits[0].float(), targets, reduction="sum") for tokens, targets in pieces(batch))
        loss = summed / (batch.targets != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, of.clip)
        for group in optimizer.param_groups:
            group["lr"] = of.rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_run(place: Path, out: Path, *more: str) -> list[str]:
    """A command that trains the checkpoint ``place/base`` on the documents beside it."""
    return ["train", "--model", str(place / "base"), "--data", str(place / "documents.jsonl"), *SMALL, "--out", str(out), *more]


def metrics(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())


transformers.logging.disable_progress_bar()
