"""What a number format costs a model: perplexity, divergence from the model as it is, agreement, bytes, and tokens a second."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fusible.errors import ArgumentError, expected
from fusible.models.language_model import LanguageModel
from fusible.pytorch import parameter_bytes

__all__ = ["Quality", "evaluate", "token_windows"]

_STEPS = 16


@dataclass(frozen=True)
class Quality:
    """``perplexity``: ``exp`` of the mean negative log-likelihood of a token. ``divergence``: the mean of ``KL(reference || model)`` of a token's
    distribution, in nats. ``agreement``: the share of tokens whose likeliest successor is the reference's. ``nbytes``: of the parameters as they are
    held. ``tokens_per_second``: of one sequence that grows, the median of a few tokens."""

    perplexity: float
    divergence: float
    agreement: float
    nbytes: int
    tokens_per_second: float


def token_windows(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """``[windows, length + 1]``: a text's tokens, int64 ``[n]``, cut into windows whose last token is only foretold. Raises ``ArgumentError``
    for a text that is shorter than one."""
    count = (len(tokens) - 1) // length
    if count < 1:
        got = f"{len(tokens)} tokens"
        raise ArgumentError(expected(f"more than {length} tokens, a window", of="the text", got=got, do="give a longer text or a shorter window"))
    return torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])


def evaluate(model: LanguageModel, reference: LanguageModel, windows: torch.Tensor) -> Quality:
    """The quality of ``model`` beside ``reference``, which is on the same device, on ``windows`` (``token_windows``), each read by itself."""
    loss = divergence = agreed = 0.0
    with torch.inference_mode():
        for window in windows.to(reference.device):
            inputs, targets = window[None, :-1], window[1:]
            for logits, wanted, target in _pieces(model(inputs)[0], reference(inputs)[0], targets):
                ours, theirs = logits.double().log_softmax(-1), wanted.double().log_softmax(-1)
                loss -= ours.gather(-1, target[:, None]).sum().item()
                divergence += F.kl_div(ours, theirs, log_target=True, reduction="sum").item()
                agreed += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    count = windows[:, 1:].numel()
    speed = _speed(model, windows[0].to(model.device))
    return Quality(math.exp(loss / count), max(divergence / count, 0.0), agreed / count, parameter_bytes(model), speed)


def _pieces(logits: torch.Tensor, wanted: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same in pieces of a few rows: in float64, a window's logits of a large vocabulary would take gigabytes."""
    rows = max(1, (1 << 24) // logits.shape[-1])
    return zip(logits.split(rows), wanted.split(rows), targets.split(rows), strict=True)


def _speed(model: LanguageModel, window: torch.Tensor) -> float:
    """Tokens a second behind a prompt of half the window, by the median of the steps."""
    prompt = window[: max(1, len(window) // 2)]
    cache = model.new_cache(1, len(prompt) + _STEPS)
    tokens, times = prompt, list[float]()
    with torch.inference_mode():
        for _ in range(_STEPS):
            seq_lens = torch.tensor([len(tokens)], dtype=torch.int32, device="cpu")
            began = time.perf_counter()
            tokens = model.next_logits(tokens, seq_lens, cache).argmax(-1)
            tokens.tolist()  # as generation does; of a GPU, what was computed is waited for here
            times.append(time.perf_counter() - began)
            cache.advance(seq_lens)
    return 1 / statistics.median(times[1:])
