"""What casts, movements, primitives and optimizer steps hold at once: at most three times their arguments and results, counted in fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tex_peak_bytes import check_peak
from torch import Tensor

from fusible.quantized import MXFP8Quantizer
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


_MXFP8 = {"_rowwise_data": None, "_columnwise_data": None, "_fp8_dtype": 7, "_with_gemm_swizzled_scales": False}


class OfMXFP8(SimpleNamespace):
    """A class answers once what the format of its tensors is."""


def scales() -> list[Any]:
    """Tensors of nothing but scales, so that no data is in the budget."""
    ways = "_rowwise_scale_inv", "_columnwise_scale_inv"
    return [OfMXFP8(**{way: empty(H, W) for way in ways}, **_MXFP8) for _ in range(2)]


def fused_scale() -> dict[str, Any]:
    tiles = {"block_amax": fp32(24, 400), "global_amax": fp32(1), "per_block_scale": fp32(24, 400), "target_scale": empty(H, 400)}
    return {**tiles, "target_amax": fp32(1), "tile_rows": 24, "tile_cols": 400, "rows_padded": H}


def transpose() -> dict[str, Any]:
    data = {"rowwise_data": empty(H, W), "columnwise_data": empty(2 * W, H // 2)}
    return {**data, "rowwise_scale_inv": empty(H, 80), "columnwise_scale_inv": empty(2 * W, 24), "M": H, "K": 2 * W}


def partial(**more: Any) -> dict[str, Any]:
    return {**more, "h": H, "w": W, "start_offset": START}


def many(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of two such calls as lists."""
    return {f"{name}_list": [value, value.clone() if isinstance(value, Tensor) else value] for name, value in call.items()}


def update(algorithm: str, *shapes: tuple[int, int]) -> dict[str, Any]:
    columns = [shape[1] for shape in shapes]
    return {
        "amax_reduction_buffer": fp32(sum(columns)), "amax_histories": [fp32(*shape) for shape in shapes], "scales": [fp32(n) for n in columns],
        "amax_compute_algo": algorithm, "fp8_dtype": DType.kFloat8E4M3, "margin": 0,
    }  # fmt: skip


def offsets(**more: Any) -> dict[str, Any]:
    """Of several kinds, from int32 sizes, which the budget counts once."""
    sizes = torch.ones(H * W, dtype=torch.int32)
    kinds = {"strides": [1, 640], "include_leading_zero": [False, True], "dtypes": [torch.int32, torch.int64]}
    return {"split_sizes": sizes, "device": torch.device("cpu"), **kinds, **more}


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
    "nvfp4_compute_global_scale": lambda: {"global_amax": fp32(H, W), "global_scale": fp32(H, W)},
    "nvfp4_fused_scale": lambda: {**fused_scale(), "block_len": 16},
    "nvfp4_multi_tensor_fused_scale": lambda: {**many(fused_scale()), "block_len": 16},
    "nvfp4_multi_tensor_compute_partial_amax": lambda: many(partial(master_weight=PART, partial_amax=fp32(24, 40), global_amax=fp32(1))),
    "nvfp4_multi_tensor_2d_partial_cast": lambda: many(
        partial(inp=PART, out=empty(-(-PART.numel() // 2)), scale=fp32(24, 40), global_scale=fp32(1))
    ),
    "nvfp4_2d_multi_tensor_transpose": lambda: many(transpose()),
    "nvfp4_data_transpose": lambda: {"input": empty(H, W), "out": None},
    "nvfp4_2d_scale_transpose": lambda: {"input": empty(H, 40), "output": empty(W, 24), "M_tiles": 24, "K_tiles": 40},
    "swap_first_dims": lambda: {"tensor": fp32(H, W, 2), "out": None},
    "fused_multi_row_padding": lambda: {"input": fp32(H, W), "output": fp32(H + 9, W), "input_row_list": [H], "padded_input_row_list": [H + 9]},
    "fused_multi_row_unpadding": lambda: {
        "input": fp32(H + 9, W), "output": fp32(H, W), "input_row_list": [H + 9], "unpadded_input_row_list": [H],
    },
    "copy_data_ptrs_to_device": lambda: {"tensors": fp32(1 << 15).split(1), "device": torch.device("cpu")},
    "splits_to_offsets": lambda: {"first_dims": torch.ones(H * W, dtype=torch.int32), "logical_last_dim": 640},
    "splits_to_offsets_multi": offsets,
    "splits_to_offsets_multi together": lambda: offsets(bulk_allocate=True),
    "bulk_allocate": lambda: {"shapes": [(H, W), (3,)], "dtypes": [FP32, BF16], "device": "cpu"},
    "multi_tensor_transpose_to_bhsd": lambda: {"inputs": [fp32(H, 4, 16, 10)], "original_format": "sbhd"},
    "multi_tensor_pad_last_dim": lambda: {"inputs": [fp32(H, W - 1)], "alignment": 16},
    "multi_tensor_swizzle_scales_for_gemm_unchecked_": lambda: {
        "tensors": [OfMXFP8(_rowwise_scale_inv=empty(H, W), **_MXFP8)],
        "rowwise_usage": True, "columnwise_usage": True,
    },
    "multi_tensor_swizzle_scales_for_gemm_": lambda: {"tensors": scales(), "rowwise_usage": True, "columnwise_usage": True},
    **{
        f"swizzle_scales_and_pack_ptrs_for_discrete_weights {kind}": lambda kind=kind: {
            "data_tensors": [x.expand(*x.shape[:-1], 32 * W // (4 if kind == "nvfp4" else 1)) for x in (empty(H, 1), empty(H, 1))]
            if kind != "mxfp8_columnwise" else [empty(32 * H, 1).expand(-1, W)] * 2,
            "scale_tensors": [empty(H, W), empty(H, W)], "swizzle_type": kind, "device": torch.device("cpu"),
        }
        for kind in ("mxfp8_rowwise", "mxfp8_columnwise", "nvfp4")
    },
    "multi_tensor_scale_tensor": lambda: {"chunk_size": 1, "is_infinite": FLAG["noop_flag"], "tensor_lists": lists(FP32, BF16), "scale": fp32(1)},
    "multi_tensor_unscale_l2norm": lambda: {**FLAG, "tensor_lists": lists(BF16), "inv_scale": fp32(1), "per_tensor_python": True},
    "multi_tensor_adam": lambda: {**FLAG, "tensor_lists": lists(BF16, FP32, BF16, BF16), **ADAM},
    "multi_tensor_adam_param_remainder": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, FP32, FP32, torch.int16), **ADAM},
    "multi_tensor_adam_fp8": lambda: {
        **FLAG, "tensor_lists": [*lists(BF16, torch.uint8, FP32, FP32, FP32), *ONE], **ADAM, "fp8_dtype": DType.kFloat8E4M3,
    },
    "multi_tensor_adam_scaled": lambda: {
        **FLAG,
        "tensor_lists": [*lists(BF16, BF16, torch.uint8, torch.float16), *ONE[:2], *lists(torch.float16), ONE[2]],
        **ADAM,
    },
    "multi_tensor_adam_capturable_master": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, BF16, BF16, FP32), **ON_DEVICE},
    "multi_tensor_adam_capturable": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, BF16, BF16), **ON_DEVICE},
    "multi_tensor_sgd": lambda: {**FLAG, "tensor_lists": lists(BF16, BF16, BF16), **SGD},
    "multi_tensor_compute_scale_and_scale_inv": lambda: {
        **FLAG, "tensor_lists": lists(FP32, FP32, FP32), "max_fp8": 448.0, "force_pow_2_scales": True, "epsilon": 0.0,
    },
    "multi_tensor_compute_scale_inv_e8m0": lambda: {"chunk_size": 1, "dummy": None, "tensor_lists": lists(BF16, torch.uint8)},
    "fused_amax_and_scale_update_after_reduction": lambda: update("max", (1024, 200), (1024, 3)),
    "fused_amax_and_scale_update_after_reduction most recent": lambda: update("most_recent", (1024, 200)),
    "fused_amax_and_scale_update_after_reduction of one step": lambda: update("max", (1, H * W)),
    "create_empty_quantized_tensor": lambda: {
        "quantizer": MXFP8Quantizer(DType.kFloat8E4M3), "shape": [H, W], "dtype": BF16, "device": torch.device("cpu"), "pin_memory": False,
    },
    "prim_copy": lambda: {"x": fp32(W, H).t()},
    "prim_empty": lambda: {"shape": [H, W], "dtype": BF16, "like": fp32(1)},
    "prim_full": lambda: {"shape": [H, W], "value": 7, "dtype": BF16, "like": fp32(1)},
    "prim_reshape": lambda: {"x": fp32(W, H).t(), "shape": (W, H)},
    "prim_rope_angles": lambda: {"positions": 1024, "width": 128, "base": 10000.0, "like": fp32(1)},
    "prim_split": lambda: {"x": fp32(H, W), "sizes": [W - 1, 1], "dim": 1},
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
    check_peak(function.split()[0], make())
