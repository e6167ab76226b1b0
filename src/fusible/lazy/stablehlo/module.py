"""A StableHLO module, and its printed form."""

from __future__ import annotations

import io
import re
from functools import cached_property
from typing import Any

from fusible.lazy.stablehlo import mlir as bindings

__all__ = ["StableHLO"]

_PLACE = re.compile(r'\("([^"]*)":(\d+):\d+\)')
"""The user's line in a location, as ``located_text`` shows it."""


class StableHLO:
    """A StableHLO module whose entry is ``main``. ``str`` is its numbered printed form, ``text`` and ``bytecode`` the MLIR."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @cached_property
    def bytecode(self) -> bytes:
        """MLIR bytecode: what is compiled, apart from the context that all threads build in."""
        stream = io.BytesIO()
        with bindings.LOCK:
            self.module.operation.write_bytecode(stream)
        return stream.getvalue()

    @cached_property
    def portable(self) -> bytes:
        """The portable artifact (VHLO bytecode), which other versions of StableHLO and other engines read."""
        return bindings.portable(self.bytecode)

    @cached_property
    def text(self) -> str:
        with bindings.LOCK:
            return str(self.module)

    @cached_property
    def located_text(self) -> str:
        """The text with a location behind every operation."""
        with bindings.LOCK:
            return self.module.operation.get_asm(enable_debug_info=True, use_local_scope=True)

    @cached_property
    def recorded(self) -> list[tuple[str, int] | None]:
        """By line of ``text`` the file and line of the user's program that recorded its operation; ``None`` for one that holds none."""
        lines = self.located_text.removesuffix("\n").split("\n")
        places: list[tuple[str, int] | None] = []
        for line in reversed(lines):
            found = _PLACE.findall(line)
            # An operation with a body ends, and is located, on a later line; its body is recorded where it is.
            inherited = places[-1] if places and line.endswith("({") else None
            places.append((found[-1][0], int(found[-1][1])) if found else inherited)
        return places[::-1]

    def __str__(self) -> str:
        lines = self.text.split("\n")
        return "\n".join(["==== StableHLO IR ====", *(f"{i}: {line}".rstrip() for i, line in enumerate(lines, 1))])
