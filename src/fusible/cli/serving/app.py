"""The HTTP application: routes, bodies, streams of events, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fusible.cli.serving.calls import Call, chat_call, completion_call
from fusible.cli.serving.errors import ApiError, failed, invalid
from fusible.cli.serving.replies import ChatReply, CompletionReply, Gathered, Reply, usage
from fusible.cli.serving.service import Answer, Gone, Service
from fusible.cli.serving.worker import Piece
from fusible.errors import CheckpointError, expected
from fusible.files import parse_json
from fusible.models.generation import Sampling

__all__ = ["application"]

_GONE = 499  # nobody reads it


def application(service: Service) -> Starlette:
    """The routes of ``service``: models, completions, chats and health."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    async def completions(request: Request) -> Response:
        return await _serve(service, request, completion_call, CompletionReply)

    async def chats(request: Request) -> Response:
        return await _serve(service, request, chat_call, ChatReply)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.served.name:
            of, got, do = "model", repr(name[:80]), "ask /v1/models for the name"
            raise invalid(repr(service.served.name), of=of, got=got, do=do, status=404, code="model_not_found")
        return JSONResponse(_model(service))

    async def health(_: Request) -> Response:
        counts = vars(service.served.engine.counts)
        status = "ok" if service.alive else "closing"
        return JSONResponse({"status": status, "open": service.open, **counts}, 200 if service.alive else 503)

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
    ]
    handlers: dict[Any, Any] = {ApiError: _refused, HTTPException: _no_route, ClientDisconnect: _left, Gone: _left, Exception: _broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _serve(service: Service, request: Request, read: Callable[[dict[str, Any], Sampling], Call], form: type[Reply]) -> Response:
    call = read(await _fields(service, request), service.served.defaults)
    answer = await service.answer(call)
    watch = asyncio.create_task(_watch(request, answer))
    stream: _Events | None = None
    try:
        reply = form(service.served.name, service.served.tokenizer, call.logprobs is not None)
        if not call.stream:
            return await _whole(answer, reply)
        pieces = await answer.batch()  # what fails before the first token has its own status
        # What is made is sent in the time of a request and again as much: a client that does not read is cut off.
        stream = _Events(_events(answer, reply, pieces), answer, watch, 2 * service.limits.request_seconds)
        return stream
    finally:
        if stream is None:
            watch.cancel()
            answer.close()


async def _fields(service: Service, request: Request) -> dict[str, Any]:
    """The object in the body of a request, which may be neither too large nor too slow."""
    limits, body = service.limits, bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    of, got = "the request's body", "more"
                    raise invalid(f"at most {limits.body_bytes} bytes", of=of, got=got, do="send less", status=413)
    except TimeoutError:
        wanted, got = f"to come within {limits.body_seconds:g} seconds", "a part of it"
        raise invalid(wanted, of="the request's body", got=got, do="send it at once", status=408) from None
    try:
        fields = parse_json(bytes(body), of="the request's body", do="send an object in JSON")
    except CheckpointError as error:
        raise ApiError(400, str(error)) from None
    if b"\\ud" in body.lower() and _has_surrogates(fields):
        raise invalid("characters of Unicode", of="the request's body", got="half of a surrogate pair", do="send whole ones")
    if not isinstance(fields, dict):
        raise invalid("an object", of="the request's body", got="another value", do="send an object in JSON")
    return fields


def _has_surrogates(value: Any) -> bool:
    """Whether JSON has escapes of characters that are none: no tokenizer takes them, and no answer could say what they are."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


async def _watch(request: Request, answer: Answer) -> None:
    """Tell the answer when its client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.gone()


async def _whole(answer: Answer, reply: Reply) -> Response:
    gathered = [Gathered() for _ in answer.prompts]
    while not answer.done:
        index, piece = await answer.next()
        gathered[index].add(piece)
    return JSONResponse(reply.whole(gathered, usage(answer.prompts, sum(one.made for one in gathered))))


async def _events(answer: Answer, reply: Reply, pieces: list[tuple[int, Piece]]) -> AsyncIterator[str]:
    """Server-sent events. Pieces that are there together are sent together."""
    made: dict[int, int] = {}
    try:
        while True:
            parts = []
            for index, piece in pieces:
                parts += [reply.beginning(index)] if index not in made else []
                parts.append(reply.chunk(index, piece))
                made[index] = piece.made
            text = "".join(_event(part) for part in parts if part is not None)
            if text:
                yield text
            if answer.done:
                break
            pieces = await answer.batch()
    except ApiError as error:
        yield _event(error.content)
        return
    except Gone:
        return
    if answer.call.include_usage:
        yield _event(reply.used(usage(answer.prompts, sum(made.values()))))
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _Events(StreamingResponse):
    """A stream that closes its answer however it ends: sent, cut off, or never begun."""

    def __init__(self, content: AsyncIterator[str], answer: Answer, watch: asyncio.Task[None], seconds: float) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answer, self._watch, self._seconds = answer, watch, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # uvicorn closes the connection of an answer that is not complete
            return
        finally:
            self._watch.cancel()
            self._answer.close()


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.served.name, "object": "model", "created": service.served.created, "owned_by": "fusible"}


async def _refused(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.content, error.status, error.headers)


async def _no_route(request: Request, error: HTTPException) -> Response:
    wanted = "a POST or GET as documented" if error.status_code == 405 else "/v1/completions, /v1/chat/completions, /v1/models or /health"
    message = expected(wanted, of="the request", got=f"{request.method[:20]} {request.url.path[:80]}", do="ask for one of these")
    return JSONResponse(ApiError(error.status_code, message).content, error.status_code, error.headers)


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=_GONE)


async def _broken(_: Request, __: Exception) -> Response:
    error = failed()
    return JSONResponse(error.content, error.status)
