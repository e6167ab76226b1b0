"""The families by the ``model_type`` of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusible.errors import CheckpointError, expected
from fusible.models.blueprints import AnyBlueprint, EncoderBlueprint
from fusible.models.families.config import Config
from fusible.models.parts import Blueprint

__all__ = ["FAMILIES", "Reader", "blueprint_of", "check_causal", "family", "left_to_chance"]

Reader = Callable[[Config], AnyBlueprint]
"""Makes a blueprint of a configuration. Raises ``CheckpointError`` for what its models are not made with."""

FAMILIES: dict[str, Reader] = {}
_OF_CHANCE = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_jitter_noise")
"""Entries of a decoder's configuration that count while transformers trains it, and that our models do not have: dropout, and a router's noise."""
_USUAL: dict[str, Mapping[str, float]] = {}
"""Of ``_OF_CHANCE``, by family, what is more than 0 where a file leaves it out."""


def family(*model_types: str, **usual: float) -> Callable[[Reader], Reader]:
    """Register a reader of the configurations of ``model_types``. ``usual``: the defaults above 0 of entries that ``left_to_chance`` names."""

    def register(reader: Reader) -> Reader:
        FAMILIES.update(dict.fromkeys(model_types, reader))
        _USUAL.update(dict.fromkeys(model_types, usual))
        return reader

    return register


def blueprint_of(config: Config) -> AnyBlueprint:
    """The blueprint of a model. Raises ``CheckpointError`` for a family that is not known, and for entries that it is not made with."""
    reader = FAMILIES.get(config.model_type)
    if reader is None:
        do = "load it by transformers, and convert it by fusible.convert"
        raise CheckpointError(expected(f"one of {', '.join(sorted(FAMILIES))}", of="model_type of config.json", got=repr(config.model_type), do=do))
    blueprint = reader(config)
    if isinstance(blueprint, Blueprint):
        config.check_language_model()
    causal = {Blueprint: True, EncoderBlueprint: False}.get(type(blueprint))
    if causal is None and "is_causal" in config.entries:  # transformers takes it for both halves
        raise config.refuse("is_causal", "none")
    config.require(is_causal=causal)
    return blueprint


def left_to_chance(entries: Mapping[str, Any]) -> dict[str, float]:
    """What a decoder's configuration says is left to chance in training, dropout above all: entries above 0. Our models compute none of it."""
    known = {**_USUAL.get(str(entries.get("model_type")), {}), **entries}
    return {name: known[name] for name in _OF_CHANCE if isinstance(known.get(name), int | float) and known[name] > 0}


def check_causal(entries: Mapping[str, Any], of: str) -> None:
    """Raise ``CheckpointError`` for the configuration of a model that is more than a decoder, or none, and what ``blueprint_of`` raises. ``of``:
    where it is from."""
    config = Config(entries)
    if not isinstance(blueprint_of(config), Blueprint):
        do = "call it from Python, as fusible.from_pretrained gives it"
        raise CheckpointError(expected("a causal language model", of=of, got=f"a {config.model_type} model", do=do))
