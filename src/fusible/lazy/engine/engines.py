"""The registered engines, and the one in use."""

from __future__ import annotations

from fusible.errors import BackendError, expected
from fusible.lazy.config import config
from fusible.lazy.engine.engine import Engine
from fusible.lazy.engine.iree import IREE
from fusible.lazy.engine.pjrt import PJRT

__all__ = ["ENGINES", "current_engine"]

ENGINES: dict[str, Engine] = {engine.NAME: engine for engine in (PJRT(), IREE())}
"""Every engine by its name. Another one is added by assignment."""


def current_engine() -> Engine:
    """The engine that ``config.engine`` names; raises ``BackendError`` where there is none of that name or it cannot be used here."""
    name = config.engine
    found = ENGINES.get(name)
    reason = "no engine of that name" if found is None else found.unavailable()
    if found is None or reason is not None:
        wanted = f"one of {', '.join(ENGINES)}"
        raise BackendError(expected(wanted, of="config.engine", got=f"{name!r} ({reason})", do="install it or choose another"))
    return found
