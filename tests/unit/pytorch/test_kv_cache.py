"""Going on from a cache gives what the whole sequence gives; and what a cache refuses."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from fusible import autocast
from fusible.errors import ArgumentError, CheckpointError, DTypeError, ShapeError
from fusible.pytorch import (
    GELU,
    DelayedScaling,
    DotProductAttention,
    Float8CurrentScaling,
    GroupedQuerySelfAttention,
    KVCache,
    LatentAttention,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Residual,
    Sequential,
    SwiGLU,
    ops,
    parameter_bytes,
    quantize_parameters,
    quantized_model_init,
)
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Tensor
from fusible.tex import DType

H, HEADS, GROUPS = 32, 4, 2
DTYPE_EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def model_of(dtype: torch.dtype = torch.float32, rope: float | None = 10000.0, window: tuple[int, int] = (-1, -1)) -> Sequential:
    torch.manual_seed(0)
    attention = GroupedQuerySelfAttention(H, HEADS, GROUPS, rope_base=rope, window_size=window)
    blocks = [
        block
        for _ in range(2)
        for block in (
            Residual(LayerNorm(H), Linear(H, H * 2), attention, Linear(H, H)),
            Residual(LayerNorm(H), Linear(H, 4 * H), SwiGLU(), Linear(2 * H, H)),
        )
    ]
    return Sequential(*blocks, LayerNorm(H)).to(dtype)


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def in_steps(model: nn.Module, sequences: list[torch.Tensor], steps: list[list[int]], cache: KVCache) -> list[torch.Tensor]:
    """Each sequence's outputs, computed ``steps[s][i]`` tokens of sequence i at a time."""
    done = [0] * len(sequences)
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for lengths in steps:
        x = torch.cat([s[d : d + n] for s, d, n in zip(sequences, done, lengths, strict=True)])
        y = model(x, torch.tensor(lengths, dtype=torch.int32), cache=cache)
        cache.advance(lengths)
        for collected, part in zip(outputs, y.split(lengths), strict=True):
            collected.append(part)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    return [torch.cat(parts) for parts in outputs]


STEPS = [[7, 3, 5], [1, 1, 1], [1, 0, 1], [2, 5, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
TOTALS = [sum(column) for column in zip(*STEPS, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", [None, 1, 4])
@pytest.mark.parametrize(("rope", "window"), [(None, (-1, -1)), (10000.0, (-1, -1)), (10000.0, (3, 0)), (None, (0, -1))])
def test_sequences_in_steps_are_the_sequences_at_once(dtype: torch.dtype, pages: int | None, rope: float | None, window: tuple[int, int]) -> None:
    model = model_of(dtype, rope, window)
    sequences = [tokens(n, dtype, seed) for seed, n in enumerate(TOTALS)]
    cache = KVCache(3, 20, page_size=pages, dtype=dtype)
    stepwise = in_steps(model, sequences, STEPS, cache)
    with torch.no_grad():
        whole = [model(sequence) for sequence in sequences]
    assert cache.lengths == tuple(TOTALS)
    # A norm comes last, so values are of order 1; each of the eight layers before it rounds its result, and its terms, once more.
    for got, expected in zip(stepwise, whole, strict=True):
        assert (got - expected).abs().max().item() <= 32 * DTYPE_EPS[dtype]


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"value_width": 4, "rope_scale": 1.5}, {"groups": 1, "rope_interleaved": True}], ids=["values", "latents"])
def test_heads_with_a_rotated_key_for_all_go_on_in_steps(options: dict[str, Any], dtype: torch.dtype, executor: str) -> None:
    """Where the values are found in the keys, a cache keeps the keys alone."""
    torch.manual_seed(0)
    attention = LatentAttention(HEADS, 6, 4, **options)
    groups, own = options.get("groups", HEADS), options.get("value_width", 0)
    columns = HEADS * 10 + 4 + groups * (6 + own)
    model = Sequential(LayerNorm(H), Linear(H, columns), attention, Linear(HEADS * (own or 6), H), LayerNorm(H)).to(dtype).compile(executor)
    sequences = [tokens(n, dtype, seed) for seed, n in enumerate(TOTALS)]
    cache = KVCache(3, 20, page_size=4, dtype=dtype)
    stepwise = in_steps(model, sequences, STEPS, cache)
    with torch.no_grad():
        whole = [model(sequence) for sequence in sequences]
    for got, expected in zip(stepwise, whole, strict=True):
        assert (got - expected).abs().max().item() <= 32 * DTYPE_EPS[dtype]
    assert cache.nbytes == 3 * 20 * groups * (10 + own) * dtype.itemsize


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("queries", [False, True])
def test_a_mask_of_the_new_queries_goes_with_a_cache(executor: str, soft_cap: float | None, queries: bool) -> None:
    """Of each sequence, as their places differ, and of keys alone where it is the same for all queries."""
    total = max(TOTALS)
    masks = torch.randn(3, HEADS, total if queries else 1, total, generator=torch.Generator().manual_seed(5))
    attention = DotProductAttention(HEADS, H // HEADS, mask=True, soft_cap=soft_cap)
    torch.manual_seed(0)
    model = Sequential(Residual(LayerNorm(H), Linear(H, 3 * H), attention, Linear(H, H)), LayerNorm(H)).compile(executor)
    sequences = [tokens(n, seed=seed) for seed, n in enumerate(TOTALS)]
    cache, done = KVCache(3, 20, page_size=4, dtype=torch.float32), [0, 0, 0]
    with torch.no_grad():
        whole = [model(x[None], extra_inputs=[mask[None, :, : len(x), : len(x)]])[0] for x, mask in zip(sequences, masks, strict=True)]
        for lengths in STEPS:
            ends = [a + b for a, b in zip(done, lengths, strict=True)]
            rows = [[min(start + i, total - 1) for i in range(max(lengths))] if queries else [0] for start in done]
            now = torch.stack([mask[:, row, : max(ends)] for mask, row in zip(masks, rows, strict=True)])
            x = torch.cat([s[a:b] for s, a, b in zip(sequences, done, ends, strict=True)])
            y = model(x, torch.tensor(lengths, dtype=torch.int32), cache=cache, extra_inputs=[now])
            cache.advance(lengths)
            for part, expected, a, b in zip(y.split(lengths), whole, done, ends, strict=True):
                assert a == b or (part - expected[a:b]).abs().max().item() <= 32 * DTYPE_EPS[torch.float32]
            done = ends


def test_a_mask_that_ends_before_the_cache_does_is_refused() -> None:
    model, cache = DotProductAttention(2, 4, mask=True), KVCache(2, 8, dtype=torch.float32)
    with torch.no_grad():
        for mask in (torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 1, 1)):
            model(torch.randn(5, 24), torch.tensor([3, 2]), cache=cache, extra_inputs=[mask])
        cache.advance([3, 2])
        with pytest.raises(ShapeError, match=r"the mask of DotProductAttention: expected 2 queries and 5 keys, or 1, got \[1, 1, 2, 4\]"):
            model(torch.randn(3, 24), torch.tensor([2, 1]), cache=cache, extra_inputs=[torch.zeros(1, 1, 2, 4)])


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_steps_under_a_recipe_and_with_weights_held_in_8_bits(recipe: object) -> None:
    model = quantize_parameters(model_of())
    sequences = [tokens(n, seed=seed) for seed, n in enumerate(TOTALS)]
    with autocast(recipe=recipe):  # type: ignore[arg-type]
        stepwise = in_steps(model, sequences, STEPS, KVCache(3, 20, dtype=torch.float32))
        with torch.no_grad():
            whole = [model(sequence) for sequence in sequences]
    # Under current scaling the two see other amaxes; an activation may land a step of E4M3 (an eighth) apart.
    for got, expected in zip(stepwise, whole, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() <= 1 / 8


def test_nothing_counts_until_it_is_counted() -> None:
    model, cache = model_of(), KVCache(1, 8, dtype=torch.float32)
    x = tokens(6)
    with torch.no_grad():
        first = model(x[:4], cache=cache)
        cache.advance([4])
        model(tokens(2, seed=9), cache=cache)  # rejected: never counted
        second = model(x[4:], cache=cache)
        whole = model(x)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)


def test_a_sequence_that_is_truncated_gives_its_pages_to_others() -> None:
    model, cache = model_of(), KVCache(2, 16, page_size=4, pages=5, dtype=torch.float32)
    first, second = tokens(12), tokens(8, seed=2)
    in_steps(model, [first, second[:4]], [[12, 4]], cache)
    with torch.no_grad(), pytest.raises(ArgumentError, match="a KVCache: expected 2 free pages of 4 tokens, got 1 of 5; truncate a sequence"):
        model(torch.cat([tokens(1), second[4:]]), torch.tensor([1, 4], dtype=torch.int32), cache=cache)
    cache.truncate(0)
    assert cache.lengths == (0, 4)
    (_, rest) = in_steps(model, [first[:0], second[4:]], [[0, 4]], cache)
    with torch.no_grad():
        torch.testing.assert_close(rest, model(second)[4:], rtol=1e-5, atol=1e-5)


def test_a_batch_of_equal_lengths_may_come_in_three_dimensions() -> None:
    model, cache = model_of(), KVCache(2, 8, dtype=torch.float32)
    x = torch.stack([tokens(5), tokens(5, seed=2)])
    with torch.no_grad():
        parts = []
        for part in (x[:, :4], x[:, 4:]):
            parts.append(model(part, cache=cache))
            cache.advance([part.shape[1]] * 2)
        torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-5, atol=1e-5)


def test_memory_is_that_of_the_pages() -> None:
    model, cache = model_of(), KVCache(3, 100, page_size=8, pages=10, dtype=torch.bfloat16)
    assert cache.nbytes == 0
    with torch.no_grad():
        model.bfloat16()(tokens(3, torch.bfloat16), torch.tensor([1, 1, 1], dtype=torch.int32), cache=cache)
    assert cache.nbytes == 2 * 2 * 10 * 8 * GROUPS * (H // HEADS) * 2  # layers, k and v, pages, tokens, heads, width, bytes


def test_what_a_cache_refuses() -> None:
    model, cache = model_of(), KVCache(2, 8, dtype=torch.float32)
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"a call with a cache: expected torch.no_grad\(\), got a call that records gradients"):
        model(tokens(5), lengths, cache=cache)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="a KVCache: expected at most 8 tokens, got 9 of sequence 1"):
            model(tokens(10), torch.tensor([1, 9], dtype=torch.int32), cache=cache)
        with pytest.raises(ShapeError, match="seq_lens of a call with a cache: expected 2 numbers of at least 0, one per sequence, got 1 numbers"):
            model(tokens(5), torch.tensor([5], dtype=torch.int32), cache=cache)
        with pytest.raises(ArgumentError, match="a call with a cache: expected causal attention, got DotProductAttention"):
            Sequential(Linear(H, 3 * H), MultiHeadedSelfAttention(H, HEADS, causal=False))(tokens(5), lengths, cache=cache)
        assert cache.lengths == (0, 0)
        with pytest.raises(ArgumentError, match="advance: expected the seq_lens of the last call, got 3, which no call computed"):
            cache.advance(lengths)
        model(tokens(5), lengths, cache=cache)
        cache.advance(lengths)
    with pytest.raises(ArgumentError, match="truncate: expected at most the 3 tokens of it, got 4"):
        cache.truncate(0, 4)
    with pytest.raises(ArgumentError, match="capacity of KVCache: expected .*at least 1.*, got 0"):
        KVCache(1, 0)


@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_weights_held_in_8_bits_are_held_once(called: bool) -> None:
    others = {id(t): t for t in _tensors_alive()}  # kept, so that nobody else gets their ids
    model = model_of()
    if called:
        model(tokens(3)).sum().backward()
        model.zero_grad()
    before = sum(parameter.numel() for parameter in model.parameters())
    matrices = [parameter.numel() for parameter in model.parameters() if parameter.dim() == 2]
    quantize_parameters(model)
    # A byte an element of a matrix with one fp32 scale; no transposed copy of it, which nothing but a backward reads.
    assert parameter_bytes(model) == sum(matrices) + 4 * len(matrices) + 4 * (before - sum(matrices))
    with torch.no_grad():
        model(tokens(3))
    kept = [t for t in _tensors_alive() if t.numel() == H * 4 * H and t.dtype is torch.float32 and id(t) not in others and not t.is_meta]
    assert not kept, "a weight of before is still held"


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()], ids=repr)
def test_the_bytes_of_parameters_are_those_of_every_tensor_in_them(recipe: Recipe) -> None:
    """Values, scales, and the copy by columns where there is one; for none of these two bytes an element."""
    with quantized_model_init(recipe=recipe):
        layer = Linear(256, 128, bias=False)
    fields = [value for value in layer.weight.get_metadata().values() if isinstance(value, torch.Tensor)]
    assert parameter_bytes(layer) == sum(value.nbytes for value in fields) < 2.2 * layer.weight.numel()


def test_scaling_states_outlive_the_quantization_of_the_weights() -> None:
    model = model_of()
    with autocast(recipe=DelayedScaling()):
        for _ in range(2):
            model(3 * tokens(5)).sum().backward()
        before = model.state_dict()["scaling_state.0"]
        assert torch.equal(quantize_parameters(model).state_dict()["scaling_state.0"], before)
        with torch.no_grad():
            model(tokens(5))
    assert torch.equal(model.state_dict()["scaling_state.0"], before)


def _tensors_alive() -> list[torch.Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.layout is torch.strided]


def test_a_copy_of_a_cache_goes_another_way() -> None:
    model, tokens = _cached_model(), torch.randn(9, 32)
    cache = KVCache(1, 16, dtype=torch.float32)
    _further(model, cache, tokens[:4])
    twin = copy.deepcopy(cache)
    _further(model, cache, tokens[4:6])
    first = _further(model, twin, tokens[4:])
    again = KVCache(1, 16, dtype=torch.float32)
    _further(model, again, tokens[:4])
    assert torch.equal(first, _further(model, again, tokens[4:])) and cache.lengths == (6,) and twin.lengths == (9,)


OTHERS: dict[str, Callable[[Sequential, KVCache], tuple[Any, Any]]] = {
    "another model": lambda model, cache: (_cached_model(), cache),
    "a copy of the model": lambda model, cache: (copy.deepcopy(model), cache),
    "copies of both": lambda model, cache: copy.deepcopy((model, cache)),
    "a hooked model": lambda model, cache: (model[0].register_forward_hook(lambda *args: None) and model, cache),
    "quantized weights": lambda model, cache: (quantize_parameters(model), cache),
}


@pytest.mark.parametrize("how", OTHERS)
def test_a_cache_goes_on_with_the_model_that_filled_it(how: str) -> None:
    """Any other has no keys and values of the tokens that the cache counts, and would attend to zeros."""
    model, tokens = _cached_model(), torch.randn(9, 32)
    cache = KVCache(1, 16, dtype=torch.float32)
    _further(model, cache, tokens[:4])
    other, held = OTHERS[how](model, cache)
    with pytest.raises(ArgumentError, match=r"^a KVCache with tokens: expected the model that filled it, got [^\n]*\.$"):
        _further(other, held, tokens[4:])
    held.truncate(0)
    assert _further(other, held, tokens).shape == (9, 32)


def test_a_cache_is_not_pickled() -> None:
    with pytest.raises(CheckpointError, match=r"^a KVCache: expected copies by copy.deepcopy alone, got [^\n]*\.$"):
        pickle.dumps(KVCache(1, 16))


def _cached_model() -> Sequential:
    torch.manual_seed(1)
    return Sequential(Residual(LayerNorm(32), Linear(32, 96), MultiHeadedSelfAttention(32, 2, rope_base=10000.0), Linear(32, 32)))


def _further(model: Any, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = model(tokens, torch.tensor([len(tokens)], dtype=torch.int32), cache=cache)
    cache.advance([len(tokens)])
    return y


WITHOUT_ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: Linear(H, H),
    "a block": lambda: Sequential(Residual(LayerNorm(H), Linear(H, 2 * H), SwiGLU(), Linear(H, H)), LayerNorm(H)),
}
CALLS: dict[str, tuple[tuple[int, ...], Any]] = {
    "one sequence": ((40, H), None),
    "sequences": ((40, H), [30, 0, 10]),
    "equal ones": ((2, 20, H), None),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_what_keeps_no_keys_takes_nothing_of_a_cache(name: str, call: str) -> None:
    """Tokens pass by each other in it: their number is no matter to the cache, nor is who filled it."""
    model, (shape, lengths) = WITHOUT_ATTENTION[name](), CALLS[call]
    x, seq_lens = torch.randn(shape), None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    cache = KVCache(2, 8, page_size=4, dtype=torch.float32)
    for filled in (False, True):
        if filled:
            in_steps(model_of(), [tokens(3), tokens(2)], [[3, 2]], cache)
        before = _held_by(cache)
        with torch.no_grad():
            y = model(x, seq_lens, cache=cache)
            assert torch.equal(y, model(x, seq_lens))
        assert _held_by(cache) == before and cache.lengths == ((3, 2) if filled else (0, 0))


def _held_by(cache: KVCache) -> list[Any]:
    return copy.deepcopy([cache._lengths, cache._free, cache._pages_of, [id(tensor) for pair in cache._layers.values() for tensor in pair]])


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*WITHOUT_ATTENTION, "attention"])
def test_a_cache_is_where_the_input_is(name: str, where: str) -> None:
    """Whether or not anything would be written to it."""
    model, cache = (model_of() if name == "attention" else WITHOUT_ATTENTION[name]()), KVCache(1, 8, dtype=torch.float32, device=where)
    with torch.no_grad():
        if where == "cpu":
            assert torch.equal(model(tokens(3), cache=cache), model(tokens(3)))
            return
        with pytest.raises(ArgumentError, match=r"^a call with a cache: expected a KVCache on cpu, where x is, got one on meta; make it there\.$"):
            model(tokens(3), cache=cache)
    assert cache.lengths == (0,) and cache._pages_of == [[]]


HOLDING = [names for count in range(3) for names in combinations(("0.weight", "1.weight"), count)]


@pytest.mark.parametrize("held", HOLDING, ids=" and ".join)
def test_each_weight_is_quantized_unless_it_is_held_so(held: tuple[str, ...]) -> None:
    """One that is keeps its values and its scale, whichever others there are; what no product reads stays as it is."""
    torch.manual_seed(3)
    model = Sequential(Linear(H, 16), Linear(16, 8), LayerNorm(8))
    with quantized_model_init(recipe=Float8CurrentScaling()):
        for name in held:
            place = int(name[0])
            setattr(model, name[0], Linear(*((H, 16), (16, 8))[place]))
    before = {name: parameter for name, parameter in model.named_parameters()}
    assert quantize_parameters(model) is model
    for name, parameter in model.named_parameters():
        is_weight = name in ("0.weight", "1.weight")
        assert isinstance(parameter, Float8Tensor) == is_weight and (parameter is before[name]) == (name in held or not is_weight)
        if is_weight and name not in held:
            wanted = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)(before[name].detach())
            assert torch.equal(parameter.dequantize(), wanted.dequantize()) and not parameter.requires_grad
    with torch.no_grad():
        assert model(tokens(3)).shape == (3, 8)


def test_each_part_of_a_grouped_weight_is_quantized_unless_it_is_held_so() -> None:
    for held in range(3):
        layer, x = ops.GroupedLinear(3, H, 16, bias=False), tokens(6)
        first = nn.Parameter(Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(getattr(layer, f"weight{held}").detach()), requires_grad=False)
        setattr(layer, f"weight{held}", first)
        quantize_parameters(layer)
        assert all(isinstance(parameter, Float8Tensor) for parameter in layer.parameters()) and getattr(layer, f"weight{held}") is first
        with torch.no_grad():
            assert layer(x, torch.tensor([2, 1, 3])).shape == (6, 16)


def test_caches_of_other_shapes_may_take_turns() -> None:
    """A pass that is listed for one is not taken for another: of other pages, tables, or sequences of as many tokens in all."""
    model = model_of()
    shapes: list[tuple[int, int, int | None, int | None]] = [
        (2, 8, 4, 4), (2, 16, 4, 4), (2, 4, 2, 4), (2, 8, 2, 8), (1, 16, 4, 4), (2, 8, 4, 9), (2, 8, None, None), (2, 16, None, None)
    ]  # fmt: skip
    caches = [KVCache(count, capacity, page_size=size, pages=pages, dtype=torch.float32) for count, capacity, size, pages in shapes]
    sequences = tokens(8), tokens(8, seed=2)
    with torch.no_grad():
        wanted = [model(sequence) for sequence in sequences]
        for step in range(4):
            for cache, (count, *_) in zip(caches, shapes, strict=True):
                rows = [2] if count == 1 else [1, 1]
                done = [sum(rows[:1]) * step] * count
                x = torch.cat([s[d : d + n] for s, d, n in zip(sequences, done, rows, strict=False)])
                y = model(x, torch.tensor(rows, dtype=torch.int32), cache=cache)
                cache.advance(rows)
                for part, w, d, n in zip(y.split(rows), wanted, done, rows, strict=False):
                    torch.testing.assert_close(part, w[d : d + n], rtol=1e-5, atol=1e-5)


class OnCopies:
    """Runs programs on copies of what it is given, as one does that has memory of its own."""

    name, whole, in_place = "copies", True, False

    def __call__(self, key: Any, program: Any, inputs: list[torch.Tensor]) -> Any:
        return program([x.clone() for x in inputs])


def test_what_an_executor_makes_of_a_cache_in_memory_of_its_own_is_the_cache() -> None:
    model, cache, sequence = model_of(), KVCache(1, 8, dtype=torch.float32), tokens(6)
    with torch.no_grad():
        wanted = model(sequence)
        model._runner().executor = OnCopies()
        steps = [go_on(model, cache, part, [len(part)]) for part in sequence.split([3, 1, 2])]
    torch.testing.assert_close(torch.cat(steps), wanted, rtol=1e-5, atol=1e-5)


def test_a_pass_listed_for_sequences_of_few_pages_is_not_taken_for_more() -> None:
    """Of two caches of four pages, in one a sequence may have two of them, in the other all."""
    model, rows = model_of(), torch.tensor([1, 1], dtype=torch.int32)
    short, long = (KVCache(2, capacity, page_size=4, pages=4, dtype=torch.float32) for capacity in (8, 16))
    sequences = tokens(12), tokens(4, seed=2)
    with torch.no_grad():
        wanted = [model(sequence) for sequence in sequences]
        for _ in range(3):
            model(torch.cat([s[:1] for s in sequences]), rows, cache=short)
            short.advance([1, 1])
        model(torch.cat([sequences[0][:9], sequences[1][:1]]), torch.tensor([9, 1], dtype=torch.int32), cache=long)
        long.advance([9, 1])
        for step in range(3):
            y = model(torch.cat([sequences[0][9 + step : 10 + step], sequences[1][1 + step : 2 + step]]), rows, cache=long)
            long.advance([1, 1])
            torch.testing.assert_close(y, torch.stack([wanted[0][9 + step], wanted[1][1 + step]]), rtol=1e-5, atol=1e-5)


def go_on(model: Sequential, cache: KVCache, x: torch.Tensor, seq_lens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        y = model(x, torch.tensor(seq_lens, dtype=torch.int32), cache=cache)
    cache.advance(seq_lens)
    return y


@pytest.mark.parametrize("count", [7, 8, 11])
def test_sequences_that_begin_alike_share_pages(count: int) -> None:
    model, x = model_of(), tokens(20)
    cache = KVCache(3, 24, page_size=4, pages=12, dtype=torch.float32)
    go_on(model, cache, x[:11], [11, 0, 0])
    shared = cache.share(2, 0, count)
    assert shared == count // 4 * 4 and cache.lengths == (11, 0, shared) and cache.free_pages() == 9
    assert [cache.shares(0, token) for token in (0, 3, 4, 10)] == [True, True, shared == 8, False]
    assert cache.free_pages(without=[0]) == 12 - shared // 4 and cache.free_pages(without=[2]) == 9
    other = tokens(20, seed=2)[: 15 - shared]
    ways = [x[:20], torch.cat([x[:shared], other])]
    made = go_on(model, cache, torch.cat([x[11:], other]), [9, 0, 15 - shared]).split([9, 15 - shared])
    for way, part in zip(ways, made, strict=True):
        with torch.no_grad():
            wanted = model(way, torch.tensor([len(way)], dtype=torch.int32))[-len(part) :]
        torch.testing.assert_close(part, wanted, rtol=H * DTYPE_EPS[torch.float32], atol=H * DTYPE_EPS[torch.float32])
    held = cache.free_pages()
    cache.truncate(0)
    assert cache.free_pages() == held + 5 - shared // 4  # those of both stay
    cache.truncate(2)
    assert cache.free_pages() == 12


def test_a_sequence_that_is_cut_within_a_shared_page_leaves_it_to_the_other() -> None:
    model, x = model_of(), tokens(20)
    cache = KVCache(3, 24, page_size=4, pages=6, dtype=torch.float32)
    go_on(model, cache, x[:8], [8, 0, 0])
    cache.share(1, 0, 8)
    cache.share(2, 1, 8)
    cache.truncate(0, 6)
    assert cache.lengths == (6, 8, 8) and cache.free_pages() == 3
    other = tokens(20, seed=2)
    made = go_on(model, cache, torch.cat([other[:2], x[8:10], x[8:12]]), [2, 2, 4]).split([2, 2, 4])
    for way, part in zip([torch.cat([x[:6], other[:2]]), x[:10], x[:12]], made, strict=True):
        with torch.no_grad():
            wanted = model(way, torch.tensor([len(way)], dtype=torch.int32))[-len(part) :]
        torch.testing.assert_close(part, wanted, rtol=H * DTYPE_EPS[torch.float32], atol=H * DTYPE_EPS[torch.float32])
    apart = copy.deepcopy(cache)
    for index in (1, 0, 2):
        cache.truncate(index)
    assert cache.free_pages() == 6 and apart.free_pages() == 1


def test_what_sharing_refuses() -> None:
    model, cache = model_of(), KVCache(3, 8, page_size=4, pages=2, dtype=torch.float32)
    go_on(model, cache, tokens(8), [8, 0, 0])
    cache.share(1, 0, 8)
    for wrong, said in [
        (lambda: cache.share(1, 0, 4), "share: expected at most the 8 tokens of sequence 0 for an empty one, got 4 tokens for one of 8"),
        (lambda: cache.share(2, 0, 9), "got 9 tokens for one of 0"),
        (lambda: cache.share(2, 0, -1), "got -1 tokens"),
        (lambda: cache.truncate(0, 6), "truncate within a page that is shared: expected a free page, got none"),
    ]:
        with pytest.raises(ArgumentError, match=said):
            wrong()
    assert cache.lengths == (8, 8, 0) and cache.free_pages() == 0
    cache.truncate(0, 4)
    cache.truncate(1)
    assert cache.free_pages() == 1


@pytest.mark.parametrize("model", [Linear(8, 8), Sequential(GELU()), ops.Sequential(ops.GELU())], ids=["module", "sequential", "operations"])
@pytest.mark.parametrize("with_grad", [False, True])
def test_what_is_no_cache_is_refused_as_that(model: nn.Module, with_grad: bool) -> None:
    x = torch.randn(4, 8, requires_grad=with_grad)
    with torch.set_grad_enabled(with_grad), pytest.raises(DTypeError, match=r"^cache: expected a KVCache, got int; make one for the sequences\.$"):
        model(x, cache=3)
