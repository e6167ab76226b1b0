"""The table ``generation``: a decoder that goes on from prompts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import pytorch as fusible
from fusible.cli.bench.fp8 import product
from fusible.cli.bench.machine import Bound
from fusible.cli.bench.plain import DecoderShape, PlainDecoder, Weights
from fusible.cli.bench.table import Measured, Row, Settings

__all__ = ["DECODER_1B", "Decoder", "FusibleDecoder", "generation"]

DECODER_1B = DecoderShape(layers=16, hidden=2048, heads=32, groups=8, inner=8192, vocabulary=32000)
_QUICK = DecoderShape(layers=2, hidden=64, heads=4, groups=2, inner=128, vocabulary=96)
_SPEED, _BYTES = 1.8, 0.6
_MOST_ROUNDS = 5


class Decoder(Protocol):
    """``start`` begins sequences; ``step`` takes int64 ``[batch, tokens]`` and gives the logits ``[batch, vocabulary]`` of what follows."""

    def start(self, batch: int, capacity: int) -> None: ...
    def step(self, tokens: Tensor) -> Tensor: ...
    @property
    def weights(self) -> list[Any]: ...
    def multiply(self, x: Tensor, weight: Any) -> object: ...


class FusibleDecoder:
    """``PlainDecoder`` in Fusible, with the same weights: in 8 bits alone, in the format of ``recipe``, or as they are."""

    def __init__(self, shape: DecoderShape, *, quantized: bool = True, recipe: fusible.Recipe | None = None) -> None:
        weights = Weights()
        bf16 = torch.bfloat16

        def linear(columns: int, rows: int) -> fusible.Linear:
            made = fusible.Linear(columns, rows, bias=False, weight_init_method=lambda _: weights.matrix(rows, columns), param_dtype=bf16)
            return fusible.quantize_parameters(made, recipe=recipe) if quantized else made

        def norm() -> fusible.RMSNorm:
            return fusible.RMSNorm(shape.hidden, eps=shape.eps, param_dtype=bf16)

        blocks = []
        for _ in range(shape.layers):
            attention = fusible.GroupedQuerySelfAttention(shape.hidden, shape.heads, shape.groups, rope_base=shape.base)
            blocks.append(fusible.Residual(norm(), linear(shape.hidden, shape.qkv), attention, linear(shape.hidden, shape.hidden)))
            blocks.append(fusible.Residual(norm(), linear(shape.hidden, 2 * shape.inner), fusible.SwiGLU(), linear(shape.inner, shape.hidden)))
        self.embedding = weights.matrix(shape.vocabulary, shape.hidden, 1.0)
        self.body = fusible.Sequential(*blocks, norm())
        self.head = linear(shape.hidden, shape.vocabulary)
        self.cache = fusible.KVCache(1, 1)

    def start(self, batch: int, capacity: int) -> None:
        """Begin ``batch`` sequences."""
        self.cache = fusible.KVCache(batch, capacity)

    def step(self, tokens: Tensor) -> Tensor:
        """int64 ``[batch, tokens]``: the logits ``[batch, vocabulary]`` of what follows."""
        batch, length = tokens.shape
        seq_lens = torch.full((batch,), length, dtype=torch.int32)
        hidden = self.body(F.embedding(tokens.flatten(), self.embedding), seq_lens, self.cache)
        self.cache.advance(seq_lens)
        return self.head(hidden.view(batch, length, -1)[:, -1])

    @property
    def weights(self) -> list[Any]:
        """The weights of matrix products, in the order of a step."""
        return [module.weight for model in (self.body, self.head) for module in model.modules() if isinstance(module, fusible.Linear)]

    def multiply(self, x: Tensor, weight: Any) -> object:
        """``x`` times one of the weights."""
        return product(weight, x)

    @property
    def nbytes(self) -> int:
        """The memory of weights and cache."""
        return sum(fusible.parameter_bytes(model) for model in (self.body, self.head)) + self.embedding.nbytes + self.cache.nbytes


class _Run(NamedTuple):
    """Seconds of the prompts, median seconds of a further token, seconds of a token's matrix products alone, and the logits after the prompts."""

    prefill: float
    token: float
    products: float
    logits: Tensor


def generation(settings: Settings) -> Measured:
    """16 tokens after prompts of 32, in bf16 with FP8 weights, beside torch in bf16 with the same weights; both take the likeliest token."""
    measured = Measured()
    shape, prompt, count = (_QUICK, 8, 4) if settings.quick else (DECODER_1B, 32, 16)
    theirs, ours = PlainDecoder(shape), FusibleDecoder(shape)
    with torch.inference_mode():
        for batch in (1, 8):
            prompts = torch.randint(shape.vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(batch))
            runs = _take_turns({"torch": theirs, "fusible": ours}, prompts, count, settings.rounds)
            _report(prompts, runs["torch"], runs["fusible"], theirs, ours, settings, measured)
        measured.rows.append(_overhead(shape, settings))
    return measured


def _take_turns(decoders: dict[str, Decoder], prompts: Tensor, count: int, rounds: int) -> dict[str, _Run]:
    runs: dict[str, list[_Run]] = {name: [] for name in decoders}
    for turn in range(1 + min(rounds, _MOST_ROUNDS)):
        for name, decoder in decoders.items():
            run = _generate(decoder, prompts, count)
            if turn:  # the first one plans
                runs[name].append(run)
    return {name: _median(found) for name, found in runs.items()}


def _median(runs: Sequence[_Run]) -> _Run:
    prefill, token, products = (statistics.median(seconds) for seconds in zip(*(run[:3] for run in runs), strict=True))
    return _Run(prefill, token, products, runs[0].logits)


def _generate(decoder: Decoder, prompts: Tensor, count: int) -> _Run:
    decoder.start(len(prompts), prompts.shape[1] + count)
    began = time.perf_counter()
    first = logits = decoder.step(prompts)
    tokens = logits.argmax(-1, keepdim=True)
    times = [time.perf_counter()]
    for _ in range(count):
        logits = decoder.step(tokens)
        tokens = logits.argmax(-1, keepdim=True)
        times.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return _Run(times[0] - began, statistics.median(seconds), _products(decoder, len(prompts), count // 2), first.float())


def _products(decoder: Decoder, batch: int, count: int) -> float:
    """Median seconds of the products of a token, each weight once."""
    inputs = {width: torch.randn(batch, width).bfloat16() for width in {weight.shape[1] for weight in decoder.weights}}
    times = []
    for _ in range(count):
        start = time.perf_counter()
        for weight in decoder.weights:
            decoder.multiply(inputs[weight.shape[1]], weight)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _report(prompts: Tensor, torch_run: _Run, run: _Run, theirs: PlainDecoder, ours: FusibleDecoder, settings: Settings, measured: Measured) -> None:
    """The rows and notes of one batch. Work is counted of the products alone, and of a token also the cache that attention reads."""
    batch, length = prompts.shape
    weights, plain_weights = (float(sum(weight.numel() for weight in d.weights) * size) for d, size in ((ours, 1), (theirs, 2)))
    cached = ours.cache.nbytes / len(ours.cache.lengths) / ours.cache.capacity * batch * length
    bound, name = settings.limits.bound, f"batch {batch}"
    work = 2.0 * batch * weights
    limit = bound(run.token, work, weights + cached)
    rows = [
        Row(f"{name}: decoding", "tokens/s", batch / torch_run.token, batch / run.token, _SPEED, limit),
        _row(f"{name}: a token", torch_run.token, run.token, limit),
        _row(f"{name}: of that, matrix products", torch_run.products, run.products, bound(run.products, work, weights)),
        _row(f"{name}: reading prompts of {length}", torch_run.prefill, run.prefill, bound(run.prefill, work * length, weights)),
        Row(f"{name}: weights and cache", "MB", theirs.nbytes / 1e6, ours.nbytes / 1e6, _BYTES),
    ]
    measured.rows += rows
    shares = f"{100 * torch_run.products / torch_run.token:.0f} % of a token's time in torch, {100 * run.products / run.token:.0f} % in Fusible"
    rates = f"{plain_weights / torch_run.products / 1e9:.1f} and {weights / run.products / 1e9:.1f} GB/s"
    difference = 100 * ((run.logits - torch_run.logits).norm() / torch_run.logits.norm()).item()
    measured.notes.append(f"Batch {batch}: matrix products are {shares}; they read weights at {rates}.")
    measured.notes.append(f"Batch {batch}: the logits after the prompts differ by {difference:.1f} % in norm, for weights are rounded to E4M3.")


def _row(what: str, theirs: float, ours: float, bound: Bound | None = None) -> Row:
    return Row(what, "ms", 1e3 * theirs, 1e3 * ours, None, bound)


def _overhead(shape: DecoderShape, settings: Settings) -> Row:
    """The time of a token in a decoder of the same depth whose matrices take no time."""
    narrow = DecoderShape(shape.layers, 64, 4, 2, 64, 64)
    runs = _take_turns({"torch": PlainDecoder(narrow), "fusible": FusibleDecoder(narrow)}, torch.zeros(1, 2, dtype=torch.int64), 32, settings.rounds)
    return _row(f"{shape.layers} layers of width 64: a token, for what Python adds", runs["torch"].token, runs["fusible"].token)
