"""The device of a tensor, as printed in an IR."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from fusible.errors import ArgumentError, expected
from fusible.lazy.locate import shows_user

__all__ = ["device"]


class device:
    """A logical device, ``device("gpu:0")`` or ``device("cpu")``; only index 0 exists. Equal devices are one object.

    ``gpu:0`` is the default accelerator of the execution engine. Where that engine has none it is backed by the host, so a program
    means the same on every machine, and its tensors are host memory (``Tensor.__dlpack_device__`` says so).
    """

    __slots__ = ("kind",)

    index = 0
    kind: str
    _known: ClassVar[dict[str, device]] = {}

    @shows_user
    def __new__(cls, device: str) -> Self:
        kind, _, index = device.lower().partition(":") if isinstance(device, str) else (None, "", "")
        if kind not in ("cpu", "gpu") or index not in ("", "0"):
            raise ArgumentError(expected('"cpu", "gpu" or "gpu:0"', of="a device", got=repr(device), do="name one of these"))
        if kind not in cls._known:
            made = super().__new__(cls)
            made.kind = kind
            cls._known[kind] = made
        return cls._known[kind]  # type: ignore[return-value]

    @property
    def name(self) -> str:
        return f"{self.kind}:0"

    @property
    def backed_by(self) -> str:
        """The memory and processor behind the device: the host, for every engine that there is."""
        return "host"

    @property
    def found(self) -> str:
        """The device that is there: ``cpu:0`` where the host stands for the accelerator. What evaluated tensors print."""
        return "cpu:0" if self.backed_by == "host" else self.name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f'device("{self.name}", backed by the {self.backed_by})'

    def __reduce__(self) -> tuple[Any, ...]:
        return device, (self.name,)


DEFAULT = device("gpu:0")
