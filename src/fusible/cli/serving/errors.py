"""Answers that say what is wrong, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from fusible.errors import FusibleError, expected, subject

__all__ = ["ApiError", "busy", "closing", "failed", "invalid", "late", "of_argument"]

_INVALID, _SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An answer with ``status``; ``message`` is one sentence. ``param`` names the part of the request that is wrong, ``code`` what programs ask.
    ``again``: after how many seconds the client may try again."""

    def __init__(
        self, status: int, message: str, *, type: str = _INVALID, param: str | None = None, code: str | None = None, again: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = {} if again is None else {"retry-after": str(again)}

    @property
    def content(self) -> dict[str, Any]:
        """The object that is sent."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(what: str, *, of: str, got: object, do: str, status: int = 400, code: str | None = None) -> ApiError:
    """A request that is wrong in its part ``of``."""
    return ApiError(status, expected(what, of=of, got=got, do=do), param=of, code=code)


def of_argument(error: FusibleError, param: str | None = None, code: str | None = None) -> ApiError:
    """What an exception says of an argument."""
    return ApiError(400, str(error), param=param or error.argument or subject(str(error)) or None, code=code)


def busy(most: int) -> ApiError:
    """There are as many requests as are allowed."""
    message = expected(f"at most {most} requests at once", of="the server", got="one more", do="send it again later")
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", again=1)


def late(seconds: float) -> ApiError:
    """A request waited too long."""
    message = expected(f"to begin within {seconds:g} seconds", of="the request", got="a server that is busy", do="send it again later")
    return ApiError(503, message, type=_SERVER, code="overloaded", again=1)


def closing() -> ApiError:
    """The server shuts down."""
    message = expected("a server that runs on", of="the request", got="one that shuts down", do="send it to another")
    return ApiError(503, message, type=_SERVER, code="shutting_down")


def failed() -> ApiError:
    """The model raised, or its logits were no numbers."""
    message = expected("a model that computes", of="the request", got="an error in it, which the server has logged", do="report it")
    return ApiError(500, message, type=_SERVER, code="model_failed")
