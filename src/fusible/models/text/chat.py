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
_DEFAULT, _TOOLS = "default", "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""By what names clients send what an assistant thought. Templates read the first, and those of gpt-oss the second."""


class ChatTemplate:
    """A jinja2 template of a conversation, run in a sandbox. ``special_tokens``: texts by name, which the template may use.

    ``source`` is what errors call it. ``of_tools``: the template of conversations with tools, where that is another one. Raises
    ``CheckpointError`` for what is no template.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "the chat template",
        *,
        of_tools: str | None = None,
    ) -> None:
        self._special, self._source = dict(special_tokens or {}), source
        self._jinja = library("jinja2")
        environment = library("jinja2", module="fusible.models.text.jinja").chat_environment()
        try:
            self._template = environment.from_string(template)
            self._of_tools = self._template if of_tools is None else environment.from_string(of_tools)
        except self._jinja.TemplateError as error:
            raise CheckpointError(expected("a jinja2 template", of=source, got=str(error), do="use an intact checkpoint")) from None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], special_tokens: Mapping[str, str] | None = None) -> Self | None:
        """The one of ``chat_template.jinja``, or else of ``chat_template.json`` or ``tokenizer_config.json``: of several the one named "default",
        or else the first, and with tools the one named "tool_use", which may lie in ``additional_chat_templates``. None where there is none."""
        place = Path(folder)
        template = _file(place / "chat_template.jinja")
        if template is not None:
            of_tools = _file(place / "additional_chat_templates" / f"{_TOOLS}.jinja")
            return cls(template, special_tokens, str(place / "chat_template.jinja"), of_tools=of_tools)
        for name in ("chat_template.json", "tokenizer_config.json"):
            named = _named(read_config(place, name).get("chat_template"))
            if named:
                default = named.get(_DEFAULT, next(iter(named.values())))
                return cls(default, special_tokens, f"chat_template of {place / name}", of_tools=named.get(_TOOLS))
        return None

    def render(self, /, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The text of ``messages``, each with a ``role`` and its ``content``; with ``add_generation_prompt``, up to where the assistant begins.

        ``more``: further variables of the template; with ``tools`` it is the one of tools. Raises ``ArgumentError`` for messages that it refuses.
        """
        plain = [_with_reasoning({name: value for name, value in message.items() if value is not None}) for message in messages]
        of_chat = {"messages": plain, "add_generation_prompt": add_generation_prompt}
        template = self._template if more.get("tools") is None else self._of_tools
        try:
            return template.render({"tools": None, "documents": None, **self._special, **more, **of_chat})
        except (self._jinja.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            got = f"what it refuses ({error})"
            raise ArgumentError(expected("a conversation that the chat template takes", of="messages", got=got, do="change them")) from None


def _file(path: Path) -> str | None:
    """The text of a template's file, or None where there is none."""
    try:
        return read_file(path, limit=_LIMIT).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError:
        got = "bytes that are no UTF-8"
        raise CheckpointError(expected("a jinja2 template", of=str(path), got=got, do="use an intact checkpoint")) from None


def _named(template: Any) -> dict[str, str]:
    """The templates of a JSON file by their names: a text is the default one."""
    if not isinstance(template, list):
        return {_DEFAULT: template} if isinstance(template, str) else {}
    pairs = [(one.get("name"), one.get("template")) for one in template if isinstance(one, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning by the names that templates read, whichever of them it came by."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
