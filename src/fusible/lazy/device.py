"""Where a tensor lives, as printed in an IR."""

from __future__ import annotations

from dataclasses import dataclass

from fusible.errors import ArgumentError, expected

__all__ = ["device"]


@dataclass(frozen=True)
class device:
    """A logical device, ``device("gpu:0")`` or ``device("cpu")``; only index 0 exists.

    ``gpu:0`` is the default accelerator of the execution engine. Where that engine has none it is backed by the host, so a program
    means the same on every machine, and its tensors are host memory (``Tensor.__dlpack_device__`` says so).
    """

    name: str = "gpu:0"

    def __post_init__(self) -> None:
        kind, _, index = self.name.partition(":")
        if kind not in ("cpu", "gpu") or index not in ("", "0"):
            raise ArgumentError(expected('"cpu", "gpu" or "gpu:0"', of="a device", got=repr(self.name), do="name one of these"))
        object.__setattr__(self, "name", f"{kind}:0")

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


DEFAULT = device("gpu:0")
