# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from typing import Any
from typing import ClassVar
from fusible import ops
from fusible.ops import Op
from fusible.pytorch.ops.op import BasicOperation

class _Activation(BasicOperation):
    """``cache_quantized_input``: what backward needs of the input is kept in E4M3, scaled by its own amax: a byte per element, a less exact
    gradient."""
    op: ClassVar[type[ops.Activation]]
    cache_quantized_input: bool

    def __init__(self, *, cache_quantized_input: bool=False) -> None:
        ...

    def make_op(self) -> Op:
        ...

class _ScaledActivation(BasicOperation):
    """An activation times the extra input ``scales [rows]``, which has a gradient. ``activation_recompute_in_mlp`` is taken for compatibility: what
    backward needs is the input in any case."""
    op: ClassVar[type[Any]]
    activation_recompute_in_mlp: bool

    def __init__(self, *, activation_recompute_in_mlp: bool=False) -> None:
        ...

    def make_op(self) -> Op:
        ...

class GEGLU(_Activation):
    """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

class GELU(_Activation):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

class GLU(_Activation):
    """``sigmoid(a) * b`` (Dauphin et al. 2017, arXiv:1612.08083)."""

class QGEGLU(_Activation):
    """``qgelu(a) * b``."""

class QGELU(_Activation):
    """``x * sigmoid(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

class ReGLU(_Activation):
    """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

class ReLU(_Activation):
    """``max(x, 0)``."""

class SReGLU(_Activation):
    """``srelu(a) * b``."""

class SReLU(_Activation):
    """``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668)."""

class ScaledSReLU(_ScaledActivation):
    """``srelu(x) * scales``, of ``SReLU``."""

class SiLU(_Activation):
    """``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""
