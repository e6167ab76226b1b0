"""Records of both dropouts. The backend draws what it drops, so the expected output is computed from the returned mask."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Arguments, Disagreement, Output, Sample, random, record

__all__ = ["word"]

_M64 = (1 << 64) - 1


def bits(mask: Tensor) -> Tensor:
    """The mask of bits, least significant first, as booleans."""
    return torch.stack([(mask.cpu() >> bit) & 1 for bit in range(8)], -1).flatten().bool()


def kept(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep.view(x.shape), x.double() / (1 - p), 0.0)


@record("dropout_fwd")
def dropout_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for p in (0.0, 0.25):
        x = random(generator, (40, 120), dtype)

        def value(result: Any, arguments: Arguments, p: float = p) -> Tensor:
            return kept(arguments["input"], bits(result[1]), p)

        outputs = (Output(0, value, dtype), Output("result.1.shape", torch.Size([x.numel() // 8])), Output("result.1.dtype", torch.uint8))
        yield Sample(f"p={p}", {"input": x, "dropout_probability": p}, outputs)
        yield Sample(f"p={p} given", {"input": x, "dropout_probability": p, "out": torch.zeros_like(x)}, (*outputs, Output("out", value, dtype)))
    x = torch.ones(256, 256, dtype=dtype)

    def share(wanted: float, result: Any, arguments: Arguments) -> Tensor:
        """The mask itself, which agrees, if the share of kept elements is within six standard deviations of the expected one."""
        found = bits(result[1]).double().mean()
        if abs(found - wanted) >= 6 * (wanted * (1 - wanted) / x.numel()) ** 0.5:
            raise Disagreement(f"a share of {found:.4g} is kept instead of {wanted:.4g}")
        return result[1].cpu()

    yield Sample("the share that is kept", {"input": x, "dropout_probability": 0.25}, (Output(1, functools.partial(share, 0.75)),))
    # The smallest probability that bytes tell from none, and from the next one.
    arguments = {"input": x.clone(), "dropout_probability": 1 / 256}
    yield Sample("a small probability", arguments, (Output(1, functools.partial(share, 255 / 256)),))


@record("dropout_bwd")
def dropout_bwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for p, rows in ((0.0, 37), (0.25, 37), (0.25, 0)):
        g, mask = random(generator, (rows, 120), dtype), torch.randint(0, 256, (rows * 15,), generator=generator, dtype=torch.uint8)
        value = kept(g, bits(mask), p)
        yield Sample(f"p={p} of {rows}", {"grad_output": g, "mask": mask, "dropout_probability": p}, (Output(None, value, dtype),))
        arguments = {"grad_output": g, "mask": mask, "dropout_probability": p, "grad_input": torch.zeros_like(g)}
        yield Sample(f"p={p} of {rows} given", arguments, (Output("grad_input", value, dtype),))


def word(seed: int, counter: int) -> int:
    """The random word that ``tex.prim.dropout`` documents, in Python integers."""
    z = (seed + 0x9E3779B97F4A7C15) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    key = (z ^ (z >> 31)) | 1
    y = counter * key & _M64
    x = y
    for addend in (y, y + key, y):
        x = (x * x + addend) & _M64
        x = (x >> 32 | x << 32) & _M64
    return (x * x + y + key & _M64) >> 32


@functools.cache
def drawn(seed: int, start: int, count: int, p: float) -> tuple[bool, ...]:
    """Which of ``count`` elements are kept where ``p`` are dropped."""
    return tuple(word(seed, start + i) >= int(p * 2**32) for i in range(count))


@record("prim_dropout")
def prim_dropout(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for offset, p in ((0, 0.3), (3, 0.6)):
        x = random(generator, (3, 5, 280), dtype)
        keep = torch.tensor(drawn(42, offset * 2**40, x.numel(), p)).view(x.shape)
        arguments = {"x": x, "probability": p, "seed": torch.tensor([42]), "offset": offset}
        yield Sample(f"offset {offset}", arguments, (Output(0, kept(x, keep, p), dtype), Output(1, keep.to(torch.uint8))))


@record("prim_dropout_backward")
def prim_dropout_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, p in (((3, 1403), 0.3), ((2, 5), 0.6)):
        g, mask = random(generator, shape, dtype), torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
        yield Sample(f"{list(shape)}", {"dy": g, "mask": mask, "probability": p}, (Output(None, kept(g, mask.bool(), p), dtype),))
