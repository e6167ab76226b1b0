"""The public names of NVIDIA's Python package that Fusible does not serve, with what they would take; and those that the package has on GPUs
alone."""

from __future__ import annotations

__all__ = ["GPU_ALONE", "UNSERVED"]

_MLA = "is written in Triton and CuTe for GPUs of capability 10.0, with cuDNN's frontend"

UNSERVED = {
    "FusedMLAQUpProjFunction": _MLA,
    "FusedMLAQUpProjRopeQuant": _MLA,
}
"""By name: functions that the package computes on GPUs alone and Fusible does not serve, with the reason."""

GPU_ALONE = ("CusolverMpCtx", "initialize_ub", "newton_schulz", "newton_schulz_tp")
"""Functions that the package refuses without a GPU, and Fusible serves."""
