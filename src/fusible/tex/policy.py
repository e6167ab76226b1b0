"""The policy: which backend is wanted for which call. A value; a change of it is a new value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusible import knobs

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """``forced`` serves every call that it can; what it lacks goes to ``fallback``, then to the others by priority, unless ``strict``.

    ``per_function`` names, for single functions, the only backend that may serve them.
    """

    forced: str | None = None
    fallback: str | None = None
    strict: bool = False
    debug: bool = False
    per_function: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Policy:
        """The policy that the environment variables ask for (``fusible.knobs``)."""
        return cls(
            forced=knobs.TE_BACKEND.get() or knobs.TE_PLUGIN.get() or None,
            fallback=knobs.TE_FALLBACK_BACKEND.get() or None,
            strict=knobs.TE_FL_STRICT.get(),
            debug=knobs.TE_FL_DEBUG.get(),
        )
