"""The public names of NVIDIA's Python package that Fusible does not serve, with what they would take."""

from __future__ import annotations

__all__ = ["GPU_ALONE", "UNSERVED"]

_OVERLAP = "overlaps communication with products by memory that GPUs share"
_MLA = "is written in Triton and CuTe for GPUs of capability 10.0, with cuDNN's frontend"
_DELTA = "calls cuDNN's frontend for linear attention"
_SOLVER = "calls cuSOLVERMp over NCCL"

GPU_ALONE = {
    "CusolverMpCtx": _SOLVER,
    "FusedMLAQUpProjFunction": _MLA,
    "FusedMLAQUpProjRopeQuant": _MLA,
    "GatedDeltaNet2Attention": _DELTA,
    "GatedDeltaNetAttention": _DELTA,
    "GatedDeltaProductAttention": _DELTA,
    "initialize_ub": _OVERLAP,
    "newton_schulz": _SOLVER,
    "newton_schulz_tp": _SOLVER,
}
"""What the package itself computes on a GPU alone."""

UNSERVED = {
    "InferenceParams": "keeps keys and values in the package's caches; Fusible's own is fusible.pytorch.KVCache",
}
"""What the package, too, computes on a CPU by Fusible's kernels."""
