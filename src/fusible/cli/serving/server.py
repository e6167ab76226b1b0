"""Runs the application by uvicorn, until a signal ends it in peace."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType

import uvicorn

from fusible.cli.serving.app import application
from fusible.cli.serving.service import Service
from fusible.errors import ArgumentError, expected

__all__ = ["Server", "bind", "run"]

_AFTER_GRACE = 3
"""Seconds for answers that were ended to be sent."""


def bind(host: str, port: int) -> socket.socket:
    """A socket for the server; clients are refused until it runs. Raises ``ArgumentError`` where there can be none."""
    with ExitStack() as undone:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # Named, the protocol tells asyncio to send at once: else a stream's second piece waits 40 ms, for the client to acknowledge its first.
            made = undone.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except (OSError, OverflowError, UnicodeError) as error:
            got = f"{host}:{port} ({getattr(error, 'strerror', None) or error})"
            raise ArgumentError(expected("an address that is free", of="--host and --port", got=got, do="name another")) from None
        undone.pop_all()
    return made


class Server(uvicorn.Server):
    """uvicorn's server of ``service``. A signal to end closes the service, which refuses what is new and finishes what runs."""

    def __init__(self, service: Service) -> None:
        grace = int(service.limits.grace_seconds) + _AFTER_GRACE
        super().__init__(uvicorn.Config(application(service), log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=grace))
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal's handler. A second Ctrl-C waits for no request, only for the step that runs."""
        self._service.close()
        super().handle_exit(sig, frame)

    def work(self, sock: socket.socket) -> None:
        """Serve on ``sock`` until told to end: the engine in this thread, HTTP in one of its own.

        OpenMP keeps a team for each thread that kernels were called from, and lets teams that have more threads than there are cores sleep between
        two kernels. A model that one thread has read and another one runs has two: its steps take up to 1.9 times as long.
        """
        with ThreadPoolExecutor(1, "fusible-http") as threads:
            http = threads.submit(self.run, sockets=[sock])
            http.add_done_callback(lambda _: self._service.halt())
            try:
                self._service.work()
            finally:
                self.should_exit = True
        http.result()


def run(service: Service, sock: socket.socket) -> None:
    """Serve on ``sock`` until the process is told to end."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = Server(service)
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {sig: signal.signal(sig, server.handle_exit) for sig in signals}
    try:
        print(f"Serving {service.served.name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
        server.work(sock)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
