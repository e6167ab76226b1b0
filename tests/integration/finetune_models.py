"""What trainings of models start from: small checkpoints of transformers with tokenizers, and documents."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from convert_families import transformers
from tiny_tokenizers import save_tokenizer

from fusible.models.training import Corpus, PackedBatch

__all__ = ["WORDS", "checkpoint", "corpus_of", "documents", "new_model", "pieces", "texts"]

WORDS = 600
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
    return [topics[name][:2000] for name in sorted(topics)[:count]]


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


transformers.logging.disable_progress_bar()
