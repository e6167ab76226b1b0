"""The conformance suite catches wrong kernels: of every function of the reference, spoiled in every way that applies to it.

``survivors.txt`` lists the mutants that the suite does not tell from the true kernel, a function and a mutant a line. It only shrinks: one more fails
the whole score, and so does an entry that is caught or is no more. Of changes of the source none lives: ``source_equivalents.txt`` has those that
make no other kernel, a function, a file, a name in it, why, and the change a line.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from behaviour import Mutant
from score import REFERENCE, behavioural, caught, forget, functions, unread
from source import Change, changed, changes, is_in_source, limited

_LISTED = Path(__file__).with_name("survivors.txt")

_OF_VALUES = r"wrong .*|transposed|all zeros|second call wrong|NaN to 0|infinity to .*|clamped to .*|without sign|rounded .*|two per cent .*"
_OF_VALUES += r"|result \d left out"
_EMPTY = "bulk_allocate|create_empty_quantized_tensor|prim_empty"
_SWIZZLES = "grouped_swizzle_for_gemm|(multi_tensor_)?swizzle_scales_for_gemm_|multi_tensor_swizzle_scales_for_gemm_unchecked_"
_SWIZZLES += "|swizzle_scales_and_pack_ptrs_for_discrete_weights|nvfp4_2d_scale_transpose"
_SOFTMAX = "scaled_(aligned_causal_masked_|masked_|upper_triang_masked_)?softmax_forward"
_SCALES = "group_scaled_(clamped_)?swiglu|nvfp4_compute_global_scale"

EQUIVALENT = (
    (_EMPTY, _OF_VALUES, "what is in new memory is free"),
    ("create_empty_quantized_tensor|group_requantize_inplace", "amax not written", "no amax is written"),
    ("thd_get_partitioned_indices", "fails on empty tensors", "cumulative lengths are at least a 0"),
    ("bulk_allocate", "gaps between elements ignored|offset in the storage ignored", "no argument is a tensor"),
    ("create_empty_quantized_tensor", "(gaps between elements|offset in the storage) ignored|scale for its inverse", "what is in new memory is free"),
    ("generic_gemm", "ignores (comm_overlap|extra_output)", "what one process has not"),
    ("te_general_grouped_gemm_for_\\w+", r"writes to the (first|last) element of workspace_\w+", "memory to work in"),
    ("bulk_allocate", "ignores device|takes bulk_allocate .*", "there is one device"),
    ("create_empty_quantized_tensor", "(takes|inverts) pin_memory.*", "where the memory is, which has no accelerator to be pinned for"),
    (_SOFTMAX, r"clamped to (1\.0|448\.0|65504)|infinity to (NaN|the largest)|without sign", "probabilities are between 0 and 1"),
    ("s?relu", "without sign", "nothing below 0 comes of it"),
    (_SCALES, "without sign", "scales and amaxes are not negative"),
    ("nvfp4_compute_global_scale", "infinity to (NaN|the largest)", "a scale is at most the largest number"),
    (_SWIZZLES, "wrong tail of blocks of 32", "scales come in tiles of 512 bytes"),
    ("fused_moe_aux_loss_fwd(_graph_safe)?", r"wrong past (64|1024|4096) elements", "one number comes of it, and two"),
    ("copy_data_ptrs_to_device", "gaps between elements ignored", "an address is that of the first element"),
    (
        "prim_(empty|full|rope_angles)",
        "(gaps between elements|offset in the storage) ignored|reads like as .*",
        "of the one tensor given, the device alone is read",
    ),
    ("get_stream_priority_range", "results 0 and 1 swapped", "the reference has one priority"),
    ("fused_attn_(fwd|bwd)", r"takes max_seqlen_(q|kv) for \d+", "a bound of what lengths say; which words dropout draws is a backend's own"),
    ("prim_attention_step", r"takes max_new_len for \d+", "a bound of what lengths say"),
    ("fused_score_for_moe_aux_loss_bwd", r"takes topk for \d", "checked, and not computed with"),
    ("fused_topk_with_score_function_qb_fwd", "(takes|inverts) bin_bounds_validated.*", "says whether bounds are checked"),
    (
        "(bgrad_group_quantize|group_scaled_(clamped_)?swiglu|nvfp4_group_quantize_with_amax)",
        "ignores (last_dims|tensor_offsets)",
        "refused if given",
    ),
    ("splits_to_offsets_multi", "(takes|inverts) bulk_allocate.*", "says whether results share memory"),
    ("split_quantize", "(takes|inverts) disable_bulk_allocation.*", "says whether results share memory"),
)
"""Functions, mutants, and why no call tells them from the true kernel. Beside these, a mutant that gives another value of an argument that the
reference does not read is the true kernel (``score.unread``, which asks it)."""


def listed() -> set[tuple[str, str]]:
    return {tuple(line.split(" | ", 1)) for line in _LISTED.read_text().splitlines()}  # type: ignore[misc]


def argued(function: str, mutant: str) -> bool:
    return any(re.fullmatch(where, function) and re.fullmatch(name, mutant) for where, name, _ in EQUIVALENT)


def equivalent(function: str, mutant: Mutant) -> bool:
    return argued(function, mutant.name) or (bool(mutant.reads) and unread(function, mutant.reads))


def test_the_listed_survivors_are_mutants_of_functions() -> None:
    assert {function for function, _ in listed()} <= set(functions())
    assert not [entry for entry in listed() if argued(*entry)]


@pytest.mark.parametrize("function", Random(20).sample(functions(), 10))
def test_a_sample_of_wrong_kernels_is_caught(function: str) -> None:
    known = listed()
    made = [m for m in behavioural(function) if (function, m.name) not in known]
    missed = [m.name for m in Random(len(function)).sample(made, min(len(made), 6)) if caught(function, m) is None and not equivalent(function, m)]
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


def test_an_argument_that_is_read_is_told_from_one_that_is_not() -> None:
    assert unread("multi_tensor_adam", "noop_flag") and unread("rmsnorm_fwd", "sm_margin") and unread("prim_full", "like")
    assert not any(unread("rmsnorm_fwd", name) for name in ("input", "weight", "eps", "ln_out", "quantizer", "otype", "zero_centered_gamma"))
    assert not unread("multi_tensor_adam_capturable", "noop_flag")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_wrong_kernel_is_caught_or_listed(part: int) -> None:
    known, alive, made, same = {entry for entry in listed() if entry[0] in functions()[part::4]}, set(), 0, 0
    for function in functions()[part::4]:
        for mutant in behavioural(function):
            made += 1
            if caught(function, mutant) is None:
                if equivalent(function, mutant):
                    same += 1
                else:
                    alive.add((function, mutant.name))
        forget()
    print(f"{len(functions()[part::4])} functions, {made} mutants, {made - same - len(alive)} caught, {len(alive)} listed, {same} equivalent")
    assert alive == known, f"new: {sorted(alive - known)}, caught or gone: {sorted(known - alive)}"


@pytest.mark.slow
def test_every_argument_for_equivalence_is_needed() -> None:
    """Each entry names mutants that there are, of each of the functions that it names."""
    for where, name, reason in EQUIVALENT:
        found = [function for function in functions() if re.fullmatch(where, function)]
        assert any(re.fullmatch(name, m.name) for function in found for m in behavioural(function)), (where, name, reason)


NOTHING = Mutant("none", lambda method: method)

_CHANGED = 10
"""Changes of the source that are made of each function, or all where there are fewer."""


_SAME = Path(__file__).with_name("source_equivalents.txt")


def entry(function: str, change: Change) -> tuple[str, ...]:
    """A change as the list names it."""
    return function, change.file, change.name, change.what


def no_change() -> list[tuple[str, ...]]:
    """The changes that make no other kernel."""
    lines = [line.split(" | ", 4) for line in _SAME.read_text().splitlines()]
    return [(function, file, name, what) for function, file, name, _, what in lines]


def _told(function: str, change: Change) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's are errors in tests, the first of a process, and no wrong results
        return caught(function, Mutant(str(change), changed(change).wrap)) is not None


def test_no_change_is_listed_twice() -> None:
    same = no_change()
    assert len(set(same)) == len(same) and {function for function, *_ in same} <= set(functions())


def test_what_is_listed_is_in_the_source() -> None:
    """Lines of code that move or change their name take their entries along."""
    assert [" | ".join(each) for each in no_change() if not is_in_source(*each[1:])] == []


@pytest.mark.parametrize("function", ["compute_amax", "swap_first_dims", "multi_tensor_scale", "scaled_softmax_forward"])
def test_changes_of_the_source_are_caught_or_make_no_other_kernel(function: str) -> None:
    same, made = no_change(), changes(function)[:_CHANGED]
    missed = [str(change) for change in made if not _told(function, change) and entry(function, change) not in same]
    forget()
    assert made and not missed


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_changes_of_the_source_of_every_function_are_caught_or_make_no_other_kernel(part: int) -> None:
    """What is listed and caught all the same, or is no more what its calls come to, fails too."""
    chosen = functions()[part::4]
    same = {each for each in no_change() if each[0] in chosen}
    made, missed, every = set(), set(), set()
    for function in chosen:
        every |= {entry(function, change) for change in changes(function)}
        for change in changes(function)[:_CHANGED]:
            made.add(entry(function, change))
            if not _told(function, change):
                missed.add(entry(function, change))
        forget()
    print(f"{len(chosen)} functions, {len(made)} changes, {len(made - missed)} caught, {len(missed & same)} equivalent")
    assert not missed - same, f"new: {sorted(missed - same)}"
    assert not (made & same) - missed and same <= every, f"caught: {sorted((made & same) - missed)}, gone: {sorted(same - every)}"


def test_functions_with_nothing_to_change_have_no_changes() -> None:
    """The one call of ``gelu`` in torch cannot be wrong in one place; what calls it can."""
    assert not changes("prim_empty") and changes("gelu")


def test_a_change_is_seen_by_nobody_but_the_kernel_under_test() -> None:
    """Of a function whose samples expect what the reference gives, too."""
    (change,) = [x for x in changes("compute_amax") if x.name == "tensor_amax" and x.what == "x.abs() -> dropped"]
    wrong = changed(change).wrap(REFERENCE.compute_amax)
    x, amax = torch.tensor([-3.0, 2.0]), torch.zeros(1)
    wrong(input=x, amax=amax)
    assert amax.item() == 2.0
    REFERENCE.compute_amax(input=x, amax=amax)
    assert amax.item() == 3.0
    assert caught("compute_amax", NOTHING) is None


def test_a_change_that_has_no_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop over the rows of a slice, which a step back takes on and on."""
    monkeypatch.setattr("source._SECONDS", 0.2)
    function = "fp8_block_scaling_partial_cast"
    (back,) = [x for x in changes(function) if x.name == "MatrixSlice.rectangles" and x.what == "at += (whole or 1) * columns -> Sub"]
    assert _told(function, back)


def test_a_limit_holds_where_its_error_is_lost() -> None:
    with pytest.raises(TimeoutError), limited(0.05):
        with contextlib.suppress(TimeoutError):
            while True:
                pass
        while True:
            pass


def test_no_callback_of_a_collection_takes_a_limits_error() -> None:
    called: list[str] = []
    gc.callbacks.append(lambda phase, info: called.append(phase))
    try:
        with limited(30):
            kept = [[i] for i in range(100_000)]
            during = len(called)
    finally:
        gc.callbacks.pop()
    assert kept and not during and gc.isenabled()


def test_changes_are_those_that_calls_come_to() -> None:
    """A branch for tensors on a device is none, nor is the code of a check."""
    found = changes("dequantize")
    assert any("is_cpu" in change.what for change in found) and not any(change.what.startswith("data.view(_TORCH") for change in found)
    assert not any(
        "raise" in change.what or "expected(" in change.what for function in ("dequantize", "compute_amax") for change in changes(function)
    )
