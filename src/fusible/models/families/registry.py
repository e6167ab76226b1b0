"""The families by the ``model_type`` of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from fusible.errors import CheckpointError, expected
from fusible.models.families.config import Config
from fusible.models.parts import Blueprint

__all__ = ["FAMILIES", "Reader", "blueprint_of", "family"]

Reader = Callable[[Config], Blueprint]
"""Makes a blueprint of a configuration. Raises ``CheckpointError`` for what its models are not made with."""

FAMILIES: dict[str, Reader] = {}


def family(*model_types: str) -> Callable[[Reader], Reader]:
    """Register a reader of the configurations of ``model_types``."""

    def register(reader: Reader) -> Reader:
        FAMILIES.update(dict.fromkeys(model_types, reader))
        return reader

    return register


def blueprint_of(config: Config) -> Blueprint:
    """The blueprint of a model. Raises ``CheckpointError`` for a family that is not known, and for entries that it is not made with."""
    reader = FAMILIES.get(config.model_type)
    if reader is None:
        do = "load it by transformers, and convert it by fusible.convert"
        raise CheckpointError(expected(f"one of {', '.join(sorted(FAMILIES))}", of="model_type of config.json", got=repr(config.model_type), do=do))
    return reader(config)
