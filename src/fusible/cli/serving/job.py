"""``fusible serve``: from a directory to a server that runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from fusible.cli.generation.loading import default_sampling, load_text_model, make_engine
from fusible.cli.generation.options import check_counts
from fusible.cli.generation.sizes import parse_size
from fusible.cli.serving.limits import Limits
from fusible.cli.serving.service import ServedModel, Service
from fusible.errors import ArgumentError, expected
from fusible.models.text.libraries import library

__all__ = ["serve"]

_TEMPERATURE = 1.0
"""Of requests that say nothing, where the directory does not either: the interface's default."""


def serve(arguments: argparse.Namespace) -> int:
    """Run the command, until a signal ends it, and return its exit code."""
    limits = Limits(
        arguments.max_tokens, arguments.concurrency, arguments.queue_seconds, arguments.request_seconds, arguments.grace_seconds, arguments.body_bytes
    )
    names = ("sequences", "context", "page_size", "pages", "tokens_per_step")
    check_counts({f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names})
    memory = None if arguments.max_memory is None else parse_size(arguments.max_memory, "--max-memory")
    if memory is not None and arguments.pages is not None:
        do = "give one of them: either says how much the keys and values take"
        raise ArgumentError(expected("no --pages beside it", of="--max-memory", got=f"--pages {arguments.pages}", do=do))
    if not 0 <= arguments.port < 2**16:
        raise ArgumentError(expected("a number from 0 to 65535", of="--port", got=arguments.port, do="give another"))
    library("starlette", "serve")
    server = library("uvicorn", "serve", module="fusible.cli.serving.server")
    with server.bind(arguments.host, arguments.port) as sock:  # an address that is taken is told before weights are read
        folder = Path(arguments.folder)
        loaded = load_text_model(folder, arguments.format, arguments.device)
        engine = make_engine(
            loaded,
            sequences=arguments.sequences,
            capacity=arguments.context,
            page_size=arguments.page_size,
            pages=arguments.pages,
            tokens_per_step=arguments.tokens_per_step,
            max_memory=memory,
        )
        name = arguments.name or folder.resolve().name
        served = ServedModel(name, engine, loaded.tokenizer, loaded.chat, default_sampling(loaded.generation, _TEMPERATURE))
        server.run(Service(served, limits), sock)
    return 0
