"""The conformance suite catches wrong kernels: of every function of the reference, spoiled in every way that applies to it.

``survivors.txt`` lists the mutants that the suite does not tell from the true kernel, a function and a mutant a line. It only shrinks: one more fails
the whole score, and so does an entry that is caught or is no more.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from behaviour import Mutant
from score import REFERENCE, behavioural, caught, forget, functions
from source import applied, changes

_LISTED = Path(__file__).with_name("survivors.txt")

EQUIVALENT = (
    (r"bulk_allocate|create_empty_quantized_tensor|prim_empty", r"(?!result of|fails|takes dtype|ignores device).*", "what is in new memory is free"),
    (r".*", r"(takes|inverts) (sm_margin|workspace_size|chunk_size|use_split_accumulator|cuda_graph|deterministic|pin_memory)\b.*", "a hint"),
    (r"scaled_.*softmax_forward", r"(clamped to|infinity to|without sign).*", "probabilities: between 0 and 1"),
    (r"s?relu", r"without sign", "nothing below 0 comes of it"),
    (r".*", r"\w+ (to )?(the \w+ element of )?workspace_(setup|cublas)( as \w+)?", "memory to work in"),
    (r".*", r"takes (math_sm_count|device_id) .*", "one device's own"),
    (r".*", r"(takes|inverts) (set_zero|bin_bounds_validated|bulk_overlap|disable_bulk_allocation)\b.*", "says how, and not what"),
    (r".*", r"ignores (workspace|comm_overlap|comm_type|extra_output|rng_gen|device)", "memory to work in, or what one process has not"),
    (r".*", r"takes (max_ctx_len|max_seq_len|max_expanded_token_num|num_tensors|rng_elts_per_thread|max_seqlen_\w+) .*", "follows from the data"),
)
"""Functions, mutants, and why no call tells them from the true kernel."""


def listed() -> set[tuple[str, str]]:
    return {tuple(line.split(" | ", 1)) for line in _LISTED.read_text().splitlines()}  # type: ignore[misc]


def equivalent(function: str, mutant: str) -> bool:
    return any(re.fullmatch(where, function) and re.fullmatch(name, mutant) for where, name, _ in EQUIVALENT)


def test_the_listed_survivors_are_mutants_of_functions() -> None:
    assert {function for function, _ in listed()} <= set(functions())
    assert not [entry for entry in listed() if equivalent(*entry)]


@pytest.mark.parametrize("function", Random(20).sample(functions(), 10))
def test_a_sample_of_wrong_kernels_is_caught(function: str) -> None:
    known = listed()
    chosen = [m for m in behavioural(function) if (function, m.name) not in known and not equivalent(function, m.name)]
    missed = [m.name for m in Random(len(function)).sample(chosen, min(len(chosen), 6)) if caught(function, m) is None]
    forget()
    assert not missed


def _without_the_maximum(_: Any) -> Any:
    def wrong(*, input: torch.Tensor, scale_factor: float) -> torch.Tensor:
        powers = torch.exp(input.float() * scale_factor)
        return (powers / powers.sum(-1, keepdim=True)).to(input.dtype)

    return wrong


NAMED = {
    "writes to its input": ("gelu", "writes to the first element of input"),
    "ignores ln_out": ("rmsnorm_fwd", "does not write ln_out"),
    "is wrong past 4,096 elements": ("silu", "wrong past 4096 elements"),
    "turns NaN to 0": ("layernorm_fwd", "NaN to 0"),
    "clamps": ("swiglu", "clamped to 448.0"),
    "gives the same memory twice": ("prim_add", "result in one buffer"),
    "reads past gaps": ("rmsnorm_bwd", "gaps between elements ignored"),
}


@pytest.mark.parametrize("fault", NAMED)
def test_each_fault_that_kernels_had_is_caught(fault: str) -> None:
    function, name = NAMED[fault]
    (mutant,) = [m for m in behavioural(function) if m.name == name]
    assert caught(function, mutant) is not None


def test_a_softmax_that_subtracts_no_maximum_is_caught() -> None:
    assert caught("scaled_softmax_forward", Mutant("without the maximum", _without_the_maximum)) is not None


def test_the_reference_itself_agrees() -> None:
    for function in ("gelu", "rmsnorm_fwd", "scaled_softmax_forward"):
        assert caught(function, Mutant("none", lambda method: method)) is None
    assert REFERENCE.REFERENCE


@pytest.mark.slow
def test_every_wrong_kernel_is_caught_or_listed() -> None:
    known, alive, made, same = listed(), set(), 0, 0
    for function in functions():
        for mutant in behavioural(function):
            if equivalent(function, mutant.name):
                same += 1
                continue
            made += 1
            if caught(function, mutant) is None:
                alive.add((function, mutant.name))
        forget()
    print(f"{len(functions())} functions, {made} mutants, {made - len(alive)} caught, {len(alive)} listed, {same} equivalent")
    assert alive == known, f"new: {sorted(alive - known)}, caught or gone: {sorted(known - alive)}"


NOTHING = Mutant("none", lambda method: method)


@pytest.mark.parametrize("function", ["compute_amax", "swap_first_dims", "multi_tensor_scale"])
def test_changes_of_the_source_are_told_by_float64_alone(function: str) -> None:
    """Some changes are none: of a branch that serves a layout, of a copy that saves another. Most must be caught."""
    made = changes(function, 10)
    missed = []
    for change in made:
        with applied(change):
            if caught(function, NOTHING, 2) is None:
                missed.append(str(change))
    assert caught(function, NOTHING) is None
    assert made and len(missed) <= len(made) // 2, missed
