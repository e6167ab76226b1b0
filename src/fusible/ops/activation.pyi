# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from fusible.ops.activation_base import Activation as Activation
from fusible.ops.scaled_activation import ScaledActivation

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

class ScaledSReLU(ScaledActivation):
    """``srelu(x) * s``, of ``SReLU``."""

class SiLU(Activation):
    """``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""
