"""FlagGems: Triton kernels for the accelerators of many vendors, called function by function, where the package and a device for it are there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from fusible.tex.backends.flaggems.activation import ActivationKernels
from fusible.tex.backends.flaggems.attention import AttentionKernels
from fusible.tex.backends.flaggems.gemm import GemmKernels
from fusible.tex.backends.flaggems.normalization import NormalizationKernels
from fusible.tex.backends.flaggems.softmax import SoftmaxKernels
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request
from fusible.tex.selection.registry import registry

__all__ = ["FlagGemsBackend", "load"]


@functools.cache
def load() -> Any:
    """The package, or why it cannot be used, found out once: importing it looks for devices by running programs, and raises where it finds none."""
    if importlib.util.find_spec("flag_gems") is None:
        return "flag_gems is not installed"
    try:
        return importlib.import_module("flag_gems")
    except Exception as error:
        return f"flag_gems cannot be loaded: {type(error).__name__}: {error}".splitlines()[0]


_KERNELS = {
    "dbias_dgelu": "gelu_backward",
    "dbias_dsilu": "silu_backward",
    "dgeglu": "dgeglu",
    "dgelu": "gelu_backward",
    "dsilu": "silu_backward",
    "dswiglu": "dswiglu",
    "fused_attn_bwd": "scaled_dot_product_attention_backward",
    "fused_attn_fwd": "scaled_dot_product_attention_forward",
    "geglu": "geglu",
    "gelu": "gelu",
    "generic_gemm": "mm",
    "layernorm_bwd": "layer_norm_backward",
    "layernorm_fwd": "layer_norm",
    "rmsnorm_bwd": "rms_norm_backward",
    "rmsnorm_fwd": "rms_norm_forward",
    "scaled_softmax_forward": "scaled_softmax_forward",
    "silu": "silu",
    "swiglu": "swiglu",
}
"""By function of tex: FlagGems' function that serves it, as of its version 5.0; an older one has not all of them."""

_OTHERWISE_ON_CUDA = frozenset({"fused_attn_bwd", "rmsnorm_bwd", "rmsnorm_fwd"})
"""What the conformance suite found to compute otherwise on an H200, by version 5.0.2."""


@registry.register_backend
class FlagGemsBackend(ActivationKernels, AttentionKernels, GemmKernels, NormalizationKernels, SoftmaxKernels, TEXBackendBase):
    """Activations, norms, products, softmax and attention on unquantized tensors of the device that FlagGems found."""

    NAME = "flaggems"
    VENDOR = "FlagOpen"
    KIND = "flagos"
    PRIORITY = 150

    def unavailable(self) -> str | None:
        found = load()
        return found if isinstance(found, str) else None

    @property
    def gems(self) -> Any:
        return load()

    def lacks(self, function: str) -> str | None:
        lacking, kernel, found = super().lacks(function), _KERNELS.get(function), load()
        if lacking is None and kernel is not None and not isinstance(found, str) and not hasattr(found, kernel):
            return f"the installed flag_gems has no {kernel}"
        return lacking

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request) or self.unavailable()
        if reason is None and not request.devices <= {self.gems.device}:
            reason = f"serves tensors on {self.gems.device}, where FlagGems runs, and these are on {', '.join(sorted(request.devices))}"
        if reason is None and request.function in _OTHERWISE_ON_CUDA and "cuda" in request.devices:
            reason = "its kernel was not seen to give the interface's results on an NVIDIA GPU"
        return reason
