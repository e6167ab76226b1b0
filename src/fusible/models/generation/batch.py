"""``generate``: from the tokens of prompts to the tokens that follow, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, ValuesError, expected
from fusible.models.generation.engine import Engine
from fusible.models.generation.next_token_model import NextTokenModel
from fusible.models.generation.request import Request
from fusible.models.generation.sampling import Sampling, each_sampling
from fusible.models.generation.token_rows import tokens_in

__all__ = ["generate"]

_AT_ONCE = 32


def generate(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(0.0),  # noqa: B008 - a frozen value
    *,
    attention_mask: Tensor | None = None,
    stop_tokens: Iterable[int] = (),
    pad_token: int = 0,
    sequences: int | None = None,
    page_size: int | None = None,
) -> list[list[int]] | Tensor:
    """Up to ``max_tokens`` further tokens of each prompt, by one ``sampling`` for all or one each (default: the likeliest).

    ``prompts`` are lists of tokens, of any lengths: the result is a list of what follows each, a stop token included. Or they are int64
    ``[batch, seq]``, padded before or behind where ``attention_mask``, ``[batch, seq]``, is 0: the result is int64 ``[batch, seq + new]``, the
    prompts as they were and what follows, padded behind by ``pad_token``, as transformers' ``generate`` gives it. No padding is ever computed.
    ``sequences``: how many are computed at once (default: all, but no more than 32). Raises ``ArgumentError`` for prompts that do not fit in the
    model's context, ``ValuesError`` where the logits are no numbers.
    """
    rows = _unpadded(prompts, attention_mask) if isinstance(prompts, Tensor) else [tokens_in(prompt, "prompts of generate") for prompt in prompts]
    samplings = each_sampling(sampling, len(rows))
    if len(samplings) != len(rows):
        raise ShapeError(expected(f"one, or {len(rows)} as there are prompts", of="sampling", got=len(samplings), do="give one for each prompt"))
    ends = frozenset(stop_tokens)
    requests = [Request(row, max_tokens, one, ends) for row, one in zip(rows, samplings, strict=True)]
    made: list[list[int]] = [[] for _ in requests]
    if requests:
        capacity = max(map(len, rows)) + max_tokens
        engine = Engine(model, sequences=sequences or min(len(rows), _AT_ONCE), capacity=capacity, page_size=page_size)
        for request in requests:
            engine.add(request)
        for event in engine.run():
            if event.token is None:
                got, do = f"NaN or infinity after prompt {event.id}", "look at the weights"
                raise ValuesError(expected("finite logits", of="the model", got=got, do=do))
            made[event.id].append(event.token)
    return _padded(prompts, made, pad_token) if isinstance(prompts, Tensor) else made


def _unpadded(prompts: Tensor, mask: Tensor | None) -> list[tuple[int, ...]]:
    if prompts.dim() != 2 or prompts.is_floating_point():
        got = f"{list(prompts.shape)} of {prompts.dtype}"
        raise (ShapeError if prompts.dim() != 2 else DTypeError)(expected("int64 [batch, seq]", of="prompts", got=got, do="give tokens"))
    if mask is None:
        return [tuple(row) for row in prompts.tolist()]
    if mask.shape != prompts.shape:
        wanted = f"{list(prompts.shape)}, as the prompts are"
        raise ShapeError(expected(wanted, of="attention_mask", got=list(mask.shape), do="give one of that shape"))
    return [tuple(row[kept].tolist()) for row, kept in zip(prompts.cpu(), mask.cpu().bool(), strict=True)]


def _padded(prompts: Tensor, made: list[list[int]], pad_token: int) -> Tensor:
    longest = max(map(len, made), default=0)
    further = [[*row, *[pad_token] * (longest - len(row))] for row in made]
    return torch.cat([prompts, torch.tensor(further, dtype=prompts.dtype, device=prompts.device).view(len(made), longest)], dim=1)
