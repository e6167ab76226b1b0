"""The random Hadamard transform of NVFP4, to the bit: also sums that fp32 rounds, where another order would show, and zeros with a sign."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusible import cpp_extensions
from fusible.quantized import NVFP4Quantizer

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")


def transformed(x: Tensor, matrix: Tensor) -> Tensor:
    """The columns of ``x``, rounded to bf16, in groups of 16: each element and the one whose place differs in a bit become their sum and difference,
    bit by bit from the lowest on."""
    groups = x.bfloat16().float().t().reshape(-1, 16) * matrix[:, 0]
    groups = torch.where(groups == 0, torch.zeros(()), groups)
    places = torch.arange(16)
    for bit in (1, 2, 4, 8):
        others = groups[:, places ^ bit]
        groups = torch.where((places & bit) == 0, groups + others, others - groups)
    return groups.view(x.shape[1], x.shape[0]).t().bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_by_pairs(level: str, dtype: torch.dtype) -> None:
    matrix = NVFP4Quantizer(with_rht=True).rht_matrix.float()
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        spread = torch.exp2(torch.randint(-12, 12, (256, 512), generator=generator))
        x = (torch.randn(256, 512, generator=generator) * spread).to(dtype)
        x[::7] = x[:, ::9] = x[:64] = -0.0
        dst, amaxes = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(2)
        cpp_extensions.transform_columns(x, matrix, dst, amaxes[:1], amaxes[1:])
        wanted = transformed(x, matrix)
        assert torch.equal(dst.view(torch.int16), wanted.contiguous().view(torch.int16))
        assert amaxes.tolist() == [wanted.abs().max().item(), x.abs().max().item()]


@pytest.mark.parametrize("change", ["sign", "size"])
def test_a_matrix_that_is_nearly_hadamards_is_multiplied_by(level: str, change: str) -> None:
    matrix = NVFP4Quantizer(with_rht=True).rht_matrix.float()
    for place in range(256):
        row, column = divmod(place, 16)
        other = matrix.clone()
        other[row, column] *= -1 if change == "sign" else 2
        x = torch.zeros(16, 16)
        x[row] = 1.0  # each column of what is written is that row
        dst = torch.empty(16, 16, dtype=torch.bfloat16)
        cpp_extensions.transform_columns(x, other, dst)
        assert torch.equal(dst.float(), other[row][:, None].expand(16, 16)), place
