"""Tokenizers that are trained on the license in a second, saved as directories of transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["CHATML", "KINDS", "LICENSE", "SPECIAL", "save_tokenizer", "trained"]

LICENSE = Path(__file__).parents[1] / "LICENSE"
"""A text that is the same wherever the tests run."""
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("byte level", "sentencepiece", "word pieces")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _texts() -> list[str]:
    return LICENSE.read_text(encoding="utf-8").split("\n\n") + ["Grüße, naïve café; 日本語のテキスト 🙂 — привет мир"] * 5


@functools.cache
def _serialized(kind: str, vocabulary: int) -> str:
    if kind == "byte level":  # as of GPT-2, Llama 3 and Qwen
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    elif kind == "sentencepiece":  # as of Llama 2, Mistral and Gemma: bytes of characters that it does not know
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=tokens, limit_alphabet=90, show_progress=False)
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(_texts(), trainer)
    if kind == "sentencepiece":  # the trainer takes the tokens of bytes for special ones, which are skipped
        text = made.to_str()
        for byte in range(256):
            start = text.index(f'"content":"<0x{byte:02X}>"')
            end = text.index('"special":true', start)
            text = text[:end] + '"special":false' + text[end + len('"special":true') :]
        return text
    return made.to_str()


def trained(kind: str = "byte level", vocabulary: int = 600) -> tokenizers.Tokenizer:
    """A tokenizer of the library."""
    return tokenizers.Tokenizer.from_str(_serialized(kind, vocabulary))


def save_tokenizer(
    folder: Path, kind: str = "byte level", vocabulary: int = 600, chat_template: str | dict[str, str] | None = CHATML
) -> PreTrainedTokenizerFast:
    """Write the tokenizer's files, and return transformers' own. ``chat_template``: one, or several by name."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained(kind, vocabulary), unk_token="<unk>", bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[3:]
    )
    made.chat_template = chat_template
    made.save_pretrained(folder)
    return made
