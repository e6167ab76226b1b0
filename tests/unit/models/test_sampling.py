"""Choosing tokens: each filter against transformers' of the same name, and draws that depend on their own seed alone."""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fusible.errors import ArgumentError, DTypeError
from fusible.models.generation.sampling import Sampler, Sampling, _kept, choose_tokens

SEEN = [3, 5, 3, 40, 7]


def logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary", [50, 3000])  # the larger one has more than the candidates of top-p
@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(0.7), [TemperatureLogitsWarper(0.7)]),
        (Sampling(top_k=7), [TopKLogitsWarper(7)]),
        (Sampling(top_k=5000), []),
        (Sampling(top_p=0.9), [TopPLogitsWarper(0.9)]),
        (Sampling(top_p=0.05), [TopPLogitsWarper(0.05)]),
        (Sampling(40.0, top_p=0.9), [TemperatureLogitsWarper(40.0), TopPLogitsWarper(0.9)]),
        (Sampling(min_p=0.1), [MinPLogitsWarper(0.1)]),
        (Sampling(1.4, 20, 0.8, 0.02), [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02)]),
    ],
)
def test_filters_are_those_of_transformers(sampling: Sampling, warpers: list, vocabulary: int) -> None:
    given = logits(64, vocabulary)
    wanted = given
    for warper in warpers:
        wanted = warper(torch.zeros(64, 1, dtype=torch.int64), wanted)
    torch.testing.assert_close(_kept(given, [sampling] * 64), wanted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    given = logits(8, 50)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([SEEN] * 8), given.clone())
    sampler = Sampler(Sampling(repetition_penalty=penalty), SEEN[:2])
    for token in SEEN[2:]:
        sampler.add(token)
    torch.testing.assert_close(torch.stack([sampler.penalized(row) for row in given]), wanted, rtol=2**-22, atol=0)
    greedy = [Sampler(Sampling(0, repetition_penalty=penalty), SEEN) for _ in given]
    assert choose_tokens(given, greedy) == wanted.argmax(-1).tolist()


def test_each_row_has_its_own_parameters() -> None:
    samplings = [Sampling(0.5, 3), Sampling(top_p=0.5), Sampling(2.0, min_p=0.3), Sampling(), Sampling(1.2, 9, 0.7)]
    given = logits(5, 200) / 3
    alone = torch.cat([_kept(given[i : i + 1], [sampling]) for i, sampling in enumerate(samplings)])
    torch.testing.assert_close(_kept(given, samplings), alone, rtol=2**-22, atol=0)
    assert len(set((alone > float("-inf")).sum(-1).tolist())) == 5


def test_draws_hang_on_the_seed_and_not_on_the_batch() -> None:
    given = logits(1, 100) / 3

    def drawn(others: int) -> list[int]:
        samplers = [Sampler(Sampling(seed=7), [1])] + [Sampler(Sampling(0.3 * i, seed=i), [1]) for i in range(others)]
        return [choose_tokens(given.expand(1 + others, -1), samplers)[0] for _ in range(50)]

    assert drawn(0) == drawn(3) and len(set(drawn(0))) > 5
    unseeded = [[choose_tokens(given, [sampler])[0] for _ in range(50)] for sampler in (Sampler(Sampling(), [1]), Sampler(Sampling(), [1]))]
    assert unseeded[0] != unseeded[1]


def test_draws_have_the_probabilities() -> None:
    given = torch.tensor([[0.0, 5.0, float("-inf"), 4.0, 1.0]])
    sampler, count = Sampler(Sampling(1.5, seed=0), []), 20000
    drawn = torch.tensor(choose_tokens(given.expand(count, -1), [sampler] * count))
    shares = torch.bincount(drawn, minlength=5) / count
    wanted = (given[0] / 1.5).softmax(-1)
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_the_last_number_finds_the_last_token_that_has_a_probability() -> None:
    sampler = Sampler(Sampling(), [])
    sampler.draw = lambda: 1 - 2.0**-53  # type: ignore[method-assign]
    assert choose_tokens(torch.tensor([[0.0, 0.0, 0.0, float("-inf")]]), [sampler]) == [2]
    sampler.draw = lambda: 0.0  # type: ignore[method-assign]
    assert choose_tokens(torch.tensor([[float("-inf"), 0.0, 0.0]]), [sampler]) == [1]


EXTREMES = [5e-324, 1e-300, 1e-40, 1e-38, 1e-30, 1e-3, 3.0, 1e30, 1e39, 1e300, 1.7e308, Fraction(1, 10**400), 10**400]
"""Numbers that a temperature and a penalty may be: beyond fp32's and float64's range, denormal ones of either, and some within."""


def _at_the_ends() -> list[torch.Tensor]:
    largest, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    rows = [[1.0, 2.0, -1.0, 0.0], [largest, -largest, 0.0, 1.0], [-largest, -largest / 2, -largest, -largest], [least / 4, 0.0, -least / 4, -least]]
    return [torch.tensor(row) for row in [*rows, [-math.inf, -3.0, -math.inf, -2.0], [largest, largest, -math.inf, 0.0]]]


@pytest.mark.parametrize("row", _at_the_ends(), ids=str)
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.0}, {"top_p": 1e-300}, {"top_p": 0.9}, {"min_p": 1.0}, {"min_p": 1e-300}], ids=str)
def test_every_temperature_and_penalty_chooses_a_token(row: torch.Tensor, more: dict) -> None:
    for temperature in (0, *EXTREMES):
        for penalty in (1, *EXTREMES):
            for seen in ([], [0, 1], [0, 1, 2, 3]):
                sampler = Sampler(Sampling(temperature, repetition_penalty=penalty, seed=1, **more), seen)
                (token,) = choose_tokens(row[None], [sampler])
                assert token is not None and row[token] > -math.inf, (temperature, penalty, seen)
        if temperature:
            drawn = Sampling(temperature, **more).choose(row.expand(8, -1), torch.Generator().manual_seed(0))
            assert (row[drawn] > -math.inf).all()


@pytest.mark.parametrize("temperature", [t for t in EXTREMES if t < 1e-30], ids=str)
def test_a_small_temperature_takes_the_likeliest_token(temperature: float) -> None:
    given = torch.cat([logits(64, 50), *(row[None].repeat(1, 13)[:, :50] for row in _at_the_ends()[1:2])])
    drawn = choose_tokens(given, [Sampler(Sampling(temperature, seed=i), []) for i in range(len(given))])
    assert given[torch.arange(len(given)), drawn].tolist() == given.amax(-1).tolist()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_penalties_without_bound_keep_the_order_of_what_was_seen(temperature: float) -> None:
    given = torch.tensor([[3.0, 5.0, 4.0, 6.0, -1.0, -2.0]])
    for penalty in (p for p in EXTREMES if p <= 1e-30):
        for seen, wanted in (([0, 1, 2], 1), ([3, 4, 5, 1, 2, 0], 3)):
            assert choose_tokens(given, [Sampler(Sampling(temperature, repetition_penalty=penalty, seed=0), seen)]) == [wanted], penalty
    for penalty in (p for p in EXTREMES if p >= 1e30):
        assert choose_tokens(given, [Sampler(Sampling(0, repetition_penalty=penalty), [1, 3])]) == [2], penalty
        negative = torch.tensor([[-3.0, -1.0, -2.0]])
        assert choose_tokens(negative, [Sampler(Sampling(temperature, repetition_penalty=penalty, seed=0), [0, 1, 2])]) == [1], penalty


def test_ordinary_parameters_divide_in_fp32() -> None:
    """So that a seed gives what it gave: bit for bit the quotients by the temperature, whatever the rows beside them."""
    given = logits(6, 300)
    temperatures = [0.3, 0.7, 1.0, 1.3, 40.0, 1e-40]
    kept = _kept(given, [Sampling(temperature) for temperature in temperatures])
    assert torch.equal(kept[:5], given[:5] / torch.tensor(temperatures[:5])[:, None])
    for penalty in (0.8, 1.3, 1e-3):
        seen = torch.tensor(sorted(set(SEEN)))
        wanted = given[0].clone()
        wanted[seen] = torch.where(wanted[seen] > 0, wanted[seen] / penalty, wanted[seen] * penalty)
        assert torch.equal(Sampler(Sampling(repetition_penalty=penalty), SEEN).penalized(given[0]), wanted)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_row_without_a_choice_has_none_and_the_others_theirs(temperature: float, bad: float | None) -> None:
    given = logits(3, 50)
    wanted = [choose_tokens(given[i : i + 1], [Sampler(Sampling(temperature, seed=i), [])])[0] for i in (0, 2)]
    given[1] = -math.inf if bad is None else given[1]
    given[1, 3] = -math.inf if bad is None else bad
    found = choose_tokens(given, [Sampler(Sampling(temperature, seed=i), []) for i in range(3)])
    assert found == [wanted[0], None, wanted[1]]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0}],
)
def test_wrong_parameters_are_one_sentence(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got .*; .*") as caught:
        Sampling(**wrong)
    assert caught.value.argument == name


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_parameters_of_another_type_are_one_sentence(name: str) -> None:
    integer = name in ("top_k", "seed")
    others = [True, np.bool_(True), "1", [1], 1j, torch.tensor(1), *([1.0, 1.5, float("nan")] if integer else [None])]
    for value in others:
        with pytest.raises(DTypeError, match=rf"^{name}: expected (a|an) .*, got .*; .*\.$") as caught:
            Sampling(**{name: value})
        assert caught.value.argument == name
    for value in (1, np.int64(1), *([None] if integer else [1.0, np.float32(1), Fraction(1, 1)])):
        assert getattr(Sampling(**{name: value}), name) is value
    out_of_range = {"temperature": [-0.1, math.inf, math.nan], "top_k": [0, -3], "repetition_penalty": [0, math.inf, math.nan], "seed": []}
    for value in out_of_range.get(name, [-0.1, 1.1, math.nan]):
        with pytest.raises(ArgumentError, match=rf"^{name}: expected"):
            Sampling(**{name: value})
