"""Streams and events of a device whose work is done when it is asked for."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from fusible.compat.device_map.mode import CPU
from fusible.errors import ArgumentError, expected

__all__ = ["AnyEvent", "AnyStream", "Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream"]


class AnyStream:
    """A stream of work that is done when it is asked for. Streams are told apart by ``cuda_stream``, of the default one 0."""

    device = CPU
    device_index = 0
    device_type = 1
    priority = 0
    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AnyStream._made += 1
        self.cuda_stream = self.stream_id = self.native_handle = AnyStream._made

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest: there is one."""
        return 0, 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: AnyEvent | None = None) -> AnyEvent:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> AnyStream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Stream(AnyStream):
    """``torch.cuda.Stream``."""


class AnyEvent:
    """A moment; between two of them ``elapsed_time`` is in milliseconds."""

    device = CPU
    cuda_event = event_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: AnyEvent) -> float:
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


class Event(AnyEvent):
    """``torch.cuda.Event``."""


_DEFAULT = Stream()
_DEFAULT.cuda_stream = _DEFAULT.stream_id = _DEFAULT.native_handle = 0
_current: ContextVar[AnyStream] = ContextVar("current stream", default=_DEFAULT)


class StreamContext:
    """``torch.cuda.stream(stream)``: within, ``current_stream()`` is ``stream``; None changes nothing."""

    def __init__(self, stream: AnyStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._former = _current.get()
        set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        _current.set(self._former)


def default_stream(device: Any = None) -> Stream:
    """The stream of those who ask for none."""
    return _DEFAULT


def current_stream(device: Any = None) -> AnyStream:
    """The stream that was chosen here."""
    return _current.get()


def set_stream(stream: AnyStream | None) -> None:
    """Choose a stream; None changes nothing. Raises ``ArgumentError`` for what is none."""
    if stream is not None:
        if not isinstance(stream, AnyStream):
            raise ArgumentError(expected("a torch.cuda.Stream", of="the stream to choose", got=repr(stream), do="make one by torch.cuda.Stream()"))
        _current.set(stream)
