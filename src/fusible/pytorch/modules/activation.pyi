# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from fusible.pytorch.modules.base import BaseModule

class ErfGELU(BaseModule):
    """``0.5 x (1 + erf(x / sqrt(2)))``: the exact form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), which is torch's ``nn.GELU()``."""
    def __init__(self: BaseModule) -> None: ...

class ErfGeGLU(BaseModule):
    """``erf_gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202).

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class GELU(BaseModule):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    def __init__(self: BaseModule) -> None: ...

class GLU(BaseModule):
    """``sigmoid(a) * b`` (Dauphin et al. 2017, arXiv:1612.08083).

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class GeGLU(BaseModule):
    """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202).

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class QGELU(BaseModule):
    """``x * sigmoid(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    def __init__(self: BaseModule) -> None: ...

class QGeGLU(BaseModule):
    """``qgelu(a) * b``.

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class ReGLU(BaseModule):
    """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202).

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class ReLU(BaseModule):
    """``max(x, 0)``."""
    def __init__(self: BaseModule) -> None: ...

class SReGLU(BaseModule):
    """``srelu(a) * b``.

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...

class SReLU(BaseModule):
    """``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668)."""
    def __init__(self: BaseModule) -> None: ...

class SiLU(BaseModule):
    """``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""
    def __init__(self: BaseModule) -> None: ...

class SwiGLU(BaseModule):
    """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202).

    Of the two halves ``[a | b]`` of the last dimension, which it halves."""
    def __init__(self: BaseModule) -> None: ...
