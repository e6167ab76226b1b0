"""Generation with ``InferenceParams`` by NVIDIA's names: against NVIDIA's own class and modules, and against the whole sequences at once."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package, relative_error

from fusible.compat import te_modules
from fusible.errors import ArgumentError, NotServedError

HIDDEN, HEADS, GROUPS, WIDTH, CAPACITY, BATCH = 64, 4, 2, 16, 32, 3
LAYER: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": GROUPS, "self_attn_mask_type": "padding_causal"}
PAGES: dict[str, Any] = {"is_paged": True, "total_num_pages": BATCH * CAPACITY // 8, "page_size": 8}
STEPS = [OrderedDict(step) for step in ({0: 5, 1: 3}, {0: 1, 1: 1, 2: 7}, {0: 1, 2: 1}, {0: 1, 2: 1, 3: 4}, {2: 1, 3: 1})]
"""Sequences that begin, go on and end; a place in the batch and pages are used again."""
FORMATS = ("bshd", "sbhd", "thd")


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield te


def params(of: Any = te_modules, format_: str = "bshd", dtype: torch.dtype = torch.float32, paged: bool = False, **more: Any) -> Any:
    options = {"qkv_format": format_, "max_ctx_len": CAPACITY, **(PAGES if paged else {}), **more}
    return of.InferenceParams(BATCH, CAPACITY, GROUPS, WIDTH, dtype, **options)


def tokens(name: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(name)).to(dtype)


def stepped(layer: Any, cache: Any, step: OrderedDict[int, int], format_: str, dtype: torch.dtype, **given: Any) -> dict[int, torch.Tensor]:
    """The outputs of the tokens that a step adds, by sequence."""
    before = {name: cache.sequences.get(name, 0) for name in step}
    cache.pre_step(step)
    new = [tokens(name, CAPACITY, dtype)[before[name] : before[name] + count] for name, count in step.items()]
    if format_ == "thd":
        ends = {f"cu_seqlens_{of}": getattr(cache, f"cu_seqlens_{of}") for of in ("q", "kv")}
        y = layer(torch.cat(new), inference_params=cache, max_seqlen_q=CAPACITY, max_seqlen_kv=CAPACITY, **ends, **given)
        return dict(zip(step, y.split(list(step.values())), strict=True))
    x = torch.nn.utils.rnn.pad_sequence(new, batch_first=format_ == "bshd")
    y = layer(x, inference_params=cache, **given)
    rows = y if format_ == "bshd" else y.transpose(0, 1)
    return {name: rows[place, :count] for place, (name, count) in enumerate(step.items())}


def angles() -> torch.Tensor:
    return te_modules.RotaryPositionEmbedding(WIDTH)(CAPACITY)


def layers(*of: Any, dtype: torch.dtype, **more: Any) -> list[Any]:
    made = [package.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, params_dtype=dtype, layer_number=1, **{**LAYER, **more}).eval() for package in of]
    for other in made[1:]:
        other.load_state_dict(made[0].state_dict())
    return made


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format_", FORMATS)
def test_generation_is_that_of_nvidias_class_and_layer(te: Any, format_: str, paged: bool) -> None:
    theirs, ours = layers(te, te_modules, dtype=torch.bfloat16, attn_input_format=format_)
    caches = [params(of, format_, torch.bfloat16, paged) for of in (te, te_modules)]
    for step in STEPS:
        with torch.no_grad():
            wanted, found = (
                stepped(layer, cache, step, format_, torch.bfloat16, rotary_pos_emb=angles())
                for layer, cache in zip((theirs, ours), caches, strict=True)
            )
        for name, y in wanted.items():
            assert relative_error(found[name], y) <= 2.0**-7, (step, name)  # bf16, in another order
        one, other = caches
        assert other.sequences == one.sequences and other.sequences_pre_step == one.sequences_pre_step
        assert torch.equal(other.cu_seqlens_q, one.cu_seqlens_q) and torch.equal(other.cu_seqlens_kv, one.cu_seqlens_kv)
        assert torch.equal(other.get_seqlens_pre_step()[: len(step)], one.get_seqlens_pre_step()[: len(step)])
        if paged:
            assert torch.equal(other.cache_manager.page_table[: len(step)], one.cache_manager.page_table[: len(step)])
            held = [cache.convert_paged_to_nonpaged(1) for cache in caches]
        else:
            held = [[x[: len(step)] for x in cache.cache_manager.cache[1]] for cache in caches]
        for place, length in enumerate(one.sequences.values()):
            for mine, nvidias in zip(held[1], held[0], strict=True):
                assert relative_error(mine[place, :length], nvidias[place, :length]) <= 2.0**-7
    assert str(caches[1].output_qkv_format) == str(caches[0].output_qkv_format)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "rotated": ({}, {"rotary_pos_emb": angles()}),
    "with a window": ({"window_size": (4, 0)}, {}),
    "with slopes": ({}, {"core_attention_bias_type": "alibi"}),
    "normalized": ({"qk_norm_type": "RMSNorm"}, {"rotary_pos_emb": angles()}),
}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_generation_is_the_whole_sequence(name: str, format_: str, paged: bool) -> None:
    options, given = CALLS[name]
    torch.manual_seed(0)
    (layer,) = layers(te_modules, dtype=torch.float32, attn_input_format=format_, **options)
    whole = layers(te_modules, dtype=torch.float32, attn_input_format="bshd", **options)[0]
    whole.load_state_dict(layer.state_dict())
    cache = params(format_=format_, paged=paged)
    outputs: dict[int, list[torch.Tensor]] = {}
    prompts_in_parts = [*STEPS[:2], OrderedDict({0: 4, 2: 1}), OrderedDict({3: 2, 2: 3, 0: 1})]  # a prompt goes on, and the batch has another order
    with torch.no_grad():
        for step in prompts_in_parts:
            for sequence, y in stepped(layer, cache, step, format_, torch.float32, **given).items():
                outputs.setdefault(sequence, []).append(y)
        for sequence, parts in outputs.items():
            found = torch.cat(parts)
            wanted = whole(tokens(sequence, CAPACITY, torch.float32)[None, : len(found)], self_attn_mask_type="causal", **given)[0]
            assert relative_error(found, wanted) <= 2.0**-18, sequence  # sums of 64 in fp32, in another order


def test_a_pass_that_is_repeated_moves_no_row_twice() -> None:
    """The first of two layers has stepped when the second fails; both are called again with what ``pre_step`` has counted in."""
    (layer,) = layers(te_modules, dtype=torch.float32, attn_input_format="bshd")
    results = []
    for repeated in (False, True):
        cache = params()
        with torch.no_grad():
            stepped(layer, cache, OrderedDict({0: 5, 1: 3, 2: 4}), "bshd", torch.float32)
            cache.pre_step(OrderedDict({2: 1, 0: 1, 1: 1}))  # each row becomes another's
            x = torch.stack([tokens(name, length + 1, torch.float32)[length:] for name, length in cache.sequences_pre_step.items()])
            for _ in range(2 if repeated else 1):
                y = layer(x, inference_params=cache)
        results.append(y)
    assert torch.equal(*results)


def test_a_decoder_layer_generates_beside_what_an_encoder_gave() -> None:
    encoded = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(5))
    (layer,) = layers(te_modules, dtype=torch.float32, attn_input_format="bshd", layer_type="decoder")
    x = torch.stack([tokens(name, 6, torch.float32) for name in (0, 1)])
    cache = params()
    with torch.no_grad():
        given: dict[str, Any] = {"encoder_output": encoded, "enc_dec_attn_mask_type": "no_mask"}
        whole = layer(x, self_attn_mask_type="causal", **given)
        parts = [stepped(layer, cache, OrderedDict({0: count, 1: count}), "bshd", torch.float32, **given) for count in (4, 1, 1)]
    for name in (0, 1):
        assert relative_error(torch.cat([part[name] for part in parts]), whole[name]) <= 2.0**-18


def test_memory_is_made_once_and_reset_forgets_the_sequences_alone() -> None:
    cache = params(paged=True)
    cache.allocate_memory(1)
    cache.allocate_memory(2)
    k, v = cache.cache_manager.cache[2]
    assert k.shape == v.shape == (12, 8, GROUPS, WIDTH) and "12 pages of 8" in repr(cache)
    cache.pre_step(OrderedDict({"one": 9, "two": 8}))
    manager = cache.cache_manager
    assert (manager.get_page_list("one"), manager.get_page_count("two"), manager.get_sequence_lengths()) == ([0, 1], 1, [9, 8])
    assert manager.get_sequence_count() == 2 and manager.has_free_page()
    cache.reset()
    assert not cache.sequences and not manager.sequences and not manager.page_table.any() and manager.cache[2][0] is k
    cache.pre_step(OrderedDict({"three": 1}))
    assert manager.get_page_list("three") == [0] and manager.get_page_list("one") == []


def test_a_cache_manager_of_ones_own_keeps_the_tokens() -> None:
    class Listed(te_modules.KVCacheManager):
        """Keeps each sequence's tokens in a list of its own, and gives them in rows."""

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options, self.kept = options, {}

        def pre_step(self, step_dict: Any) -> Any:
            self.sequences = OrderedDict((name, self.sequences.get(name, 0) + count) for name, count in step_dict.items())
            return self.sequences

        def step(self, layer_number: int, new_k: Any, new_v: Any, cu_new_seqlens: Any, cu_cached_seqlens: Any, qkv_format: str) -> Any:
            before = self.kept.get(layer_number, (new_k[:, :0], new_v[:, :0]))
            pair = [torch.cat(each, 1) for each in zip(before, (new_k, new_v), strict=True)]
            self.kept[layer_number] = pair
            return tuple(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, CAPACITY - x.shape[1])) for x in pair)

    (layer,) = layers(te_modules, dtype=torch.float32, attn_input_format="bshd")
    caches = [params(), params(custom_cache_manager=Listed)]
    assert caches[1].cache_manager.options["max_seqlen"] == CAPACITY
    with torch.no_grad():
        for step in (OrderedDict({0: 4, 1: 4, 2: 4}), OrderedDict({0: 1, 1: 1, 2: 1})):
            wanted, found = (stepped(layer, cache, step, "bshd", torch.float32) for cache in caches)
            assert all(torch.equal(found[name], wanted[name]) for name in step)


def _called(step: dict[int, int] | None = None, **call: Any) -> Any:
    cache = params(paged=True)
    cache.pre_step(OrderedDict(step or {0: 2, 1: 2}))
    attention = te_modules.DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type="padding_causal")
    cache.allocate_memory(1)
    q, kv = torch.ones(2, 2, HEADS, WIDTH), torch.ones(2, 2, GROUPS, WIDTH)
    return attention(q, kv, kv, inference_params=cache, **call)


def _full() -> None:
    cache = params(paged=True)
    cache.pre_step(OrderedDict({0: 30}))
    before = dict(cache.sequences), cache.cache_manager.get_page_list(0)
    try:
        cache.pre_step(OrderedDict({0: 3}))
    finally:
        assert (dict(cache.sequences), cache.cache_manager.get_page_list(0)) == before


REFUSED = {
    "no mask": (lambda: _called(attn_mask_type="causal"), ArgumentError, "with inference_params: expected a kind with padding"),
    "a bias": (
        lambda: _called(core_attention_bias_type="post_scale_bias", core_attention_bias=torch.zeros(1, HEADS, 2, CAPACITY)), NotServedError, "biases"
    ),
    "more sequences than rows": (lambda: _called({0: 1, 1: 1, 2: 1}), ArgumentError, "with inference_params: expected 3 to 3 sequences, got 2"),
    "too long": (_full, ArgumentError, "sequence 0 in step_dict of pre_step: expected 0 to 32 tokens, got 33"),
    "too many": (lambda: params().pre_step(OrderedDict.fromkeys(range(4), 1)), ArgumentError, "pre_step: expected at most 3 sequences, got 4"),
    "no width": (lambda: te_modules.InferenceParams(2, 8, 2, dtype=torch.float32), ArgumentError, "InferenceParams: expected head_dim_k, got none"),
    "no page size": (lambda: te_modules.InferenceParams(2, 8, 2, 8, torch.float32, is_paged=True), ArgumentError, "a divisor of the 8 tokens"),
    "too few pages": (lambda: params(**{**PAGES, "total_num_pages": 3}), ArgumentError, "InferenceParams with is_paged: expected 12"),
    "no length of a pass": (lambda: params(format_="thd", max_ctx_len=None), ArgumentError, "qkv_format='thd': expected max_ctx_len"),
    "no format": (lambda: params(format_="hdts"), ArgumentError, "qkv_format of InferenceParams: expected one of sbhd, bshd, thd"),
    "two sequences": (
        lambda: te_modules.MultiheadAttention(8, 2, attention_type="cross")(*[torch.ones(2, 1, 8)] * 3, inference_params=params()),
        NotServedError,
        "MultiheadAttention('cross'): expected inference_params=None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name: str) -> None:
    make, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as raised:
        make()
    assert sentence in str(raised.value) and ": expected " in str(raised.value)
