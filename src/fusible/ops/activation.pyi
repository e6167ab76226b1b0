# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from typing import Any
from fusible.ops.activation_base import Activation as Activation
from fusible.ops.activation_base import BlockGate
from fusible.ops.scaled_activation import ScaledActivation
from fusible.ops.scaled_activation import ScaledGate

class ClampedSwiGLU(BlockGate):
    """``c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``: the gate of gpt-oss."""
    glu_interleave_size: int | None
    cache_quantized_input: bool
    limit: float
    alpha: float
    glu_linear_offset: float
    def __init__(
        self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset:
        float = 1.0, **types: Any
    ) -> None: ...

class ErfGELU(Activation):
    """``0.5 x (1 + erf(x / sqrt(2)))``: the exact form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), which is torch's ``nn.GELU()``."""

class ErfGeGLU(Activation):
    """``erf_gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

class GELU(Activation):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

class GLU(Activation):
    """``sigmoid(a) * b`` (Dauphin et al. 2017, arXiv:1612.08083)."""

class GeGLU(Activation):
    """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

class QGELU(Activation):
    """``x * sigmoid(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

class QGeGLU(Activation):
    """``qgelu(a) * b``."""

class ReGLU(Activation):
    """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

class ReLU(Activation):
    """``max(x, 0)``."""

class SReGLU(Activation):
    """``srelu(a) * b``."""

class SReLU(Activation):
    """``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668)."""

class ScaledClampedQGeGLU(ScaledGate):
    """``clamped_swiglu(x) * s``, of ``ClampedSwiGLU``."""
    glu_interleave_size: int | None
    limit: float
    alpha: float
    glu_linear_offset: float
    def __init__(
        self, scales: str, *, glu_interleave_size: int | None = None, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, **types:
        Any
    ) -> None: ...

class ScaledSReLU(ScaledActivation):
    """``srelu(x) * s``, of ``SReLU``."""

class ScaledSiTUGLU(ScaledGate):
    """``situglu(x) * s``, of ``SiTUGLU``."""
    glu_interleave_size: int | None
    beta1: float
    beta2: float
    def __init__(self, scales: str, *, glu_interleave_size: int | None = None, beta1: float = 4.0, beta2: float = 25.0, **types: Any) -> None: ...

class ScaledSwiGLU(ScaledGate):
    """``swiglu(x) * s``, of ``SwiGLU``."""

class SiLU(Activation):
    """``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""

class SiTUGLU(BlockGate):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``: SwiGLU whose two factors saturate at ``beta1`` and ``beta2``."""
    glu_interleave_size: int | None
    cache_quantized_input: bool
    beta1: float
    beta2: float
    def __init__(
        self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False, beta1: float = 4.0, beta2: float = 25.0, **types: Any
    ) -> None: ...

class SwiGLU(BlockGate):
    """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""
