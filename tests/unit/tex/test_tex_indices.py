"""Indices that come as data, in each backend of real tensors: one outside is refused in one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.errors import FusibleError

BACKENDS = ["torch", *(["cpu"] if cpp_extensions.available else [])]
FORMAT = tex.NVTE_QKV_Format


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _cache(paged: bool, form: str) -> dict[str, Any]:
    sizes = {"THD": (4,), "BSHD": (2, 3), "SBHD": (3, 2)}[form]
    pages, size = (6, 2) if paged else (3, 6)
    return {
        "new_k": _x(*sizes, 2, 4), "new_v": _x(*sizes, 2, 3), "k_cache": _x(pages, size, 2, 4), "v_cache": _x(pages, size, 2, 3),
        "page_table": torch.stack((_ints(5, 1, 0), _ints(2, 3, 4))) if paged else _ints(2, 0), "cu_new_lens": _ints(0, 2, 4),
        "cu_cached_lens": _ints(0, 4, 7), "kv_format": FORMAT[f"NVTE_{form}"], "b": 2, "max_ctx_len": 3, "max_seq_len": 6,
        "max_pages_per_seq": 3 if paged else 1, "is_non_paged": not paged,
    }  # fmt: skip


def _rope(**more: Any) -> dict[str, Any]:
    given = {"start_positions": None, "qkv_format": FORMAT.NVTE_THD, "interleaved": False, "cu_seqlens": _ints(0, 3, 5), "cp_size": 1, "cp_rank": 0}
    return {"input": _x(6, 2, 8), "freqs": _x(8, 1, 1, 8), **given, **more}


def _gradients() -> dict[str, Any]:
    made = _rope()
    return {"output_grads": made.pop("input"), **made}


OUTSIDE = (-1, -(2**31), 2**31 - 1, 2**31, 2**40 + 1, 99)
"""What no index below may be; the ones past int32 are given as int64."""

CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "paged THD": ("copy_to_kv_cache", lambda: _cache(True, "THD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "paged BSHD": ("copy_to_kv_cache", lambda: _cache(True, "BSHD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "dense SBHD": ("copy_to_kv_cache", lambda: _cache(False, "SBHD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "dense THD": ("copy_to_kv_cache", lambda: _cache(False, "THD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "rope": ("fused_rope_forward", _rope, ("cu_seqlens",)),
    "rope of a grid": (
        "fused_rope_forward",
        lambda: _rope(input=_x(6, 2, 2, 8), qkv_format=FORMAT.NVTE_SBHD, start_positions=_ints(0, 2), cu_seqlens=None),
        ("start_positions",),
    ),
    "rope backward": ("fused_rope_backward", _gradients, ("cu_seqlens",)),
    "thd to bshd": (
        "convert_thd_to_bshd", lambda: {"tensor": _x(5, 2), "cu_seqlens": _ints(0, 3, 5), "b": 2, "max_seq_len": 4}, ("cu_seqlens",)
    ),
    "bshd to thd": ("convert_bshd_to_thd", lambda: {"tensor": _x(2, 4, 2), "cu_seqlens": _ints(0, 3, 5), "t": 5}, ("cu_seqlens",)),
    "half tensor": ("thd_read_half_tensor", lambda: {"tensor": _x(6, 2), "cu_seqlens": _ints(0, 2, 6), "half_idx": 0}, ("cu_seqlens",)),
    "partition": (
        "thd_get_partitioned_indices",
        lambda: {"cu_seqlens": _ints(0, 4, 8), "total_tokens": 8, "world_size": 2, "rank": 1},
        ("cu_seqlens",),
    ),
    "rank order": (
        "thd_sequence_order_to_cp_rank_order",
        lambda: {"inp": _x(8, 2), "cu_seqlens": _ints(0, 4, 8), "cp_size": 2, "total_tokens": 8},
        ("cu_seqlens",),
    ),
    "sequence order": (
        "thd_cp_rank_order_to_sequence_order",
        lambda: {"inp": _x(8, 2), "cu_seqlens": _ints(0, 4, 8), "cp_size": 2, "total_tokens": 8},
        ("cu_seqlens",),
    ),
    "gradient": (
        "thd_grad_correction",
        lambda: {"grad": _x(6, 2), "grad_per_step": _x(6, 2), "cu_seqlens": _ints(0, 2, 6), "first_half": "add", "second_half": "copy"},
        ("cu_seqlens",),
    ),
    "valid tokens": (
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        lambda: {"out": _x(6, 2), "inp": _x(6, 2), "cu_seqlens_padded": _ints(0, 3, 6), "cu_seqlens": _ints(0, 2, 4)},
        ("cu_seqlens_padded", "cu_seqlens"),
    ),
}  # fmt: skip

CASES = [
    (backend, call, name, i, value)
    for call, (_, make, names) in CALLS.items()
    for backend in BACKENDS
    for name in names
    for i in range(make()[name].numel())
    for value in OUTSIDE
]


def _unread(call: str, name: str, i: int) -> bool:
    """Entries of a table past a sequence's last page, and the end of the last padded place."""
    return (call.startswith("paged") and name == "page_table" and i in (2, 5)) or (name == "cu_seqlens_padded" and i == 2)


def _changed(arguments: dict[str, Any], name: str, i: int, value: int) -> None:
    indices = arguments[name].to(torch.int64)
    indices.view(-1)[i] = value
    arguments[name] = indices.to(torch.int32) if -(2**31) <= value < 2**31 else indices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_an_index_outside_is_refused(backend: str, call: str) -> None:
    function, make, _ = CALLS[call]
    accepted, words = [], []
    with tex.set_backend(backend):  # what the native backend lacks is served by torch's
        getattr(tex, function)(**make())
        for _, _, name, i, value in [case for case in CASES if case[:2] == (backend, call) and not _unread(*case[1:4])]:
            arguments = make()
            _changed(arguments, name, i, value)
            before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
            try:
                getattr(tex, function)(**arguments)
                accepted.append((name, i, value))
            except FusibleError as error:
                words.append(str(error))
            assert all(torch.equal(arguments[key], x) for key, x in before.items()), (name, i, value)
    assert not accepted
    assert words and all(re.fullmatch(r"Expected .+ of .+, got .+: .+\.", text) for text in words), words


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["THD", "BSHD", "SBHD"])
@pytest.mark.parametrize("paged", [True, False])
def test_int64_lengths_and_pages_are_refused(backend: str, form: str, paged: bool) -> None:
    """As everywhere in tex: kernels of NVIDIA's read the halves of int64 as two numbers."""
    for name in ("cu_new_lens", "cu_cached_lens", "page_table"):
        arguments = _cache(paged, form)
        before = arguments["k_cache"].clone()
        arguments[name] = arguments[name].long()
        with tex.set_backend(backend), pytest.raises(FusibleError, match=rf"int32 tensor .*of {name} of copy_to_kv_cache, got torch.int64 "):
            tex.copy_to_kv_cache(**arguments)
        assert torch.equal(arguments["k_cache"], before)


def test_both_caches_are_checked_before_either_is_written() -> None:
    for backend in BACKENDS:
        arguments = _cache(True, "THD")
        arguments["v_cache"] = arguments["v_cache"][:5]  # page 5 is one of k's alone
        before = arguments["k_cache"].clone()
        with tex.set_backend(backend), pytest.raises(FusibleError):
            tex.copy_to_kv_cache(**arguments)
        assert torch.equal(arguments["k_cache"], before)
