"""The environment of chat templates, as transformers defines it: a sandbox with a few functions more."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["chat_environment"]


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant says, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """An environment for templates that nobody has read: they get at no attribute that is private, and change no argument."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as it is written in prompts; jinja2's own filter writes ``<`` as an escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
