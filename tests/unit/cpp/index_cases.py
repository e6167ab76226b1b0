"""Every index that comes as data is checked against what it points into, before anything is written; ``test_cpp_indices`` runs them in a child."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpp_calls import CALLS, INDICES, run, tensors, with_argument

from fusible.errors import FusibleError

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

EXTREMES = (-1, INT_MIN, 11, INT_MAX)
"""Numbers that no index of the calls may be, wherever it stands: 11 is past every page, every angle and the tokens of every sequence."""


def _places() -> Iterator[tuple[str, str, int]]:
    for call, names in INDICES.items():
        arguments = CALLS[call]()
        for name in names:
            for i in range(arguments[name].numel()):
                yield call, name, i


def _unread(call: str, name: str, i: int) -> bool:
    """Whether the call has no use for the element: a bound of padded starts, a page past the last one."""
    if name.startswith("starts_") and i == 2:
        return True
    if name.startswith("page_table") or name == "table":
        used = {"attention_forward_paged": (2, 3), "copy_to_cache": (2, 2)}.get(call)
        return used is not None and i % 3 >= used[i // 3]
    return False


def _with(arguments: dict[str, Any], name: str, i: int, value: int) -> dict[str, Any]:
    changed = arguments[name].clone()
    changed.view(-1)[i] = value
    return with_argument(arguments, name, changed)


def test_every_integer_argument_is_in_the_table() -> None:
    found = {(call, name) for call, make in CALLS.items() for name, x in tensors(make()).items() if x.dtype is torch.int32}
    assert found == {(call, name) for call, names in INDICES.items() for name in names}


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize(("call", "name", "i"), list(_places()))
def test_an_index_outside_is_refused_before_anything_is_written(call: str, name: str, i: int, value: int) -> None:
    arguments = _with(CALLS[call](), name, i, value)
    before = {place: x.clone() for place, x in tensors(arguments).items()}
    if _unread(call, name, i):
        run(call, arguments)
        return
    with pytest.raises(FusibleError) as caught:
        run(call, arguments)
    assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value)), str(caught.value)
    assert all(torch.equal(x, before[place]) for place, x in tensors(arguments).items())


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in INDICES.items() for name in names])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16])
def test_indices_of_another_type_or_too_few_are_refused(call: str, name: str, dtype: torch.dtype) -> None:
    arguments = CALLS[call]()
    # One bound of cumulative lengths stands for no sequence.
    counts = name == "new_lengths" or (name == "lengths_q" and call != "attention_forward_padded") or name == "cu_seqlens"
    for wrong in (arguments[name].to(dtype), arguments[name][:0], *([] if counts else [arguments[name].flatten()[:1]])):
        with pytest.raises(FusibleError):
            run(call, with_argument(arguments, name, wrong))


def test_pages_without_tokens_are_refused() -> None:
    paged = CALLS["attention_forward_paged"]()
    for name in ("k", "v"):
        paged[name] = paged[name][:, :0]
    cache = CALLS["copy_to_cache"]()
    for name in ("k_cache", "v_cache"):
        cache[name] = cache[name][:, :0]
    for call, arguments in (("attention_forward_paged", paged), ("copy_to_cache", cache)):
        with pytest.raises(FusibleError, match="at least one token"):
            run(call, arguments)


def test_sequences_that_share_tokens_are_refused() -> None:
    for call in ("attention_forward", "attention_backward"):
        for name in ("starts_q", "starts_kv"):
            with pytest.raises(FusibleError, match=f"{name}: expected .*past the ones before, got 1 before 2"):
                run(call, _with(CALLS[call](), name, 1, 1))


def test_a_page_that_two_sequences_write_has_the_tokens_of_the_later_one() -> None:
    arguments = CALLS["copy_to_cache"]()
    # The first sequence's new tokens are in its second page, and the second's partly in its first.
    arguments["table"][1, 0] = arguments["table"][0, 1]
    arguments["cached_lengths"] = torch.tensor([0, 4, 6], dtype=torch.int32)
    for threads in (1, 2):
        found = run("copy_to_cache", {**arguments, "k_cache": arguments["k_cache"].clone(), "num_threads": threads})["k_cache"]
        assert torch.equal(found[1], arguments["new_k"][2:4])


def test_what_is_permitted() -> None:
    """Tokens past the last sequence, empty sequences, no sequence at all, entries of a table that no length reaches."""
    none = torch.zeros(1, dtype=torch.int32)
    empty = torch.zeros(3, dtype=torch.int32)
    for lengths in (none, empty):
        run("rope_packed", {**CALLS["rope_packed"](), "cu_seqlens": lengths, "start_positions": lengths[1:]})
        given = {"lengths_q": lengths, "lengths_kv": lengths}
        run("attention_forward", {**CALLS["attention_forward"](), **given})
        run("attention_forward_paged", {**CALLS["attention_forward_paged"](), **given})
        run("copy_to_cache", {**CALLS["copy_to_cache"](), "new_lengths": lengths, "cached_lengths": lengths})
