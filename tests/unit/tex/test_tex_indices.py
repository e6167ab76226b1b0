"""Indices that come as data, in each backend of real tensors: one outside is refused in one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusible.quantized  # noqa: F401 (groups without a quantizer are of its class)
from fusible import cpp_extensions, tex
from fusible.errors import FusibleError
from fusible.tex.interface.declare import DECLARATIONS

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


def _step() -> dict[str, Any]:
    pages = {"k_cache": _x(6, 2, 2, 4), "v_cache": _x(6, 2, 2, 3), "page_table": torch.stack((_ints(5, 1, 0), _ints(2, 3, 4)))}
    lengths = {"cu_new_lens": _ints(0, 2, 4), "cu_cached_lens": _ints(0, 4, 7), "start_positions": _ints(2, 1)}
    options = {"angles": _x(6, 1, 1, 4), "interleaved": False, "max_new_len": 2, "window_size": (-1, -1), "scale": 0.5}
    return {"q": _x(4, 4, 4), "k": _x(4, 2, 4), "v": _x(4, 2, 3), **pages, **lengths, **options}


def _rope(**more: Any) -> dict[str, Any]:
    given = {"start_positions": None, "qkv_format": FORMAT.NVTE_THD, "interleaved": False, "cu_seqlens": _ints(0, 3, 5), "cp_size": 1, "cp_rank": 0}
    return {"input": _x(6, 2, 8), "freqs": _x(8, 1, 1, 8), **given, **more}


def _gradients() -> dict[str, Any]:
    made = _rope()
    return {"output_grads": made.pop("input"), **made}


def _packed(function: str = "fused_attn_fwd", *, padded: bool = False) -> dict[str, Any]:
    """Two packed sequences of attention; ``padded``: which lie apart."""
    thd, unset = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, FORMAT.NVTE_QKV_Format_NOT_SET
    starts = _ints(0, 3, 6) if padded else None
    given = {
        "max_seqlen_q": 4, "max_seqlen_kv": 4, "attn_scale": 0.5, "p_dropout": 0.0, "qkv_layout": thd, "dqkv_layout": thd,
        "fake_dtype": torch.float32, "o_format": FORMAT.NVTE_THD, "do_format": FORMAT.NVTE_THD, "qkv_scale_inv_format": unset,
        "do_scale_inv_format": unset,
        "bias_type": tex.NVTE_Bias_Type.NVTE_NO_BIAS, "attn_mask_type": tex.NVTE_Mask_Type.NVTE_PADDING_MASK,
        "softmax_type": tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, "window_size": [-1, -1], "rng_elts_per_thread": 0,
        "Q": _x(6, 2, 4), "K": _x(6, 2, 4), "V": _x(6, 2, 4), "O": _x(6, 2, 4), "dO": _x(6, 2, 4),
        "Aux_CTX_Tensors": [_x(6, 2, 1), torch.zeros(2).long()],
        "cu_seqlens_q": _ints(0, 2, 5), "cu_seqlens_kv": _ints(0, 3, 5), "cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts,
    }  # fmt: skip
    flags = ("bottom_right_diagonal", "cuda_graph", "deterministic", "is_training", "return_max_logit", "set_zero")
    parameters = DECLARATIONS[function].signature.parameters
    return {name: given.get(name, False if name in flags else None) for name in parameters}


def _paged() -> dict[str, Any]:
    """Attention over pages of three tokens, of which the sequences have reached 5 and 2."""
    layouts = tex.NVTE_QKV_Layout
    pages = {"page_table_k": torch.stack((_ints(3, 1), _ints(0, 2))), "page_table_v": torch.stack((_ints(3, 1), _ints(0, 2)))}
    sizes = {"Q": _x(2, 4, 2, 4), "K": _x(4, 3, 2, 4), "V": _x(4, 3, 2, 4), "cu_seqlens_q": _ints(0, 4, 6), "cu_seqlens_kv": _ints(0, 5, 7)}
    form = {"qkv_layout": layouts.NVTE_Paged_KV_BSHD_BSHD_BSHD, "o_format": FORMAT.NVTE_BSHD, "max_seqlen_kv": 6}
    return {**_packed(), **sizes, **form, **pages}


OUTSIDE = (-1, -(2**31), 2**31 - 1, 2**31, 2**40 + 1, 99)
"""What no index below may be; the ones past int32 are given as int64."""

CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "paged THD": ("copy_to_kv_cache", lambda: _cache(True, "THD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "paged BSHD": ("copy_to_kv_cache", lambda: _cache(True, "BSHD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "dense SBHD": ("copy_to_kv_cache", lambda: _cache(False, "SBHD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "dense THD": ("copy_to_kv_cache", lambda: _cache(False, "THD"), ("cu_new_lens", "cu_cached_lens", "page_table")),
    "a step": ("prim_attention_step", _step, ("cu_new_lens", "cu_cached_lens", "page_table", "start_positions")),
    "a step from the first angle on": ("prim_attention_step", lambda: {**_step(), "start_positions": None}, ("cu_new_lens", "page_table")),
    "rope": ("fused_rope_forward", _rope, ("cu_seqlens",)),
    "rope of a grid": (
        "fused_rope_forward",
        lambda: _rope(input=_x(6, 2, 2, 8), qkv_format=FORMAT.NVTE_SBHD, start_positions=_ints(0, 2), cu_seqlens=None),
        ("start_positions",),
    ),
    "rope that begins later": ("fused_rope_forward", lambda: _rope(start_positions=_ints(5, 1)), ("start_positions",)),
    "rope of a rank": (
        "fused_rope_forward", lambda: _rope(cu_seqlens=_ints(0, 4, 8), freqs=_x(10, 1, 1, 8), cp_size=2, cp_rank=1, start_positions=_ints(6, 0)),
        ("cu_seqlens",),
    ),
    "packed attention": ("fused_attn_fwd", _packed, ("cu_seqlens_q", "cu_seqlens_kv")),
    "packed attention backward": ("fused_attn_bwd", lambda: _packed("fused_attn_bwd"), ("cu_seqlens_q", "cu_seqlens_kv")),
    "attention of padded sequences": (
        "fused_attn_fwd", lambda: _packed(padded=True), ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    ),
    "paged attention": ("fused_attn_fwd", _paged, ("cu_seqlens_q", "cu_seqlens_kv", "page_table_k", "page_table_v")),
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
    if name.startswith("page_table"):
        return call.startswith(("paged ", "a step")) and i in ((3,) if call == "paged attention" else (2, 5))
    return name.endswith("_padded") and i == 2


def _changed(arguments: dict[str, Any], name: str, i: int, value: int) -> None:
    indices = arguments[name].to(torch.int64)
    indices.view(-1)[i] = value
    arguments[name] = indices.to(torch.int32) if -(2**31) <= value < 2**31 else indices


def _outcome(backend: str, call: str, name: str, i: int, value: int) -> str:
    """The sentence that refuses a call with another index, or nothing; nothing is written either way."""
    function, make, _ = CALLS[call]
    arguments = make()
    _changed(arguments, name, i, value)
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    found = ""
    with tex.set_backend(backend):  # what the native backend lacks is served by torch's
        try:
            _of(function)(**arguments)
        except FusibleError as error:
            found = str(error)
    assert all(torch.equal(arguments[key], x) for key, x in before.items()), (name, i, value)
    return found


def _of(function: str) -> Callable[..., Any]:
    return getattr(tex.prim, function.removeprefix("prim_")) if function.startswith("prim_") else getattr(tex, function)


@pytest.mark.parametrize("call", CALLS)
def test_an_index_outside_is_refused_in_the_same_words_by_every_backend(call: str) -> None:
    function, make, _ = CALLS[call]
    for backend in BACKENDS:
        with tex.set_backend(backend):
            _of(function)(**make())
    for _, _, name, i, value in [case for case in CASES if case[:2] == (BACKENDS[0], call) and not _unread(*case[1:4])]:
        found = [_outcome(backend, call, name, i, value) for backend in BACKENDS]
        assert len(set(found)) == 1, found
        assert re.fullmatch(r".+: expected .+, got .+; .+\.", found[0]), (name, i, value, found)
        assert function.removeprefix("prim_") in found[0], found


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_that_share_tokens_are_refused(backend: str) -> None:
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        arguments = _packed(padded=True)
        arguments[name] = _ints(0, 1, 6)
        with (
            tex.set_backend(backend),
            pytest.raises(FusibleError, match=f"{name} of fused_attn_fwd: expected sequences that begin past the ones before, got 1 before"),
        ):
            tex.fused_attn_fwd(**arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_before_the_first_sequence_are_in_none(backend: str) -> None:
    with tex.set_backend(backend):
        whole = tex.fused_rope_forward(**_rope(cu_seqlens=_ints(2, 4, 5)))
    assert not whole[:2].any() and whole[2:5].any() and not whole[5:].any()


def test_a_row_that_two_copies_went_to_has_no_gradient() -> None:
    x, prob = _x(4, 2), torch.ones(4, 1)
    tex.moe_unpermute_bwd(x, x, torch.float32, _ints(3, 1, -1, -1), prob)
    with pytest.raises(FusibleError, match="row_id_map of moe_unpermute_bwd: expected each index at most once, got 3 twice"):
        tex.moe_unpermute_bwd(x, x, torch.float32, _ints(3, 1, 3, -1), prob)


@pytest.mark.parametrize("wrong", [{"first_dims": (-1, 5)}, {"first_dims": (3, 99)}, {"tensor_offsets": (0, 16, 99)}, {"tensor_offsets": (0, 8, 64)}])
def test_members_of_a_group_lie_apart_and_within(wrong: dict[str, tuple[int, ...]]) -> None:
    given = {"first_dims": (2, 2), "tensor_offsets": (0, 32, 64)}
    for named in (given, {**given, **wrong}):
        first_dims, offsets = (torch.tensor(named[name]) for name in given)
        if named is given:
            tex.group_quantize(_x(4, 16), None, 2, first_dims, None, offsets)
            continue
        with pytest.raises(FusibleError, match="group_quantize: expected .*, got"):
            tex.group_quantize(_x(4, 16), None, 2, first_dims, None, offsets)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["THD", "BSHD", "SBHD"])
@pytest.mark.parametrize("paged", [True, False])
def test_int64_lengths_and_pages_are_refused(backend: str, form: str, paged: bool) -> None:
    """As everywhere in tex: kernels of NVIDIA's read the halves of int64 as two numbers."""
    for name in ("cu_new_lens", "cu_cached_lens", "page_table"):
        arguments = _cache(paged, form)
        before = arguments["k_cache"].clone()
        arguments[name] = arguments[name].long()
        with (
            tex.set_backend(backend),
            pytest.raises(FusibleError, match=rf"{name} of copy_to_kv_cache: expected an int32 tensor.*, got torch.int64 "),
        ):
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
