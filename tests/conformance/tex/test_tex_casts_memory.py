"""What casts, movements and optimizer steps hold at once: at most three times their arguments and results, counted in fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tex_backends import REFERENCE
from tex_peak_bytes import peak_bytes, wide_bytes
from torch import Tensor

from fusible.tex import DType

H, W = 384, 640
X = torch.randn(H * W, generator=torch.Generator().manual_seed(1))
START, PART = 1001, X[1001:-3000]
ROW = X[5 * W + 1 : 6 * W - 1]


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def fp32(*shape: int) -> Tensor:
    return torch.ones(shape)


def lists(*dtypes: torch.dtype) -> list[list[Tensor]]:
    return [[torch.ones(H, W, dtype=dtype), torch.ones(3, dtype=dtype)] for dtype in dtypes]


SLICE = {"h": H, "w": W, "start_offset": START}
MX = {"rows": H, "cols": W, "start_offset": START}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "step": 2, "mode": 0, "bias_correction": 1, "weight_decay": 0.1}
ON_DEVICE = {**ADAM, "lr": fp32(1), "step": torch.ones(1, dtype=torch.int32), "inv_scale": fp32(1)}
SGD = {"wd": 0.1, "momentum": 0.9, "dampening": 0, "lr": 0.1, "nesterov": True, "first_run": False, "wd_after_momentum": True, "scale": 1.0}
FLAG = {"chunk_size": 1, "noop_flag": torch.zeros(1, dtype=torch.int32)}
FP32, BF16 = torch.float32, torch.bfloat16
ONE = [[fp32(1), fp32(1)] for _ in range(3)]

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8_block_scaling_compute_partial_amax": lambda: {"tensor": PART, "amax": fp32(3, 8), "block_len": 128, **SLICE},
    "fp8_block_scaling_partial_cast": lambda: {
        "inp": PART, "out": empty(PART.numel()), "scale": fp32(3, 8), "block_len": 128, **SLICE, "out_dtype": 7,
    },
    "mxfp8_scaling_compute_partial_amax": lambda: {"input": PART, "amax_rowwise": fp32(H, 20), "amax_colwise": fp32(12, W), **MX},
    "mxfp8_scaling_partial_cast": lambda: {
        "input": PART, "output_rowwise": empty(PART.numel()), "output_colwise": empty(PART.numel()), "scale_inv_rowwise": empty(H, 20),
        "scale_inv_colwise": empty(12, W), **MX,
    },
    "nvfp4_2d_compute_partial_amax": lambda: {"tensor": PART, "amax": fp32(24, 40), **SLICE},
    "nvfp4_2d_partial_cast": lambda: {"inp": PART, "out": empty(-(-PART.numel() // 2)), "scale": fp32(24, 40), "global_scale": fp32(1), **SLICE},
    "nvfp4_expand_scale_to_fp8": lambda: {
        "input": fp32(24, 400), "output": empty(H, 400), "tile_rows": 24, "tile_cols": 400, "rows_padded": H, "block_len": 16,
    },
    "nvfp4_compute_per_block_scale": lambda: {"block_amax": fp32(H, W), "scale": fp32(H, W), "global_amax": fp32(1)},
    "nvfp4_data_transpose": lambda: {"input": empty(H, W), "out": None},
    "nvfp4_2d_scale_transpose": lambda: {"input": empty(H, 40), "output": empty(W, 24), "M_tiles": 24, "K_tiles": 40},
    "swap_first_dims": lambda: {"tensor": fp32(H, W, 2), "out": None},
    "fused_multi_row_padding": lambda: {"input": fp32(H, W), "output": fp32(H + 9, W), "input_row_list": [H], "padded_input_row_list": [H + 9]},
    "bulk_allocate": lambda: {"shapes": [(H, W), (3,)], "dtypes": [FP32, BF16], "device": "cpu"},
    "multi_tensor_transpose_to_bhsd": lambda: {"inputs": [fp32(H, 4, 16, 10)], "original_format": "sbhd"},
    "multi_tensor_pad_last_dim": lambda: {"inputs": [fp32(H, W - 1)], "alignment": 16},
    "multi_tensor_swizzle_scales_for_gemm_unchecked_": lambda: {
        "tensors": [SimpleNamespace(_rowwise_scale_inv=empty(H, W), _with_gemm_swizzled_scales=False)],
        "rowwise_usage": True, "columnwise_usage": True,
    },
    "multi_tensor_scale_tensor": lambda: {"chunk_size": 1, "is_infinite": FLAG["noop_flag"], "tensor_lists": lists(FP32, BF16), "scale": fp32(1)},
    "multi_tensor_unscale_l2norm": lambda: {**FLAG, "tensor_lists": lists(BF16), "inv_scale": fp32(1), "per_tensor_python": True},
    "multi_tensor_adam": lambda: {**FLAG, "tensor_lists": lists(BF16, FP32, BF16, BF16), **ADAM},
    "multi_tensor_adam_param_remainder": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, FP32, FP32, torch.int16), **ADAM},
    "multi_tensor_adam_fp8": lambda: {
        **FLAG, "tensor_lists": [*lists(BF16, torch.uint8, FP32, FP32, FP32), *ONE], **ADAM, "fp8_dtype": DType.kFloat8E4M3,
    },
    "multi_tensor_adam_capturable_master": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, BF16, BF16, FP32), **ON_DEVICE},
    "multi_tensor_sgd": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, BF16), **SGD},
    "multi_tensor_compute_scale_and_scale_inv": lambda: {
        **FLAG, "tensor_lists": lists(FP32, FP32, FP32), "max_fp8": 448.0, "force_pow_2_scales": True, "epsilon": 0.0,
    },
    "multi_tensor_compute_scale_inv_e8m0": lambda: {"chunk_size": 1, "dummy": None, "tensor_lists": lists(BF16, torch.uint8)},
}  # fmt: skip

FEW = {
    "input": X[: 2 * W], "output_rowwise": empty(2 * W), "output_colwise": empty(2 * W), "scale_inv_rowwise": empty(H * 8, 20),
    "scale_inv_colwise": empty(H // 4, W), "rows": H * 8, "cols": W, "start_offset": W,
}  # fmt: skip
SHORT: dict[str, Callable[[], dict[str, Any]]] = {
    "mxfp8_scaling_compute_partial_amax": lambda: {
        "input": ROW, "amax_rowwise": fp32(8, 20), "amax_colwise": fp32(1, W), "rows": 8, "cols": W, "start_offset": 5 * W + 1,
    },
    "mxfp8_scaling_partial_cast": lambda: {
        "input": ROW, "output_rowwise": empty(W - 2), "output_colwise": empty(W - 2),
        "scale_inv_rowwise": empty(8, 20), "scale_inv_colwise": empty(1, W), "rows": 8, "cols": W, "start_offset": 5 * W + 1,
    },
    "fp8_block_scaling_partial_cast": lambda: {
        "inp": ROW, "out": empty(W - 2), "scale": fp32(1, 5), "h": 8, "w": W, "start_offset": 5 * W + 1, "block_len": 128, "out_dtype": 7,
    },
    "nvfp4_2d_partial_cast": lambda: {
        "inp": X[: 2 * W], "out": empty(W), "scale": fp32(5 * H, 40), "global_scale": fp32(1), "h": 80 * H, "w": W, "start_offset": W,
    },
}  # fmt: skip
"""Slices of a part of one row, or of few rows of many, which an unwary kernel widens to tiles or to the weight."""


@pytest.mark.parametrize(("function", "make"), [*CALLS.items(), *SHORT.items(), ("mxfp8_scaling_partial_cast", lambda: FEW)])
def test_the_reference_holds_little_beside_its_arguments(function: str, make: Callable[[], dict[str, Any]]) -> None:
    arguments = make()
    most, result = peak_bytes(lambda: REFERENCE(function, **arguments))
    assert most <= 3 * wide_bytes(arguments, result) + 4096  # a few scalars and indices
