"""Records of the softmax of attention scores, the masks written out element by element."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record, strided

SHAPES = ((2, 3, 4, 7), (1, 2, 6, 1), (2, 1, 5, 40), (1, 1, 3, 0), (0, 2, 3, 5), (2, 3, 9, 83))
"""``[b, h, q, k]``."""

SQUARE = ((3, 5, 5), (1, 1, 1), (4, 33, 33), (0, 4, 4), (2, 6, 6))
ALIGNED = (*SHAPES, (1, 2, 7, 4), (2, 1, 4, 9))


def softmax(x: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """The softmax over the elements that are not ``hidden``; hidden ones are 0. Written as a quotient of sums, not as a call of softmax."""
    scores = (x.double() * scale).masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else torch.zeros(*scores.shape[:-1], 1)
    powers = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0))
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1)


def hidden_by_causality(shape: tuple[int, ...]) -> Tensor:
    """Row by row: query i sees keys j <= i + k - q."""
    queries, keys = shape[-2:]
    rows = [[j > i + keys - queries for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys).expand(shape)


def nothing_hidden(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def masks(generator: torch.Generator, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A mask per batch entry, and one for all. The value 1 masks, other values do not; one row is masked entirely."""
    batch, _, queries, keys = shape
    for count in {batch, 1} - {0}:
        mask = torch.randint(0, 3, (count, 1, queries, keys), generator=generator, dtype=torch.uint8)
        mask[:, :, 1] = 1
        yield mask


def forward(name: str, x: Tensor, scale: float, hidden: Tensor, **more: Tensor) -> Sample:
    y = softmax(x, scale, hidden)
    # The exponent's error, |score| eps, is relative to y; scores here are below 8.
    arguments = {"input": x, **more, "scale_factor": scale}
    return Sample(f"{name}{list(x.shape)}", arguments, (Output(None, y, x.dtype, x.shape[-1], 1.0),))


def backward(argument: str, generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], hidden: Tensor) -> Iterator[Sample]:
    y = softmax(random(generator, shape, torch.float32), 1.0, hidden).to(dtype)
    g = random(generator, shape, dtype)
    wide, visible = y.double(), g.double().masked_fill(hidden, 0)
    scale = 0.7 if shape[-1] % 2 else 1.3
    dx = scale * wide * (visible - (wide * visible).sum(-1, keepdim=True))
    arguments = {argument: g, "softmax_results_": y, "scale_factor": scale}
    yield Sample(str(list(shape)), arguments, (Output(None, dx, dtype, shape[-1], 8.0),))


@record("scaled_softmax_forward")
def scaled(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        yield forward("", random(generator, shape, dtype), 0.5, nothing_hidden(shape))
    x = strided(generator, (2, 3, 4, 5), dtype)
    yield forward("strided", x, -1.5, nothing_hidden(x.shape))


@record("scaled_masked_softmax_forward")
def masked(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        for mask in masks(generator, shape):
            scale = 1.5 if shape[-1] % 2 else 0.5
            yield forward(f"mask {len(mask)} of ", random(generator, shape, dtype), scale, (mask == 1).expand(shape), mask=mask)


@record("scaled_softmax_backward")
def scaled_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        yield from backward("output_grad_", generator, dtype, shape, nothing_hidden(shape))


@record("scaled_masked_softmax_backward")
def masked_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        for mask in masks(generator, shape):
            hidden = (mask == 1).expand(shape)
            yield from backward("output_grad_", generator, dtype, shape, hidden)


def causal_forward(generator: torch.Generator, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> Iterator[Sample]:
    for shape in shapes:
        yield forward("", random(generator, shape, dtype), 0.5 if shape[-1] % 2 else 1.25, hidden_by_causality(shape))


def causal_backward(generator: torch.Generator, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> Iterator[Sample]:
    for shape in shapes:
        yield from backward("output_grads_", generator, dtype, shape, hidden_by_causality(shape))
    one = (1,) * len(shapes[0])
    g, y = torch.full(one, torch.nan, dtype=dtype), torch.ones(one, dtype=dtype)
    yield Sample("NaN", {"output_grads_": g, "softmax_results_": y, "scale_factor": 0.7}, (Output(None, g.double(), dtype),))


for _name, _shapes in (("scaled_upper_triang_masked_softmax", SQUARE), ("scaled_aligned_causal_masked_softmax", ALIGNED)):
    record(f"{_name}_forward")(partial(causal_forward, shapes=_shapes))
    record(f"{_name}_backward")(partial(causal_backward, shapes=_shapes))
