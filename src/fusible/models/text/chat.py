"""``ChatTemplate``: from the messages of a conversation to the text that a model continues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fusible.errors import ArgumentError, CheckpointError, MissingFileError, expected
from fusible.files import read_file
from fusible.models.text.config_files import read_config
from fusible.models.text.libraries import library

__all__ = ["ChatTemplate"]

_LIMIT = 4 * 2**20
_DEFAULT = "default"


class ChatTemplate:
    """A jinja2 template of a conversation, run in a sandbox. ``special_tokens``: texts by name, which the template may use.

    ``source`` is what errors call it. Raises ``CheckpointError`` for what is no template.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str] | None = None, source: str = "the chat template") -> None:
        self._special, self._source = dict(special_tokens or {}), source
        self._jinja = library("jinja2")
        environment = library("jinja2", module="fusible.models.text.jinja").chat_environment()
        try:
            self._template = environment.from_string(template)
        except self._jinja.TemplateError as error:
            raise CheckpointError(expected("a jinja2 template", of=source, got=str(error), do="use an intact checkpoint")) from None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], special_tokens: Mapping[str, str] | None = None) -> Self | None:
        """The one of ``chat_template.jinja``, or else of ``chat_template.json`` or ``tokenizer_config.json``: of several the one named "default",
        or else the first. None where there is none."""
        place = Path(folder)
        try:
            content = read_file(place / "chat_template.jinja", limit=_LIMIT)
            return cls(content.decode(), special_tokens, str(place / "chat_template.jinja"))
        except MissingFileError:
            pass
        except UnicodeDecodeError:
            of, got = str(place / "chat_template.jinja"), "bytes that are no UTF-8"
            raise CheckpointError(expected("a jinja2 template", of=of, got=got, do="use an intact checkpoint")) from None
        for name in ("chat_template.json", "tokenizer_config.json"):
            template = _chosen(read_config(place, name).get("chat_template"))
            if template is not None:
                return cls(template, special_tokens, f"chat_template of {place / name}")
        return None

    def render(self, /, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The text of ``messages``, each with a ``role`` and its ``content``; with ``add_generation_prompt``, up to where the assistant begins.

        ``more``: further variables of the template. Raises ``ArgumentError`` for messages that the template refuses.
        """
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        of_chat = {"messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({"tools": None, "documents": None, **self._special, **more, **of_chat})
        except (self._jinja.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            got = f"what it refuses ({error})"
            raise ArgumentError(expected("a conversation that the chat template takes", of="messages", got=got, do="change them")) from None


def _chosen(template: Any) -> str | None:
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template if isinstance(one, dict) and {"name", "template"} <= one.keys()}
        template = named.get(_DEFAULT, next(iter(named.values()), None))
    return template if isinstance(template, str) else None
