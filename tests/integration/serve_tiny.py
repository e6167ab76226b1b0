"""A server of a tiny model: in a thread of the tests, or as a program that is sent signals."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from tiny_language_models import SlowModel, TinyModel
from tiny_tokenizers import CHATML, trained

from fusible.cli.serving.limits import Limits
from fusible.cli.serving.server import Server, bind, run
from fusible.cli.serving.service import ServedModel, Service
from fusible.models.generation import Engine
from fusible.models.text import ChatTemplate, Tokenizer

__all__ = ["VOCABULARY", "Running", "served", "serving", "tokenizer"]

VOCABULARY = 600


def tokenizer() -> Tokenizer:
    return Tokenizer(trained("byte level", VOCABULARY), {"bos_token": "<s>", "eos_token": "</s>"})


def served(model: TinyModel | None = None, **settings: Any) -> ServedModel:
    engine = Engine(model or TinyModel(VOCABULARY), **{"sequences": 8, "page_size": 16, **settings})
    return ServedModel("tiny", engine, tokenizer(), ChatTemplate(CHATML))


class Running:
    """A server, and where it is."""

    def __init__(self, service: Service) -> None:
        self.sock = sock = bind("127.0.0.1", 0)
        self.service, self.server, self.port = service, Server(service), sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.work, args=(sock,))
        self.thread.start()
        self.wait(lambda: self.server.started)

    @staticmethod
    def wait(holds: Any, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        return self.service.open == 0 and not self.service.served.engine.busy


@contextmanager
def serving(model: ServedModel, limits: Limits | None = None) -> Iterator[Running]:
    """A server in a thread."""
    running = Running(Service(model, limits or Limits()))
    try:
        yield running
    finally:
        running.server.should_exit = True
        running.thread.join()


if __name__ == "__main__":
    run(Service(served(SlowModel(VOCABULARY)), Limits(grace_seconds=float(sys.argv[1]))), bind("127.0.0.1", 0))
