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


def cases(generator: torch.Generator) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any], Tensor, Tensor]]:
    """``(label, shape, options, freqs, positions of the leading dimensions)``."""
    freqs = torch.rand(16, 1, 1, 6, generator=generator) * 6
    sbhd, bshd, thd = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD, NVTE_QKV_Format.NVTE_THD
    base: dict[str, Any] = {"start_positions": None, "cu_seqlens": None, "cp_size": 1, "cp_rank": 0}
    for interleaved in (False, True):
        along = torch.arange(5)
        yield f"sbhd-{interleaved}", (5, 2, 54, 8), {**base, "qkv_format": sbhd, "interleaved": interleaved}, freqs, along[:, None].expand(5, 2)
        yield f"bshd-{interleaved}", (2, 5, 3, 6), {**base, "qkv_format": bshd, "interleaved": interleaved}, freqs, along.expand(2, 5)
    start = torch.tensor([3, 0], dtype=torch.int32)
    options = {**base, "qkv_format": bshd, "interleaved": False, "start_positions": start}
    yield "start", (2, 5, 1, 8), options, freqs, torch.arange(5) + start[:, None]
    more = torch.tensor([3, 0, 9, 1], dtype=torch.int32)  # of the largest batch that a cache has room for
    options = {**base, "qkv_format": sbhd, "interleaved": False, "start_positions": more}
    yield "start-more", (5, 2, 1, 8), options, freqs, torch.arange(5)[:, None] + start
    options = {**base, "qkv_format": sbhd, "interleaved": False, "cp_size": 2, "cp_rank": 1}
    yield "cp", (4, 1, 1, 6), options, freqs, torch.tensor([2, 3, 4, 5])[:, None]
    options = {**base, "qkv_format": sbhd, "interleaved": False, "cp_size": 2, "cp_rank": 0}
    yield "cp0", (4, 1, 1, 6), options, freqs, torch.tensor([0, 1, 6, 7])[:, None]
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    yield "thd", (7, 2, 8), {**base, "qkv_format": thd, "interleaved": False, "cu_seqlens": cu}, freqs, torch.tensor([0, 1, 2, 0, 1, 2, 3])
    options = {**base, "qkv_format": thd, "interleaved": False, "cu_seqlens": cu, "start_positions": more}
    yield "thd-start-more", (7, 2, 8), options, freqs, torch.tensor([3, 4, 5, 9, 10, 11, 12])
    options = {**base, "qkv_format": thd, "interleaved": True, "cu_seqlens": 2 * cu[[0, 1, 3]] // 1 * 1 + torch.tensor([0, 2, 2], dtype=torch.int32)}
    yield "thd-cp", (8, 1, 6), {**options, "cp_size": 2, "cp_rank": 1}, freqs, torch.tensor([2, 3, 4, 5, 2, 3, 4, 5])


def samples(name: str, generator: torch.Generator, dtype: torch.dtype, *, transpose: bool) -> Iterator[Sample]:
    for label, shape, options, freqs, positions in cases(generator):
        x = random(generator, shape, dtype)
        y = rotate(x, freqs, positions, options["interleaved"], transpose=transpose)
        yield Sample(label, {name: x, "freqs": freqs, **options}, (Output(None, y, dtype, 2, 8.0),))


def together_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], list[Tensor], list[Tensor]]]:
    """``(label, options, [q, k, v] as the heads' chunks, positions of their leading dimensions)``."""
    sbhd, bshd = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD
    angles = {name: torch.rand(16, 1, 1, width, generator=generator) * 6 for name, width in (("q_freqs", 6), ("k_freqs", 8))}
    start = torch.tensor([3, 0], dtype=torch.int32)
    along = torch.arange(4)
    for label, form, interleaved, starts, cp, positions in (
        ("sbhd", sbhd, False, None, (1, 0), along[:, None].expand(4, 2)),
        ("bshd", bshd, True, None, (1, 0), along.expand(2, 4)),
        ("start", bshd, False, start, (1, 0), along + start[:, None]),
        ("cp", sbhd, False, start, (2, 1), torch.tensor([2, 3, 4, 5])[:, None].expand(4, 2)),
        ("few heads", sbhd, False, None, (1, 0), torch.arange(5)[:, None]),
    ):
        heads, width = ((180, 90, 90), 8) if label != "few heads" else ((6, 3, 3), 9)
        options = {**angles, "qkv_split_arg_list": [2 * width, width, width], "qkv_format": form, "interleaved": interleaved}
        options |= {"start_positions": starts, "cp_size": cp[0], "cp_rank": cp[1]}
        parts = [random(generator, (*positions.shape, each, width), dtype) for each in heads]
        yield label, options, parts, [positions, positions]


def together(parts: list[Tensor]) -> Tensor:
    """q, k, v in groups: two heads of q, one of k, one of v each."""
    q, k, v = parts
    return torch.cat((q.reshape(*k.shape[:-1], 2 * k.shape[-1]), k, v), -1)


@record("fused_qkv_rope_forward")
def qkv_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, options, parts, positions in together_cases(generator, dtype):
        rotated = [
            rotate(x, options[name], p, options["interleaved"], transpose=False)
            for x, name, p in zip(parts, ("q_freqs", "k_freqs"), positions, strict=False)
        ]
        outputs = tuple(Output(i, y, dtype, 2, 8.0) for i, y in enumerate((*rotated, parts[2].double())))
        yield Sample(label, {"qkv_input": together(parts), **options}, outputs)


@record("fused_qkv_rope_backward")
def qkv_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, options, parts, positions in together_cases(generator, dtype):
        if label == "start":
            continue
        options.pop("start_positions")
        rotated = [
            rotate(x, options[name], p, options["interleaved"], transpose=True)
            for x, name, p in zip(parts, ("q_freqs", "k_freqs"), positions, strict=False)
        ]
        grads = dict(zip(("q_grad_out", "k_grad_out", "v_grad_out"), parts, strict=True))
        yield Sample(label, {**grads, **options}, (Output(None, together([*rotated, parts[2].double()]), dtype, 2, 8.0),))


@record("fused_rope_forward")
def forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from samples("input", generator, dtype, transpose=False)


@record("fused_rope_backward")
def backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from samples("output_grads", generator, dtype, transpose=True)
