"""Streams, as the engine has them."""

from __future__ import annotations

from fusible.errors import DTypeError, expected
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.locate import shows_user

__all__ = ["Stream", "default_stream"]


class Stream:
    """An order of execution, as ``Executable.stream`` takes it.

    The host engine is synchronous: a call returns when its results are ready. So all its streams are equivalent: ``synchronize`` has nothing to wait
    for, and ``ptr`` is 0, the handle of the default stream, for interfaces that ask for one.
    """

    __slots__ = ("device",)

    @shows_user
    def __init__(self, device: device = DEFAULT) -> None:
        self.device = _checked(device)

    @property
    def ptr(self) -> int:
        """The stream's handle, 0."""
        return 0

    def synchronize(self) -> None:
        """Return when all work of the stream is done: at once."""

    def __repr__(self) -> str:
        return f"Stream({self.device})"


_DEFAULT: dict[device, Stream] = {}


@shows_user
def default_stream(device: device = DEFAULT) -> Stream:
    """The stream of ``device`` that executables use where they are given none; the same object every time. Raises ``DTypeError`` for no device."""
    return _DEFAULT.setdefault(_checked(device), Stream(device))


def _checked(place: device) -> device:
    if not isinstance(place, device):
        raise DTypeError(expected("a device", of="a stream", got=repr(place), do='pass fusible.lazy.device("gpu")'))
    return place
