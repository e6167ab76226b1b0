"""Whatever is a whole number by which a function finds something: one that is wrong is refused in the same words by every backend of real tensors.

Generated over the table: of every function, each element of each integer tensor and list is replaced by each extreme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.conformance.table import Record, Sample, load
from fusible.errors import FusibleError

TABLE = load()
BACKENDS = ("torch", *(("cpu",) if cpp_extensions.available else ()))
EXTREMES = (-1, -(2**31), 2**31 - 1, 2**40 + 1, 2**62, 99)
SAMPLES = 3

ANY: dict[str, str] = {
    "histogram": "it is counted up, whatever it holds",
    "is_infinite": "a flag",
    "m_splits": "it changes nothing",
    "noop_flag": "a flag",
    "seed": "any number is one",
    "step": "a count of steps, which enters a formula",
    "tokens_per_expert": "counts, which enter a formula",
    "topk_indices": "it is written",
    "total_num_tokens": "a count, which enters a formula",
    "window_size": "a width: below 0 none, and however large",
}
"""Arguments that take any number, and why."""

SOME: dict[tuple[str, str], tuple[int, ...]] = {
    ("convert_bshd_to_thd", "cu_seqlens"): EXTREMES,  # those past b
    ("convert_thd_to_bshd", "cu_seqlens"): EXTREMES,
    ("copy_to_kv_cache", "page_table"): EXTREMES,  # entries that no length reaches
    ("fused_qkv_rope_forward", "start_positions"): EXTREMES,  # not read in a group
    ("moe_permute_bwd", "row_id_map"): (-1,),  # a copy that was dropped
    ("moe_permute_fwd", "indices"): (99, 2**31 - 1, 2**40 + 1, 2**62),  # how many experts there are does not matter to a sort
    ("moe_unpermute_bwd", "row_id_map"): (-1,),
    ("moe_unpermute_fwd", "row_id_map"): (-1,),
    ("nvfp4_multi_tensor_2d_partial_cast", "h_list"): (99,),  # a larger weight, or another part of it
    ("nvfp4_multi_tensor_2d_partial_cast", "start_offset_list"): (99,),
    ("nvfp4_multi_tensor_compute_partial_amax", "h_list"): (99,),
    ("nvfp4_multi_tensor_compute_partial_amax", "start_offset_list"): (99,),
    ("prim_attention_step", "page_table"): EXTREMES,  # entries that no length reaches
    ("prim_permute", "dims"): (-1,),
    ("prim_put_along", "indices"): EXTREMES,  # what is no column is left out
    ("prim_reshape", "shape"): (-1,),
    ("prim_take_along", "indices"): EXTREMES,
    ("splits_to_offsets", "first_dims"): (99, 2**31 - 1, 2**40 + 1, 2**62),  # offsets of narrow matrices
    ("splits_to_offsets_multi", "split_sizes"): (99, 2**31 - 1),
    ("splits_to_offsets_multi", "strides"): EXTREMES,  # of no rows
}
"""Arguments that take some of the extremes in some calls."""

SHAPES = ("shape", "shapes", "alignments")
"""What asks for memory: only what no memory holds is tried."""


def _is_numbers(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.dtype in (torch.int32, torch.int64) and value.numel() > 0
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(x) is int for x in value)


def _places(value: Any) -> list[int]:
    count = value.numel() if isinstance(value, torch.Tensor) else len(value)
    return sorted({0, count // 2, count - 1})


def _replaced(value: Any, place: int, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        changed = value.to(value.dtype if -(2**31) <= number < 2**31 else torch.int64, copy=True)
        changed.view(-1)[place] = number
        return changed
    return type(value)([*value[:place], number, *value[place + 1 :]])


def bad(sample: Sample) -> Iterator[tuple[str, int, int]]:
    for name, value in sample.arguments.items():
        if _is_numbers(value) and name not in ANY:
            numbers = (-1, 2**62) if name in SHAPES else EXTREMES
            yield from ((name, place, number) for place in _places(value) for number in numbers)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if type(x) is torch.Tensor:
        yield x.clone()
    elif isinstance(x, list | tuple):
        for item in x:
            yield from _tensors(item)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def outcome(backend: str, function: str, sample: Sample, name: str, place: int, number: int) -> str:
    """The sentence by which a backend refuses the call, or nothing."""
    arguments = deepcopy(sample.arguments)
    arguments[name] = _replaced(arguments[name], place, number)
    before = [x for value in arguments.values() for x in _tensors(value)]
    call = getattr(tex.prim if function.startswith("prim_") else tex, function.removeprefix("prim_"))
    try:
        with tex.set_backend(backend):
            call(**arguments)
    except FusibleError as error:
        after = [x for value in arguments.values() for x in _tensors(value)]
        written = any(not torch.equal(_bytes(x), _bytes(y)) for x, y in zip(before, after, strict=True))
        assert not written, f"{function} wrote before it refused {name}[{place}] = {number}"
        return str(error)
    return ""


WITH_NUMBERS = [
    pytest.param(entry, id=entry.function)
    for entry in TABLE.values()
    if any(True for sample in entry.samples(entry.dtypes[0], SAMPLES) for _ in bad(sample))
]


def test_the_table_has_such_functions() -> None:
    assert len(WITH_NUMBERS) >= 30


@pytest.mark.parametrize("entry", WITH_NUMBERS)
def test_a_wrong_number_is_refused_in_the_same_words_by_every_backend(entry: Record) -> None:
    tried = 0
    for sample in entry.samples(entry.dtypes[0], SAMPLES):
        for name, place, number in bad(sample):
            found = {outcome(backend, entry.function, sample, name, place, number) for backend in BACKENDS}
            assert len(found) == 1, found
            sentence = found.pop()
            case = f"{entry.function} with {name}[{place}] = {number}"
            if not sentence:
                assert number in SOME.get((entry.function, name), ()), f"{case} is accepted"
            else:
                assert re.fullmatch(r".+: expected .+, got .+; .+\.", sentence), sentence
                assert entry.function.removeprefix("prim_") in sentence, f"{case}: {sentence}"
            tried += 1
    assert tried
