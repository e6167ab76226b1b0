"""Records of the rotary embedding: as a matrix per position, whose transpose is the backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record
from fusible.tex import NVTE_QKV_Format


def matrix(angles: Tensor, interleaved: bool) -> Tensor:
    """The rotation ``[d2, d2]`` of one position."""
    width = angles.numel()
    rotation = torch.diag(torch.cos(angles))
    for i in range(width // 2):
        low, high = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        rotation[low, high] -= torch.sin(angles[low])
        rotation[high, low] += torch.sin(angles[high])
    return rotation


def rotate(x: Tensor, freqs: Tensor, positions: Tensor, interleaved: bool, *, transpose: bool) -> Tensor:
    """``x [..., h, d]`` with the position of each of its leading elements."""
    table = freqs.double().reshape(freqs.shape[0], -1)
    y = x.double().clone()
    width = table.shape[1]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in positions.shape)).reshape(-1, positions.dim()).tolist():
        rotation = matrix(table[positions[tuple(index)]], interleaved)
        y[tuple(index)][..., :width] = y[tuple(index)][..., :width] @ (rotation if transpose else rotation.T)
    return y


SBHD, BSHD, THD = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD, NVTE_QKV_Format.NVTE_THD
_OPTIONS: dict[str, Any] = {"interleaved": False, "start_positions": None, "cu_seqlens": None, "cp_size": 1, "cp_rank": 0}


def cases(generator: torch.Generator) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any], Tensor, Tensor]]:
    """``(label, shape, options, freqs, positions of the leading dimensions)``."""
    freqs = torch.rand(16, 1, 1, 6, generator=generator) * 6
    along, start = torch.arange(5), torch.tensor([3, 0], dtype=torch.int32)
    more = torch.tensor([3, 0, 9, 1], dtype=torch.int32)  # of the largest batch that a cache has room for
    cu, of_two, of_one = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 3, 7], [0, 8, 16], [0, 16]))
    for label, shape, form, positions, changes in (
        ("sbhd-False", (5, 2, 54, 8), SBHD, along[:, None].expand(5, 2), {}),
        ("bshd-False", (2, 5, 3, 6), BSHD, along.expand(2, 5), {}),
        ("sbhd-True", (5, 2, 54, 8), SBHD, along[:, None].expand(5, 2), {"interleaved": True}),
        ("bshd-True", (2, 5, 3, 6), BSHD, along.expand(2, 5), {"interleaved": True}),
        ("start", (2, 5, 1, 8), BSHD, along + start[:, None], {"start_positions": start}),
        ("start-more", (5, 2, 1, 8), SBHD, along[:, None] + start, {"start_positions": more}),
        ("cp", (4, 1, 1, 6), SBHD, torch.tensor([2, 3, 4, 5])[:, None], {"cp_size": 2, "cp_rank": 1}),
        ("cp0", (4, 1, 1, 6), SBHD, torch.tensor([0, 1, 6, 7])[:, None], {"cp_size": 2}),
        ("thd", (7, 2, 8), THD, torch.tensor([0, 1, 2, 0, 1, 2, 3]), {"cu_seqlens": cu}),
        ("thd-start-more", (7, 2, 8), THD, torch.tensor([3, 4, 5, 9, 10, 11, 12]), {"cu_seqlens": cu, "start_positions": more}),
        ("thd-cp", (8, 1, 6), THD, torch.tensor([2, 3, 4, 5] * 2), {"cu_seqlens": of_two, "interleaved": True, "cp_size": 2, "cp_rank": 1}),
        ("thd-last", (16, 1, 6), THD, torch.arange(16), {"cu_seqlens": of_one}),
    ):
        yield label, shape, {**_OPTIONS, "qkv_format": form, **changes}, freqs, positions


def samples(name: str, generator: torch.Generator, dtype: torch.dtype, *, transpose: bool) -> Iterator[Sample]:
    for label, shape, options, freqs, positions in cases(generator):
        x = random(generator, shape, dtype)
        y = rotate(x, freqs, positions, options["interleaved"], transpose=transpose)
        yield Sample(label, {name: x, "freqs": freqs, **options}, (Output(None, y, dtype, 2, 8.0),))


def together_cases(
    generator: torch.Generator, dtype: torch.dtype, *, transpose: bool
) -> Iterator[tuple[str, dict[str, Any], list[Tensor], list[Tensor]]]:
    """``(label, options, [q, k, v] as the heads' chunks, the same with q and k rotated, float64)``."""
    angles = {name: torch.rand(16, 1, 1, width, generator=generator) * 6 for name, width in (("q_freqs", 6), ("k_freqs", 8))}
    start = torch.tensor([3, 0], dtype=torch.int32)
    along = torch.arange(4)
    for label, form, interleaved, starts, cp, positions in (
        ("sbhd", SBHD, False, None, (1, 0), along[:, None].expand(4, 2)),
        ("bshd", BSHD, True, None, (1, 0), along.expand(2, 4)),
        ("start", BSHD, False, start, (1, 0), along + start[:, None]),
        ("cp", SBHD, False, start, (2, 1), torch.tensor([2, 3, 4, 5])[:, None].expand(4, 2)),
        ("few heads", SBHD, False, None, (1, 0), torch.arange(5)[:, None]),
    ):
        heads, width = ((180, 90, 90), 8) if label != "few heads" else ((6, 3, 3), 9)
        options = {**angles, "qkv_split_arg_list": [2 * width, width, width], "qkv_format": form, "interleaved": interleaved}
        options |= {"start_positions": starts, "cp_size": cp[0], "cp_rank": cp[1]}
        q, k, v = (random(generator, (*positions.shape, each, width), dtype) for each in heads)
        rotated = [rotate(x, freqs, positions, interleaved, transpose=transpose) for x, freqs in zip((q, k), angles.values(), strict=True)]
        yield label, options, [q, k, v], [*rotated, v.double()]


def together(parts: list[Tensor]) -> Tensor:
    """q, k, v in groups: two heads of q, one of k, one of v each."""
    q, k, v = parts
    return torch.cat((q.reshape(*k.shape[:-1], 2 * k.shape[-1]), k, v), -1)


@record("fused_qkv_rope_forward")
def qkv_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, options, parts, rotated in together_cases(generator, dtype, transpose=False):
        outputs = tuple(Output(i, y, dtype, 2, 8.0) for i, y in enumerate(rotated))
        yield Sample(label, {"qkv_input": together(parts), **options}, outputs)


@record("fused_qkv_rope_backward")
def qkv_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, options, parts, rotated in together_cases(generator, dtype, transpose=True):
        if label == "start":
            continue
        options.pop("start_positions")
        grads = dict(zip(("q_grad_out", "k_grad_out", "v_grad_out"), parts, strict=True))
        yield Sample(label, {**grads, **options}, (Output(None, together(rotated), dtype, 2, 8.0),))


@record("fused_rope_forward")
def forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from samples("input", generator, dtype, transpose=False)


@record("fused_rope_backward")
def backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from samples("output_grads", generator, dtype, transpose=True)
