"""The small JSON files of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusible.errors import CheckpointError, MissingFileError, expected
from fusible.files import parse_json, read_file

__all__ = ["read_config", "token_text"]

_LIMIT = 64 * 2**20


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """The object in ``folder/name``; an empty one where there is no such file. Raises ``CheckpointError`` for anything else."""
    try:
        content = read_file(folder / name, limit=_LIMIT)
    except MissingFileError:
        return {}
    value = parse_json(content, of=str(folder / name), unbounded=True)
    if not isinstance(value, dict):
        got = f"a {type(value).__name__}"
        raise CheckpointError(expected("an object", of=str(folder / name), got=got, do="use an intact checkpoint"))
    return value


def token_text(value: Any) -> str | None:
    """A token as those files write it: as a text, or as an object with its ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
