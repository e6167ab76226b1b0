"""What a choice comes to: who serves a request, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

from fusible.errors import BackendError, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request

__all__ = ["Decision", "refusal"]


@dataclass(frozen=True)
class Decision:
    """Which backend serves a request (``backend``, None where none does), and why each other backend does not (``others``). ``failed``: the plugins
    that did not load, with their reasons; their backends are not among the others."""

    request: Request
    backend: str | None
    others: tuple[tuple[str, str], ...]
    failed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.request}: {f'served by {self.backend}' if self.backend else 'not served'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.others]
        lines += [f"  {plugin} did not load: {reason}" for plugin, reason in self.failed]
        return "\n".join(lines)


def refusal(backend: TEXBackendBase, request: Request) -> str | None:
    """What ``backend`` says of ``request``. An answer that raises, or that is no reason, is the backend's fault, and is said to be."""
    try:
        answer = backend.supports(request)
    except Exception as error:
        raise _no_answer(backend, request, f"{type(error).__name__}: {error}") from error
    if answer is not None and not (isinstance(answer, str) and answer.strip()):
        raise _no_answer(backend, request, repr(answer))
    return answer


def _no_answer(backend: TEXBackendBase, request: Request, got: str) -> BackendError:
    do = "let its supports, or the function given to tex.requires, return it"
    return BackendError(expected("a reason or None", of=f"the backend {backend.NAME} asked for {request}", got=got, do=do))
