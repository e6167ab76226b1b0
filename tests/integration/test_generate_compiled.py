"""Generation as compiled programs: the same tokens as eagerly, by programs that do not become more with the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusible
from fusible.cli.generation.engine import generate
from fusible.cli.training.model import ByteGPT
from fusible.cli.training.options import TrainOptions
from fusible.models.generation import Sampling
from fusible.pytorch import KVCache, quantize_parameters

pytest.importorskip("jaxlib")

LAYERS, HIDDEN, HEADS = 2, 32, 2
PROMPTS = [list(b"To be, or"), list(b"x")]


def model(executor: str, recipe: str = "fp32") -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(TrainOptions(layers=LAYERS, hidden=HIDDEN, heads=HEADS, executor=executor), recipe).eval()


def programs(compiled: ByteGPT) -> int:
    executor: Any = compiled.body.pipeline(0).executor
    return executor.compiled


def made(by: ByteGPT, sampling: Sampling, count: int = 12, page_size: int | None = None) -> list[list[int]]:
    cache = KVCache(len(PROMPTS), 40, page_size=page_size, dtype=by.activation)
    return list(generate(by.next_bytes, PROMPTS, count, sampling, torch.Generator().manual_seed(3), cache))


@pytest.mark.parametrize("page_size", [None, 4], ids=["one piece", "pages"])
def test_tokens_are_those_of_the_eager_executor(page_size: int | None) -> None:
    compiled, eager = model("xla"), model("eager")
    for sampling in (Sampling(0.0), Sampling(1.0, top_k=40)):
        assert made(compiled, sampling, page_size=page_size) == made(eager, sampling, page_size=page_size)
    assert programs(compiled) == 2  # the prompts, and a step


def test_one_program_serves_every_step_and_cache_of_a_size() -> None:
    compiled = model("xla")
    made(compiled, Sampling(0.0), 2)
    assert programs(compiled) == 2
    made(compiled, Sampling(0.0), 20)
    assert programs(compiled) == 2
    cache = KVCache(2, 40, dtype=torch.float32)
    longer = [PROMPTS[0] + [1], PROMPTS[1]]
    list(generate(compiled.next_bytes, longer, 3, Sampling(0.0), torch.Generator(), cache))
    assert programs(compiled) == 3  # one more length of prompts, and the same step


def steps(by: ByteGPT, texts: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """The logits after each call, which takes so many further tokens of each sequence."""
    cache, found, done = KVCache(len(texts), 24, page_size=8, dtype=by.activation), [], [0] * len(texts)
    for count in counts:
        piece = torch.cat([text[at : at + n] for text, at, n in zip(texts, done, count, strict=True)])
        lengths = torch.tensor(count, dtype=torch.int32)
        with torch.no_grad():
            found.append(by.next_bytes(piece, lengths, cache))
        cache.advance(lengths)
        done = [at + n for at, n in zip(done, count, strict=True)]
    return found


def test_logits_agree_where_sequences_grow_unevenly() -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(256, (n,), generator=generator) for n in (15, 4, 7)]
    counts = [[5, 1, 3], [1, 1, 1], [9, 1, 3], [0, 1, 0]]
    for got, expected in zip(steps(model("xla"), texts, counts), steps(model("eager"), texts, counts), strict=True):
        # Sums of at most four times the width, through six of them for each layer and the head, each off by at most its length.
        bound = (4 * HIDDEN + 16) * (6 * LAYERS + 1) * torch.finfo(torch.float32).eps * expected.abs().max()
        assert (got - expected).abs().max() <= bound


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins four bytes past a multiple of 64."""
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


def test_tokens_are_written_to_the_cache_as_it_lies() -> None:
    """Also to one that begins where XLA takes no memory; and what soft caps refuse the kernels reads it after that."""
    results: dict[Any, torch.Tensor] = {}
    for cap, page_size in ((None, 20), (0.5, 20), (0.5, None)):
        for executor in ("eager", "xla", "moved"):
            torch.manual_seed(0)
            attention = fusible.GroupedQuerySelfAttention(HIDDEN, HEADS, HEADS, soft_cap=cap)
            block = fusible.Sequential(fusible.Linear(HIDDEN, 3 * HIDDEN), attention, fusible.Linear(HIDDEN, HIDDEN))
            cache, x = KVCache(1, 300, page_size=page_size, dtype=torch.float32), torch.randn(40, HIDDEN)
            block = block.compile("eager" if executor == "eager" else "xla")
            found = []
            with torch.no_grad():
                for tokens in x.split([5, *[1] * 35]):
                    lengths = torch.tensor([len(tokens)])
                    found.append(block(tokens, lengths, cache=cache))
                    cache.advance(lengths)
                    (key, (k, v)), *_ = cache._layers.items()
                    if executor == "moved" and len(found) == 3:
                        cache._layers[key] = _elsewhere(k), _elsewhere(v)
                    if len(found) == 4:
                        places = [held.data_ptr() for held in cache._layers[key]]
            assert [held.data_ptr() for held in cache._layers[key]] == places
            if executor != "eager":
                called = block.pipeline(0).executor.describe()[-1]
                assert "copy_to_cache 2" in called and ("attention_forward 2" in called) is (cap is None)  # in the programs of 5 tokens and of one
            assert all(place % 64 == (4 if executor == "moved" else 0) for place in places)
            results[cap, executor] = torch.cat(found)
        for executor in ("xla", "moved"):
            torch.testing.assert_close(results[cap, executor], results[cap, "eager"])
    assert (results[None, "xla"] - results[0.5, "xla"]).abs().max() > 1e-3


def test_a_call_that_is_not_counted_changes_nothing() -> None:
    compiled, cache = model("xla"), KVCache(1, 16, dtype=torch.float32)
    text, one = torch.arange(6), torch.ones(1, dtype=torch.int32)
    with torch.no_grad():
        compiled.next_bytes(text[:5], 5 * one, cache)
        cache.advance(5 * one)
        compiled.next_bytes(text[:3] + 90, 3 * one, cache)  # rejected
        after = compiled.next_bytes(text[5:], one, cache)
        whole = compiled.next_bytes(text, 6 * one, KVCache(1, 16, dtype=torch.float32))
    bound = (4 * HIDDEN + 16) * (6 * LAYERS + 1) * torch.finfo(torch.float32).eps * whole.abs().max()
    assert (after - whole).abs().max() <= bound


def test_a_pass_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, cache = model("xla"), KVCache(1, 16, dtype=torch.float32)
    executor: Any = compiled.body.pipeline(0).executor
    one = torch.ones(1, dtype=torch.int32)

    def kept(before: dict[Any, Any], tokens: int) -> bool:
        return all(torch.equal(x[:, :tokens], y[:, :tokens]) for key, pair in before.items() for x, y in zip(pair, cache._layers[key], strict=True))

    class Failing:
        name, whole, in_place = executor.name, True, False

        def __call__(self, *arguments: Any) -> Any:
            executor(*arguments)
            raise RuntimeError("too late")

    with torch.no_grad():
        compiled.next_bytes(torch.arange(1), one, cache)
        cache.advance(one)
        before = {key: tuple(x.clone() for x in pair) for key, pair in cache._layers.items()}
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="too late"):
            patched.setattr(compiled.body.pipeline(0), "executor", Failing())
            compiled.next_bytes(torch.arange(1, 2), one, cache)
        assert len(before) == LAYERS and kept(before, 1) and cache.lengths == (1,)
        compiled.next_bytes(torch.arange(1, 2), one, cache)
        assert kept(before, 1) and not kept(before, 2)


def test_weights_held_in_8_bits_generate_alike() -> None:
    text, lengths = [torch.arange(5), torch.arange(40, 42)], [[4, 1], [1, 1]]
    eager, compiled = (quantize_parameters(model(executor, "delayed")) for executor in ("eager", "xla"))
    for got, expected in zip(steps(compiled, text, lengths), steps(eager, text, lengths), strict=True):
        # An activation may land a step of E4M3 (an eighth) apart.
        assert ((got - expected).norm() / expected.norm()).item() <= 1 / 8
