"""The public names of NVIDIA's Python package that Fusible does not serve, with what they would take; and those that the package has on GPUs
alone."""

from __future__ import annotations

__all__ = ["GPU_ALONE", "UNSERVED"]

_MLA = "is written in Triton and CuTe for GPUs of capability 10.0, with cuDNN's frontend"

UNSERVED = {
    "FusedMLAQUpProjFunction": _MLA,
    "FusedMLAQUpProjRopeQuant": _MLA,
}
"""What the package itself computes on a GPU alone, and Fusible not at all."""

GPU_ALONE = ("CusolverMpCtx", "initialize_ub", "newton_schulz", "newton_schulz_tp")
"""What the package refuses without a GPU, and Fusible serves."""
