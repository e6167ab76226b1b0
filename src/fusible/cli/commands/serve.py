"""``fusible serve``."""

from __future__ import annotations

import argparse

from fusible.cli.command import Command

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Serves the model of a Hugging Face directory over HTTP, in the interface of OpenAI: /v1/completions, /v1/chat/completions, /v1/models, and
/health. Many requests are computed at once, in pages of keys and values that they share out. SIGTERM and Ctrl-C let what runs finish."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    def number(group: argparse._ActionsContainer, name: str, text: str, default: float | None, kind: type = int) -> None:
        note = "" if default is None else f" (default: {default})"
        group.add_argument(f"--{name}", metavar="N" if kind is int else "X", type=kind, default=default, help=text + note)

    parser.add_argument("folder", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--host", metavar="HOST", default="127.0.0.1", help="the address to serve at (default: 127.0.0.1, this machine alone)")
    number(parser, "port", "0 for any that is free", 8000)
    parser.add_argument("--name", metavar="NAME", help="what clients call the model (default: the name of DIR)")
    parser.add_argument("--format", metavar="F", help="what weights are held in: bf16, fp8, block, mxfp8, nvfp4 or mxfp4 (default: as they are)")
    parser.add_argument("--device", metavar="D", default="cpu", help="where the model is, e.g. cuda (default: cpu)")
    memory = parser.add_argument_group("memory")
    number(memory, "sequences", "requests that are computed at once", 16)
    number(memory, "context", "tokens of a request, prompt and answer (default: what the model has)", None)
    number(memory, "page-size", "tokens of a page of keys and values", 16)
    number(memory, "pages", "pages in all (default: for all sequences, if they fit in memory)", None)
    memory.add_argument("--max-memory", metavar="SIZE", help="what the process may take in all, e.g. 24GiB (default: what there is)")
    number(memory, "tokens-per-step", "how much of prompts is read between two tokens of a text", 512)
    limits = parser.add_argument_group("limits")
    number(limits, "max-tokens", "that a request may ask for (default: what fits in its context)", None)
    number(limits, "concurrency", "requests at once, those that wait included; others are told to come back", 256)
    number(limits, "queue-seconds", "that a request waits at most", 60.0, float)
    number(limits, "request-seconds", "that a request takes at most", 600.0, float)
    number(limits, "grace-seconds", "for what runs when the server is told to end", 30.0, float)
    number(limits, "body-bytes", "of a request", 4 * 2**20)


COMMAND = Command(
    name="serve",
    summary="serve a model over HTTP",
    description=_DESCRIPTION,
    arguments=_arguments,
    job="fusible.cli.serving.job:serve",
)
