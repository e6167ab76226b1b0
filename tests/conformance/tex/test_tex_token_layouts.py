"""Attention's tokens packed and padded, and Q, K, V interleaved and apart: values are only moved, so results are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends

from fusible.errors import DTypeError, ShapeError

LENGTHS = (3, 0, 5, 1)
CU = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
CONVERT = on_backends("convert_thd_to_bshd", "convert_bshd_to_thd")
PREPARE = on_backends("fa_prepare_fwd", "fa_prepare_bwd")


def counted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every element another, and none 0."""
    return (torch.arange(torch.Size(shape).numel()) % 251 + 1).view(shape).to(dtype)


@CONVERT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("trailing", [(), (2, 3)])
def test_packed_tokens_become_padded_ones_and_back(runner: Runner, dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    packed = counted((11, *trailing), dtype)
    padded = runner("convert_thd_to_bshd", tensor=packed, cu_seqlens=CU, b=4, max_seq_len=6)
    expected = torch.zeros(4, 6, *trailing, dtype=dtype)
    for i, n in enumerate(LENGTHS):
        expected[i, :n] = packed[CU[i] : CU[i] + n]
    assert padded.dtype is dtype and torch.equal(padded, expected)
    filled = torch.where(padded == 0, torch.full_like(padded, 77), padded)
    back = runner("convert_bshd_to_thd", tensor=filled.transpose(0, 1).contiguous().transpose(0, 1), cu_seqlens=CU, t=11)
    packed[9:] = 0
    assert back.dtype is dtype and torch.equal(back, packed)


@CONVERT
def test_the_first_sequences_alone_and_tokens_past_the_longest(runner: Runner) -> None:
    packed = counted((9, 2), torch.float32)
    padded = runner("convert_thd_to_bshd", tensor=packed, cu_seqlens=CU, b=3, max_seq_len=4)
    assert torch.equal(padded, torch.stack([torch.cat((packed[:3], torch.zeros(1, 2))), torch.zeros(4, 2), packed[3:7]]))
    back = runner("convert_bshd_to_thd", tensor=padded, cu_seqlens=CU, t=9)
    assert torch.equal(back, torch.cat((packed[:7], torch.zeros(2, 2))))
    assert runner("convert_thd_to_bshd", tensor=packed[:0], cu_seqlens=CU * 0, b=4, max_seq_len=3).shape == (4, 3, 2)
    assert not runner("convert_bshd_to_thd", tensor=padded[:, :0], cu_seqlens=CU, t=5).any()


@CONVERT
def test_too_few_lengths_are_refused(runner: Runner) -> None:
    with pytest.raises(ShapeError, match="cu_seqlens of convert_thd_to_bshd: expected .*"):
        runner("convert_thd_to_bshd", tensor=torch.zeros(9, 2), cu_seqlens=CU, b=5, max_seq_len=4)
    with pytest.raises(ShapeError, match="tensor of convert_bshd_to_thd: expected .*"):
        runner("convert_bshd_to_thd", tensor=torch.zeros(9), cu_seqlens=CU, t=5)


@PREPARE
@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (1, 2, 1, 5), (4, 1, 2, 1)])
def test_interleaved_heads_come_apart_and_go_together(runner: Runner, shape: tuple[int, ...]) -> None:
    s, b, n, h = shape
    whole = counted((s, b, n, 3 * h), torch.bfloat16)
    q, k, v = whole.split(h, -1)
    apart = runner("fa_prepare_fwd", qkvi=q)
    assert apart.is_contiguous() and torch.equal(apart, torch.stack([x.transpose(0, 1) for x in (q, k, v)]))
    back = runner("fa_prepare_bwd", q=apart[0], k=apart[1], v=apart[2])
    assert back.is_contiguous() and torch.equal(back, whole)


WHOLE = torch.zeros(3, 2, 4, 15)


@PREPARE
@pytest.mark.parametrize("qkvi", [torch.zeros(3, 2, 4, 5), WHOLE[..., 5:10], WHOLE[..., 10:], WHOLE[0, ..., :5], WHOLE[:, :1, :, :5]])
def test_what_is_no_third_of_a_buffer_is_refused(runner: Runner, qkvi: Any) -> None:
    with pytest.raises(ShapeError, match="qkvi of fa_prepare_fwd: expected .*"):
        runner("fa_prepare_fwd", qkvi=qkvi)


@PREPARE
def test_gradients_that_differ_are_refused(runner: Runner) -> None:
    x = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ShapeError, match="three equal shapes"):
        runner("fa_prepare_bwd", q=x, k=x[:1], v=x)
    with pytest.raises(DTypeError, match="v of fa_prepare_bwd: expected .*"):
        runner("fa_prepare_bwd", q=x, k=x, v=x.bfloat16())
