"""From a Hugging Face directory to what goes on from text: its model, tokenizer, chat template, and an engine that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusible.cli.devices import device_named
from fusible.cli.generation.sizes import bytes_per_token, pages_within
from fusible.cli.weight_formats import recipe_of_format
from fusible.errors import ArgumentError, CheckpointError, DTypeError, expected
from fusible.machine import available_memory, resident_memory
from fusible.models.blueprints import EncoderDecoderBlueprint
from fusible.models.families import FAMILIES, Config, blueprint_of, check_causal
from fusible.models.generation import Engine, NextTokenModel, Sampling
from fusible.models.pretrained import language_model_from
from fusible.models.text import ChatTemplate, Tokenizer
from fusible.models.text.config_files import read_config
from fusible.models.tokens import Tokens
from fusible.models.weight_formats import weight_recipe

__all__ = ["TextModel", "default_sampling", "encodes_text", "is_model_folder", "load_language_model", "load_text_model", "make_engine"]

_SHARE = {"cpu": 0.5}
_SHARE_OF_OTHERS = 0.9
"""Of the memory that is there, what keys and values may take, by the kind of device: activations need some too, and on a CPU other programs do."""


@dataclass
class TextModel:
    """A model with what turns text into its tokens. ``config``: of ``config.json``. ``sampling``: of ``generation_config.json``."""

    folder: Path
    model: NextTokenModel
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    config: dict[str, Any]
    generation: dict[str, Any]


def is_model_folder(folder: Path) -> bool:
    """Whether ``folder`` is a Hugging Face directory. A run of ``fusible train`` has no ``config.json``."""
    return (folder / "config.json").is_file()


def encodes_text(folder: Path) -> bool:
    """Whether the model in ``folder`` is one that encodes a text, and writes another."""
    config = read_config(folder, "config.json") if is_model_folder(folder) else {}
    plan = blueprint_of(Config(config)) if config.get("model_type") in FAMILIES else None
    return isinstance(plan, EncoderDecoderBlueprint) and isinstance(plan.inputs, Tokens)


def load_language_model(folder: Path, format: str | None = None, device: torch.device | str = "cpu", executor: str | None = None) -> NextTokenModel:
    """The model in ``folder``, its weights held in ``format``, one of ``WEIGHT_FORMATS``; None for as they are. ``executor``: None for eager."""
    check_causal(read_config(folder, "config.json"), f"DIR {folder}")
    recipe = recipe_of_format(folder, format)
    model = language_model_from(folder, recipe, dtype=None if format is None else torch.bfloat16, device=device)
    return model if executor is None else model.compile(executor)


def load_text_model(folder: Path, format: str | None = None, device: str = "cpu", executor: str | None = None) -> TextModel:
    """All of ``folder``, the model on ``device``. What is wrong with options and small files is told first."""
    if format is not None:
        weight_recipe(format)
    place = device_named(device)
    if not is_model_folder(folder):
        got, do = "none", "name one that has a config.json, a tokenizer.json and weights"
        raise CheckpointError(expected("a Hugging Face directory", of=f"DIR {folder}", got=got, do=do))
    config, generation = read_config(folder, "config.json"), read_config(folder, "generation_config.json")
    tokenizer = Tokenizer.from_folder(folder)
    chat = ChatTemplate.from_folder(folder, tokenizer.special_tokens)
    return TextModel(folder, load_language_model(folder, format, place, executor), tokenizer, chat, config, generation)


def default_sampling(generation: Mapping[str, Any], temperature: float) -> Sampling:
    """What ``generation_config.json`` recommends; ``temperature`` where it says nothing of that."""

    def number(name: str, default: float) -> float:
        value = generation.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    top_k = number("top_k", 0)
    try:
        return Sampling(
            number("temperature", temperature),
            (int(top_k) if top_k % 1 == 0 else top_k) or None,  # pyright: ignore[reportArgumentType] - a fraction is refused there
            number("top_p", 1.0),
            number("min_p", 0.0),
            number("repetition_penalty", 1.0),
        )
    except (ArgumentError, DTypeError) as error:
        raise CheckpointError(f"generation_config.json: {error}") from None


def make_engine(
    loaded: TextModel,
    *,
    sequences: int,
    capacity: int | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    tokens_per_step: int = 512,
    max_memory: int | None = None,
) -> Engine:
    """An engine for ``sequences`` of ``capacity`` tokens (default: the model's context), in as many ``pages`` as the memory has room for.

    ``max_memory``: bytes that the process may take in all; by default what there is. Raises ``ArgumentError`` where too little is there.
    """
    context = loaded.model.context
    if (capacity or 1) > context:
        of, do = "the tokens of a sequence", "give a shorter prompt, or ask for fewer tokens"
        raise ArgumentError(expected(f"at most {context}, the context of the model", of=of, got=capacity, do=do))
    capacity, page_size = capacity or context, page_size or 16
    cache = loaded.model.new_cache(1, 1)
    token_bytes = bytes_per_token(loaded.config, cache.dtype.itemsize)
    if max_memory is not None and token_bytes is None:
        wanted, do = "a config.json that tells what a token's keys and values take", "leave it out"
        raise ArgumentError(expected(wanted, of="--max-memory", got="one that does not", do=do))
    if pages is None and token_bytes is not None:
        room = int(_SHARE.get(cache.device.type, _SHARE_OF_OTHERS) * _free(cache.device)) if max_memory is None else max_memory - _taken(cache.device)
        pages = pages_within(room, token_bytes, sequences=sequences, capacity=capacity, page_size=page_size)
    return Engine(loaded.model, sequences=sequences, capacity=capacity, page_size=page_size, pages=pages, tokens_per_step=tokens_per_step)


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def _taken(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_memory()
