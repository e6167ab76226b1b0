"""The formats that ``fusible quantize`` writes: which weights take each, how they are quantized, and as whose checkpoint they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusible.models.checkpoints.agreement import BLOCK
from fusible.models.checkpoints.checkpoint import Checkpoint
from fusible.models.checkpoints.layouts import WeightLayout
from fusible.models.checkpoints.mxfp4 import MXFP4WeightQuantizer
from fusible.models.checkpoints.schemes import Scheme
from fusible.models.checkpoints.schemes.compressed_tensors import COMPRESSED_TENSORS, MXFP4_ROWS, MXFP8_ROWS, NVFP4_ROWS, TENSORS
from fusible.models.checkpoints.schemes.fine_grained_fp8 import FINE_GRAINED_FP8, MXFP8_BLOCKS, TILES
from fusible.models.checkpoints.schemes.mxfp4 import EXPERTS, MXFP4
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType

__all__ = ["TARGETS", "Target", "high_precision"]

_HIGH = (torch.bfloat16, torch.float16, torch.float32)
_NO_LINEAR = re.compile(
    r"(?:^|\.)(?:gate|router|shared_expert_gate|shared_head|\w*norm\w*|\w*embed\w*|relative_attention_bias|(?:vision|visual|audio)\w*)(?:\.|$)"
)
"""Modules whose weights choose experts, are no linear layers, are a head, or see and hear."""

_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose layers are ``Conv1D``: their weights lie ``[in, out]``, and no scheme takes them for linear layers."""

_HEADS = {"bert": "cls.predictions.decoder", "whisper": "proj_out"}
"""The modules that are heads, by the families that have another name for them."""

_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe)(?:\.|$)")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
_GPT_OSS = ("gpt_oss",)


@dataclass(frozen=True)
class Target:
    """A format of ``fusible quantize``.

    ``weights(checkpoint)``: the names of what it may quantize. ``block``: rows and columns of which a weight must consist, or it stays as it is.
    ``quantize``: of a matrix, or of the experts' matrices ``[experts, out, in]``. ``per_tensor``: whether one number scales the whole tensor, so that
    linear layers which servers make one of should share it. ``transposed``: whether the weights lie ``[..., in, out]`` before they are quantized.
    """

    scheme: Scheme
    layout: WeightLayout
    block: tuple[int, int]
    quantize: Callable[[torch.Tensor], Any]
    weights: Callable[[Checkpoint], Sequence[str]]
    per_tensor: bool = False
    transposed: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a weight consists of whole blocks."""
        *_, rows, columns = reversed(shape[-2:]) if self.transposed else shape[-2:]
        return rows * columns > 0 and rows % self.block[0] == 0 and columns % self.block[1] == 0


def _linears(checkpoint: Checkpoint) -> list[str]:
    """Two-dimensional weights within the blocks, but for those of norms, embeddings and routers."""
    if checkpoint.config.get("model_type") in _TRANSPOSED:
        return []
    names = (name for name in checkpoint.names if name.endswith(".weight") and BLOCK.search(name) and not _NO_LINEAR.search(name))
    return [name for name in names if len(checkpoint.shape(name)) == 2 and checkpoint.plain[name].dtype in _HIGH]


def _linears_with_experts(checkpoint: Checkpoint) -> list[str]:
    """The same, of a model that has experts, each with weights of its own; of others none."""
    names = _linears(checkpoint)
    return names if any(".experts." in name for name in names) else []


def _experts(checkpoint: Checkpoint) -> list[str]:
    """The weights of all experts of a layer in one tensor, as gpt-oss has them."""
    if checkpoint.config.get("model_type") not in _GPT_OSS:
        return []
    return [name for name in checkpoint.names if _FUSED_EXPERTS.search(name) and len(checkpoint.shape(name)) == 3]


def high_precision(checkpoint: Checkpoint, quantized: Sequence[str]) -> list[str]:
    """The modules of linear layers and experts that are not ``quantized``. The head is named also where it has no weight of its own, being the
    embedding's: it is a linear layer still."""
    taken = set(quantized)
    kept = {
        name.removesuffix(".weight") for name in checkpoint.names if name not in taken and name.endswith(".weight") and _is_linear(checkpoint, name)
    }
    experts = {name.rpartition(".")[0] for name in checkpoint.names if name not in taken and _FUSED_EXPERTS.search(name)}
    head = _HEADS.get(checkpoint.config.get("model_type", ""), "lm_head")
    return sorted({head} | kept | experts)


def _is_linear(checkpoint: Checkpoint, name: str) -> bool:
    embedding = any(part in name for part in ("embed", "wte.", "wpe."))
    return len(checkpoint.shape(name)) == 2 and not embedding


_E4M3 = DType.kFloat8E4M3

TARGETS: Mapping[str, tuple[Target, ...]] = {
    "fp8": (Target(COMPRESSED_TENSORS, TENSORS, (1, 1), Float8CurrentScalingQuantizer(_E4M3, columnwise=False), _linears, per_tensor=True),),
    "block": (Target(FINE_GRAINED_FP8, TILES, (128, 128), Float8BlockQuantizer(_E4M3, columnwise=False, force_pow_2_scales=False), _linears),),
    "mxfp8": (
        # transformers (5.24) dequantizes the experts of compressed-tensors' MXFP8 to nothing that has their shape, and these rightly.
        Target(FINE_GRAINED_FP8, MXFP8_BLOCKS, (32, 32), MXFP8Quantizer(_E4M3, columnwise=False), _linears_with_experts),
        Target(COMPRESSED_TENSORS, MXFP8_ROWS, (32, 32), MXFP8Quantizer(_E4M3, columnwise=False), _linears),
    ),
    "nvfp4": (Target(COMPRESSED_TENSORS, NVFP4_ROWS, (16, 16), NVFP4Quantizer(columnwise=False), _linears, per_tensor=True),),
    "mxfp4": (
        Target(MXFP4, EXPERTS, (1, 32), MXFP4WeightQuantizer(), _experts, transposed=True),
        Target(COMPRESSED_TENSORS, MXFP4_ROWS, (1, 32), MXFP4WeightQuantizer(), _linears),
    ),
}
"""By the name that ``--format`` takes, what to write: the first that has weights to quantize."""
