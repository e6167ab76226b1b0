# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation

class _Activation(BasicOperation):
    op: ClassVar[Callable[..., Op]]
    hands_on: ClassVar[Sequence[str]]
    "Its options that are the op's."
    first: ClassVar[Sequence[str]]
    'The arguments that the op takes before them.'

    def __init__(self, **options: Any) -> None:
        ...

    def make_op(self) -> Op:
        ...

class _Scaled(_Activation):
    ...

class _ScaledClampedQGeGLU(_Scaled):

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        ...

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        ...

class ClampedSwiGLU(_Activation):
    """``c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``: the gate of gpt-oss."""
    limit: float
    alpha: float
    glu_linear_offset: float
    cache_quantized_input: bool
    glu_interleave_size: int | None
    def __init__(
        self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, cache_quantized_input: bool = False, glu_interleave_size: int |
        None = None
    ) -> None: ...

class ErfGEGLU(_Activation):
    """``erf_gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class ErfGELU(_Activation):
    """``0.5 x (1 + erf(x / sqrt(2)))``: the exact form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), which is torch's ``nn.GELU()``."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class GEGLU(_Activation):
    """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class GELU(_Activation):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class GLU(_Activation):
    """``sigmoid(a) * b`` (Dauphin et al. 2017, arXiv:1612.08083)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class QGEGLU(_Activation):
    """``qgelu(a) * b``."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class QGELU(_Activation):
    """``x * sigmoid(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class ReGLU(_Activation):
    """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class ReLU(_Activation):
    """``max(x, 0)``."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class SReGLU(_Activation):
    """``srelu(a) * b``."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class SReLU(_Activation):
    """``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class ScaledClampedQGeGLU(_ScaledClampedQGeGLU):
    """``clamped_swiglu(x) * scales`` with the extra input ``scales [rows]``, which has a gradient.

    ``activation_recompute_in_mlp`` is taken for compatibility: what backward needs is the input in any case."""
    glu_interleave_size: int | None
    limit: float
    alpha: float
    glu_linear_offset: float
    activation_recompute_in_mlp: bool
    def __init__(
        self, glu_interleave_size: int | None = None, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False
    ) -> None: ...

class ScaledSReLU(_Scaled):
    """``srelu(x) * scales`` with the extra input ``scales [rows]``, which has a gradient.

    ``activation_recompute_in_mlp`` is taken for compatibility: what backward needs is the input in any case."""
    activation_recompute_in_mlp: bool
    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None: ...

class ScaledSiTUGLU(_Scaled):
    """``situglu(x) * scales`` with the extra input ``scales [rows]``, which has a gradient.

    ``activation_recompute_in_mlp`` is taken for compatibility: what backward needs is the input in any case."""
    glu_interleave_size: int | None
    beta1: float
    beta2: float
    activation_recompute_in_mlp: bool
    def __init__(
        self, glu_interleave_size: int | None = None, *, beta1: float = 4.0, beta2: float = 25.0, activation_recompute_in_mlp: bool = False
    ) -> None: ...

class ScaledSwiGLU(_Scaled):
    """``swiglu(x) * scales`` with the extra input ``scales [rows]``, which has a gradient.

    ``activation_recompute_in_mlp`` is taken for compatibility: what backward needs is the input in any case."""
    glu_interleave_size: int | None
    activation_recompute_in_mlp: bool
    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None: ...

class SiLU(_Activation):
    """``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""
    cache_quantized_input: bool
    def __init__(self, *, cache_quantized_input: bool = False) -> None: ...

class SiTUGLU(_Activation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``: SwiGLU whose two factors saturate at ``beta1`` and ``beta2``."""
    beta1: float
    beta2: float
    cache_quantized_input: bool
    glu_interleave_size: int | None
    def __init__(
        self, *, beta1: float = 4.0, beta2: float = 25.0, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None: ...

class SwiGLU(_Activation):
    """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""
    cache_quantized_input: bool
    glu_interleave_size: int | None
    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None: ...
