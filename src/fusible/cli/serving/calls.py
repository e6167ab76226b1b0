"""What a client asks for: the bodies of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fusible.cli.serving.body import Body
from fusible.cli.serving.errors import invalid, of_argument
from fusible.errors import ArgumentError
from fusible.models.generation import Sampling

__all__ = ["Call", "chat_call", "completion_call"]

_MOST_STOPS, _MOST_PROMPTS, _MOST_LOGPROBS = 16, 64, 20
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


@dataclass(frozen=True)
class Call:
    """A request that is right in itself. ``prompts``: texts or tokens; of a chat, its ``messages`` are rendered instead, with ``template`` as
    further variables. ``logprobs``: how many of the likeliest tokens are told beside each, None for nothing."""

    model: str
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] | None = None


def completion_call(fields: dict[str, Any], defaults: Sampling) -> Call:
    """Raises ``ApiError`` for what is wrong with a body of ``/v1/completions``."""
    body = Body(fields)
    prompts = _prompts(body.any("prompt"))
    max_tokens = body.integer("max_tokens", least=1)
    logprobs = body.integer("logprobs", least=0, most=_MOST_LOGPROBS)
    body.same("echo", False)
    body.same("best_of", 1)
    body.same("suffix")
    return _call(body, defaults, max_tokens, logprobs, prompts=prompts)


def chat_call(fields: dict[str, Any], defaults: Sampling) -> Call:
    """Raises ``ApiError`` for what is wrong with a body of ``/v1/chat/completions``."""
    body = Body(fields)
    messages = _messages(body.any("messages"))
    older = body.integer("max_tokens", least=1)
    max_tokens = body.integer("max_completion_tokens", older, least=1)
    top = body.integer("top_logprobs", 0, least=0, most=_MOST_LOGPROBS)
    logprobs = top if body.switch("logprobs") else None
    if top and logprobs is None:
        raise invalid("logprobs true with it", of="top_logprobs", got=top, do="ask for logprobs, or leave it out")
    body.same("tools", [])
    body.same("tool_choice", "none", "auto")
    body.same("response_format", {"type": "text"})
    body.same("modalities", ["text"])
    body.same("audio")
    body.ignore("parallel_tool_calls", "reasoning_effort", "verbosity")
    return _call(body, defaults, max_tokens, logprobs, messages=messages, template=_template(body))


def _call(body: Body, defaults: Sampling, max_tokens: int | None, logprobs: int | None, **more: Any) -> Call:
    model = body.text("model")
    if model is None:
        raise invalid("the name of a model", of="model", got="none", do="ask /v1/models for it")
    stream, options = body.switch("stream"), Body(body.object("stream_options"))
    include_usage = options.switch("include_usage")
    options.ignore("include_obfuscation")
    options.finish()
    sampling, stop = _sampling(body, defaults), body.texts("stop", _MOST_STOPS)
    body.same("n", 1)
    for name in ("presence_penalty", "frequency_penalty"):
        body.same(name, 0)
    body.same("logit_bias", {})
    body.ignore(*_IGNORED)
    body.finish()
    return Call(model, max_tokens, sampling, stop, stream, include_usage, logprobs, **more)


def _sampling(body: Body, defaults: Sampling) -> Sampling:
    top_k = body.integer("top_k", defaults.top_k, least=-1)  # -1 and 0 are other servers' words for all
    try:
        return replace(
            defaults,
            temperature=body.number("temperature", defaults.temperature, least=0, most=2),
            top_k=top_k if top_k is not None and top_k > 0 else None,
            top_p=body.number("top_p", defaults.top_p, least=0, most=1),
            min_p=body.number("min_p", defaults.min_p, least=0, most=1),
            repetition_penalty=body.number("repetition_penalty", defaults.repetition_penalty, least=0),
            seed=body.integer("seed", defaults.seed, least=-(2**63), most=2**63 - 1),
        )
    except ArgumentError as error:
        raise of_argument(error) from None


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, tokens, or a list of either."""
    many = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not isinstance(many, list) or not many or not all(isinstance(one, str) or _is_tokens(one) for one in many):
        raise invalid("a text, a list of tokens, or a list of these", of="prompt", got="none" if value is None else "another value", do="give one")
    if len(many) > _MOST_PROMPTS:
        raise invalid(f"at most {_MOST_PROMPTS} prompts", of="prompt", got=len(many), do="send several requests")
    return tuple(one if isinstance(one, str) else tuple(one) for one in many)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise invalid("a list of messages", of="messages", got="none" if value is None else "another value", do="give at least one")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _template(body: Body) -> dict[str, Any]:
    template = body.object("chat_template_kwargs")
    if taken := {"messages", "add_generation_prompt"} & template.keys():
        wanted, got = "variables of the template's own", ", ".join(sorted(taken))
        raise invalid(wanted, of="chat_template_kwargs", got=got, do="leave it out")
    return template


def _message(message: Any, of: str) -> dict[str, Any]:
    """A message whose content is one text: its parts are put together."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("an object with a role", of=of, got="another value", do="give its role and content")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid("a text, or parts of the type text", of=f"{of}.content", got="another value", do="give texts alone")
    return {**message, "content": "".join(part["text"] for part in parts)}
