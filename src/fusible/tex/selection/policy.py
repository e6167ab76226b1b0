"""The policy: which backend is wanted for which call. A value; a change of it is a new value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusible import knobs
from fusible.errors import ArgumentError, check_switch, expected
from fusible.tex.interface.base import TEXBackendBase

__all__ = ["KINDS_OF_BACKENDS", "Policy", "matches", "vendor_names"]

KINDS_OF_BACKENDS = ("flagos", "vendor", "own", "reference")
"""What ``KIND`` of a backend says: FlagGems' kernels, a vendor's, this package's own, or the reference."""

_PREFERENCES = ("flagos", "vendor", "reference")


@dataclass(frozen=True)
class Policy:
    """``forced`` serves every call that it can; what it lacks goes to ``fallback``, then to the others, unless ``strict``. Where none is forced,
    ``fallback`` comes after the best backend there is.

    ``per_function`` names, for single functions, the only backends that may serve them, best first: ``"torch"``, ``"hygon|torch"`` or a tuple.
    Besides a backend's name it takes ``"vendor:NVIDIA"`` (a backend of that vendor), ``"vendor"`` (any vendor's), ``"flagos"`` or ``"default"``
    (FlagGems), ``"reference"`` (torch) and ``"impl:ID"`` (an implementation that a plugin registered under that ``impl_id``).

    ``prefer`` is the kind of backend that comes before the others by priority: ``"flagos"``, ``"vendor"`` or ``"reference"``. ``deny_vendors`` are
    names or vendors of backends that serve nothing; with ``allow_vendors``, of the vendors' backends only those named serve. Names are matched
    without regard to case. Raises ``ArgumentError`` for values that no policy has.
    """

    forced: str | None = None
    fallback: str | None = None
    strict: bool = False
    debug: bool = False
    per_function: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict, hash=False)
    prefer: str | None = None
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By field, the environment variable that it was read from: an error about it names the variable."""

    def __post_init__(self) -> None:
        for name in ("forced", "fallback"):
            if not isinstance(getattr(self, name), str | None):
                raise _wrong("a backend's name or None", name, getattr(self, name))
        for name in ("strict", "debug"):
            check_switch(getattr(self, name), f"{name} of a policy")
        if self.prefer is not None and self.prefer not in _PREFERENCES:
            raise _wrong(f"one of {', '.join(_PREFERENCES)} or None", "prefer", self.prefer)
        for name in ("allow_vendors", "deny_vendors"):
            names = getattr(self, name)
            if names is None and name == "allow_vendors":
                continue
            if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(item, str) and item.strip() for item in names):
                raise _wrong("a set of vendors' names", name, names)
            object.__setattr__(self, name, frozenset(item.strip().lower() for item in names))
        if not isinstance(self.per_function, Mapping):
            raise _wrong("a mapping of functions to backends", "per_function", self.per_function)
        object.__setattr__(self, "per_function", {function: _frozen(function, wanted) for function, wanted in self.per_function.items()})

    def wanted(self, function: str) -> tuple[str, ...]:
        """Who alone may serve ``function``, best first; empty where ``per_function`` does not say."""
        names = self.per_function.get(function, ())
        return tuple(names.split("|")) if isinstance(names, str) else names

    def changed(self, **changes: Any) -> Policy:
        """The policy with ``changes``, which no variable asked for."""
        return replace(self, **changes, variables={name: variable for name, variable in self.variables.items() if name not in changes})

    def asked_by(self, name: str) -> str:
        """``; asked for by ... TE_BACKEND``: the variable that a field was read from, or nothing."""
        return f"; asked for by the environment variable {self.variables[name]}" if name in self.variables else ""

    @classmethod
    def from_environment(cls) -> Policy:
        """The policy that the environment variables ask for (``fusible.knobs``). Raises ``KnobError`` for a value that cannot be read."""
        read: dict[str, tuple[knobs.Knob[Any], ...]] = {
            "forced": (knobs.TE_BACKEND, knobs.TE_PLUGIN),
            "fallback": (knobs.TE_FALLBACK_BACKEND,),
            "strict": (knobs.TE_FL_STRICT,),
            "debug": (knobs.TE_FL_DEBUG,),
            "per_function": (knobs.TE_FL_PER_OP,),
            "prefer": (knobs.TE_FL_PREFER,),
            "allow_vendors": (knobs.TE_FL_ALLOW_VENDORS,),
            "deny_vendors": (knobs.TE_FL_DENY_VENDORS,),
        }
        values = {name: next(((knob.name, knob.get()) for knob in several if knob.get()), None) for name, several in read.items()}
        found = {name: pair for name, pair in values.items() if pair is not None}
        return cls(**{name: value for name, (_, value) in found.items()}, variables={name: variable for name, (variable, _) in found.items()})


def _wrong(what: str, name: str, got: object) -> ArgumentError:
    return ArgumentError(expected(what, of=f"{name} of a policy", got=repr(got), do="pass such a value"))


def _frozen(function: str, wanted: object) -> str | tuple[str, ...]:
    tokens = wanted.split("|") if isinstance(wanted, str) else wanted
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(token, str) and token.strip() for token in tokens):
        raise _wrong("a backend's name, or several, best first", f"{function} in per_function", wanted)
    return "|".join(token.strip() for token in tokens) if isinstance(wanted, str) else tuple(token.strip() for token in tokens)


def vendor_names(backend: TEXBackendBase) -> frozenset[str]:
    """The names by which a policy allows or denies ``backend``, in lower case: its own, its vendor's, and what else its vendor is called."""
    return frozenset(name.lower() for name in (backend.NAME, backend.VENDOR, backend.vendor, *backend.VENDOR_NAMES) if name)


def matches(backend: TEXBackendBase, token: str) -> bool:
    """Whether ``backend`` is meant by a word of ``per_function`` that is no backend's name."""
    word, _, rest = token.lower().partition(":")
    if word == "vendor" and rest:
        return not backend.REFERENCE and rest.strip() in vendor_names(backend)
    if word == "impl" and rest:
        return rest.strip() == (backend.IMPL_ID or backend.NAME).lower()
    return not rest and word in ("flagos", "default", "vendor", "reference") and backend.KIND == ("flagos" if word == "default" else word)
