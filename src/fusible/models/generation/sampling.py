"""The choice of a token from its logits, by parameters that may differ from sequence to sequence of a batch."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, expected

__all__ = ["Sampler", "Sampling", "choose_tokens", "each_sampling"]

_CANDIDATES = 1024
"""So many of the likeliest tokens mostly have the mass of top-p among them. Sorting these alone takes a tenth of the time of a whole vocabulary."""


@dataclass(frozen=True)
class _Domain:
    """What a parameter of ``Sampling`` may be: of the ``kind``, no bool, and ``within`` a range that NaN is not in; or None where that is
    ``optional``."""

    wanted: str
    kind: type[Real]
    within: Callable[[Any], bool]
    do: str
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise ``DTypeError`` for a value of another type, ``ArgumentError`` for one out of range."""
        if value is None and self.optional:
            return
        typed = isinstance(value, self.kind) and not isinstance(value, bool)
        if not typed or not self.within(value):
            error = (ArgumentError if typed else DTypeError)(expected(self.wanted, of=name, got=repr(value), do=self.do))
            error.argument = name
            raise error


_SHARE = _Domain("a number from 0 to 1", Real, lambda x: 0 <= x <= 1, "give another")
_DOMAINS = {
    "temperature": _Domain("a number of at least 0", Real, lambda x: 0 <= x < math.inf, "give e.g. 0.8"),
    "top_k": _Domain("an integer of at least 1", Integral, lambda x: x >= 1, "leave it out for all tokens", optional=True),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "repetition_penalty": _Domain("a positive number", Real, lambda x: 0 < x < math.inf, "give 1 for none"),
    "seed": _Domain("an integer", Integral, lambda x: True, "leave it out for another every time", optional=True),
}
"""By the names of the fields of ``Sampling``."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits. The steps are taken in this order; the defaults leave all of them out.

    ``repetition_penalty``: logits of tokens that the prompt or the text so far has are divided by it where they are positive, and else multiplied
    (CTRL, arXiv:1909.05858). ``temperature``: the logits are divided by it; 0 takes the likeliest token, and what follows does not count.
    ``top_k``: the k likeliest tokens stay. ``top_p``: the fewest of the likeliest stay whose probabilities add up to at least that (nucleus
    sampling, arXiv:1904.09751). ``min_p``: those stay whose probability is at least that part of the likeliest one's (arXiv:2407.01082). Tokens
    that tie with the last one that stays do too, so that no order of theirs matters. ``seed``: of the draws; None for another every time.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, domain in _DOMAINS.items():
            domain.check(name, getattr(self, name))

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """int64 ``[sequences]`` from fp32 ``[sequences, vocabulary]``, all by this sampling, drawn by one ``generator``. Nothing is penalized."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(_kept(logits, [self] * len(logits)).softmax(-1), 1, generator=generator).squeeze(-1)


def each_sampling(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    """``sampling`` for each of ``count`` texts: one for all, or those given. Raises ``DTypeError`` for anything else."""
    if isinstance(sampling, Sampling):
        return [sampling] * count
    wrong = [sampling] if not isinstance(sampling, Sequence) else [one for one in sampling if not isinstance(one, Sampling)]
    if wrong:
        wanted, do = "a Sampling, or one for each prompt", "give e.g. Sampling(temperature=0.8)"
        raise DTypeError(expected(wanted, of="sampling", got=f"a {type(wrong[0]).__qualname__}", do=do))
    return list(sampling)


class Sampler:
    """The choices of one sequence: its parameters, the tokens that it has, and a generator of its own.

    So what is drawn depends on the seed and the logits alone, whatever other sequences are in the batch.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self._random = random.Random(None if sampling.seed is None else sampling.seed % 2**64)  # Random(-1) would be Random(1)
        self._seen = dict.fromkeys(prompt) if sampling.repetition_penalty != 1 else None

    def add(self, token: int) -> None:
        """Count in a token that was chosen."""
        if self._seen is not None:
            self._seen[token] = None

    def draw(self) -> float:
        """A number of [0, 1)."""
        return self._random.random()

    def penalized(self, logits: Tensor) -> Tensor:
        """fp32 ``[vocabulary]`` with the penalty on what was seen."""
        if not self._seen:
            return logits
        seen, penalty = torch.tensor(list(self._seen), device=logits.device), _within_floats(self.sampling.repetition_penalty)
        changed = _divided_where_positive(logits, seen, penalty)
        return changed if changed.amax().isfinite() else _penalized_widely(logits, seen, penalty)


def choose_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """A token of each row of ``logits``, fp32 ``[sequences, vocabulary]``, by the sampler of its sequence; None where a row has NaN or +inf, or
    nothing but -inf.

    A row's token is the first whose cumulative probability, in the order of the vocabulary, is more than the number that its sampler draws.
    """
    if any(sampler.sampling.repetition_penalty != 1 for sampler in samplers):
        logits = torch.stack([sampler.penalized(row) for sampler, row in zip(samplers, logits, strict=True)])
    chosen = logits.argmax(-1)
    sound = logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).isfinite()  # NaN is the largest
    drawing = [row for row, sampler in enumerate(samplers) if sampler.sampling.temperature]
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        cumulative = _kept(logits[rows], [samplers[row].sampling for row in drawing]).softmax(-1).double().cumsum(-1)
        total = cumulative[:, -1:]
        draws = torch.tensor([[samplers[row].draw()] for row in drawing], dtype=torch.float64, device=logits.device)
        # Below the total, which the product may round to: at or above it would be the token behind the last one.
        aims = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = chosen.index_copy(0, rows, torch.searchsorted(cumulative, aims, right=True).squeeze(-1))
    return [token if good and token < logits.shape[-1] else None for token, good in zip(chosen.tolist(), sound.tolist(), strict=True)]


def _within_floats(value: float) -> float:
    """A positive number, maybe a fraction or an integer of any size, as the nearest normal one of float64."""
    try:
        return min(max(float(value), sys.float_info.min), sys.float_info.max)
    except OverflowError:
        return sys.float_info.max


def _divided_where_positive(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def _penalized_widely(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """fp32 ``[vocabulary]`` where the penalized logits are beyond fp32: less the largest, in float64. The least finite one stands for what is below.

    A penalty of which fp32's least magnitude becomes more than its largest, or the other way round, is as good as all beyond."""
    wide = _divided_where_positive(logits.double(), seen, min(max(penalty, 1e-200), 1e200))
    behind = wide - wide.amax()
    return torch.where(behind.isneginf(), behind, behind.clamp(min=torch.finfo(torch.float32).min)).float()


def _by_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """fp32 ``[rows, vocabulary]``: the logits divided by the temperature of their row.

    Rows of which fp32 has no such quotients have them less the largest logit, of float64: the softmax is the same, and where the temperature comes
    near 0 it is 1 for the likeliest token."""
    floats = [_within_floats(temperature) for temperature in temperatures]
    scaled = logits / _column(floats, logits)
    beyond = (~scaled.amax(-1).isfinite()).nonzero().squeeze(-1)
    if not len(beyond):
        return scaled
    wide = logits[beyond].double()
    divided = (wide - wide.amax(-1, keepdim=True)) / _column(floats, wide)[beyond]
    return scaled.index_copy(0, beyond, divided.float())


def _kept(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The logits by the temperature, and -inf for tokens that are left out. Each filter is a least logit per row."""
    scaled = _by_temperature(logits, [sampling.temperature for sampling in samplings])
    rows = [row for row, sampling in enumerate(samplings) if (sampling.top_k or logits.shape[-1]) < logits.shape[-1]]
    if rows:
        scaled = _without(scaled, rows, _least_of_top_k(scaled[rows], [samplings[row].top_k or 1 for row in rows]))
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if rows:
        scaled = _without(scaled, rows, _least_of_top_p(scaled[rows], _column([samplings[row].top_p for row in rows], logits)))
    rows = [row for row, sampling in enumerate(samplings) if sampling.min_p > 0]
    if rows:
        parts = _column([samplings[row].min_p for row in rows], logits)
        scaled = _without(scaled, rows, scaled[rows].amax(-1, keepdim=True) + parts.log())
    return scaled


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=like.dtype, device=like.device).unsqueeze(-1)


def _without(scaled: Tensor, rows: list[int], least: Tensor) -> Tensor:
    index = torch.tensor(rows, device=scaled.device)
    return scaled.index_copy(0, index, scaled[index].masked_fill(scaled[index] < least, float("-inf")))


def _least_of_top_k(scaled: Tensor, counts: Sequence[int]) -> Tensor:
    """fp32 ``[rows, 1]``: the k-th largest of each row."""
    last = torch.tensor(counts, device=scaled.device).unsqueeze(-1) - 1
    return scaled.topk(max(counts)).values.gather(-1, last)


def _least_of_top_p(scaled: Tensor, mass: Tensor) -> Tensor:
    """fp32 ``[rows, 1]``: the largest logit that, with all above it, has ``mass`` of the probability."""
    total = scaled.logsumexp(-1, keepdim=True)
    largest = scaled.topk(min(_CANDIDATES, scaled.shape[-1])).values
    count = _count_of_mass(largest - total, mass)
    if int(count.max()) == largest.shape[-1] < scaled.shape[-1]:
        largest = scaled.sort(-1, descending=True).values
        count = _count_of_mass(largest - total, mass)
    return largest.gather(-1, count - 1)


def _count_of_mass(logs: Tensor, mass: Tensor) -> Tensor:
    """How many of the first probabilities (by their logarithms, in descending order) it takes for that mass; all where they have less."""
    probabilities = logs.exp().double()
    return (probabilities.cumsum(-1) - probabilities < mass).sum(-1, keepdim=True).clamp(min=1)
