"""Every activation of the package, a row each: its names, its options and its documentation.

tex's declarations and backends' methods, nvte's functions, the operations, the modules and the fusions with a bias are made of the rows. What
computes one are the methods of its names in ``formulas.pointwise``, for torch and lazy tensors, and the native kernels of
``cppsrc/activation/list.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACTIVATIONS", "Activation", "ELEMENTWISE", "GATES", "Option", "native_options"]


@dataclass(frozen=True)
class Option:
    """A number that an activation takes beside tensors; ``domain`` is what it may be, a name of ``interface.domains``."""

    name: str
    domain: str
    default: float


@dataclass(frozen=True)
class Activation:
    """``name``: the function of tex; ``title``: the class of its operation and of its module; ``doc`` and ``gradient_doc``: what it and its gradient
    compute.

    A gate takes ``[*, 2 H]`` and gives ``[*, H]``: of the halves ``a`` and ``b``, the activation named ``of`` of ``a``, times ``b``, or a formula of
    its own, which may have ``options``. ``scaled``: the class of the operation with a scale per row, where there is one.
    """

    name: str
    title: str
    doc: str
    gradient_doc: str
    gated: bool = False
    of: str = ""
    options: tuple[Option, ...] = ()
    scaled: str = ""

    @property
    def in_blocks(self) -> bool:
        """Whether its operation has an option for operands that alternate in blocks."""
        return self.gated and bool(self.scaled or self.options)

    @property
    def nvidias_title(self) -> str:
        """NVIDIA's class of the operation."""
        return self.title.replace("GeGLU", "GEGLU")

    @property
    def gradient(self) -> str:
        """The function of tex that is its gradient: NVIDIA's name of it."""
        lead, underscore, last = self.name.rpartition("_")
        return f"{lead}{underscore}d{last}"


def _gate(name: str, title: str, of: str, source: str = "", scaled: str = "") -> Activation:
    """``of(a) * b``."""
    return Activation(name, title, f"``{of}(a) * b``{source}.", f"``[grad {of}'(a) b, grad {of}(a)]``.", True, of, scaled=scaled)


ELEMENTWISE = (
    Activation(
        "gelu",
        "GELU",
        "``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).",
        "``grad * gelu'(x)``, of the tanh form.",
    ),
    Activation(
        "erf_gelu",
        "ErfGELU",
        "``0.5 x (1 + erf(x / sqrt(2)))``: the exact form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), which is torch's ``nn.GELU()``.",
        "``grad * (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi))`` with ``Phi(x) = 0.5 (1 + erf(x / sqrt(2)))``.",
    ),
    Activation(
        "qgelu",
        "QGELU",
        "``x * sigmoid(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).",
        "``grad * (s + 1.702 x s (1 - s))`` with ``s = sigmoid(1.702 x)``.",
    ),
    Activation("relu", "ReLU", "``max(x, 0)``.", "``grad`` where ``x > 0``, else 0."),
    Activation(
        "silu",
        "SiLU",
        "``x * sigmoid(x)`` (Elfwing et al. 2018, arXiv:1702.03118).",
        "``grad * (s + x s (1 - s))`` with ``s = sigmoid(x)``.",
    ),
    Activation(
        "srelu", "SReLU", "``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668).", "``grad * max(2 x, 0)``.", scaled="ScaledSReLU"
    ),
)

_VARIANTS = " (Shazeer 2020, arXiv:2002.05202)"

GATES = (
    _gate("glu", "GLU", "sigmoid", " (Dauphin et al. 2017, arXiv:1612.08083)"),
    _gate("geglu", "GeGLU", "gelu", _VARIANTS),
    _gate("erf_geglu", "ErfGeGLU", "erf_gelu", _VARIANTS),
    _gate("qgeglu", "QGeGLU", "qgelu"),
    _gate("reglu", "ReGLU", "relu", _VARIANTS),
    _gate("sreglu", "SReGLU", "srelu"),
    _gate("swiglu", "SwiGLU", "silu", _VARIANTS, scaled="ScaledSwiGLU"),
    Activation(
        "situglu",
        "SiTUGLU",
        "``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``: SwiGLU whose two factors saturate at ``beta1`` and ``beta2``.",
        "``[grad ((1 - t^2) s + beta1 t s (1 - s)) beta2 u, grad (1 - u^2) beta1 t s]``, with ``t = tanh(a / beta1)``, ``u = tanh(b / beta2)`` and "
        "``s = sigmoid(a)``.",
        gated=True,
        options=(Option("beta1", "Positive", 4.0), Option("beta2", "Positive", 25.0)),
        scaled="ScaledSiTUGLU",
    ),
    Activation(
        "clamped_swiglu",
        "ClampedSwiGLU",
        "``c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``: the gate of gpt-oss.",
        "``[grad (s + alpha c s (1 - s)) (clamp(b) + glu_linear_offset), grad c s]``, ``c = min(a, limit)``, ``s = sigmoid(alpha c)``: the first "
        "half is 0 where ``a > limit``, the second where ``b`` lies outside ``[-limit, limit]``.",
        gated=True,
        options=(Option("limit", "Limit", 7.0), Option("alpha", "Finite", 1.702), Option("glu_linear_offset", "Finite", 1.0)),
        scaled="ScaledClampedQGeGLU",
    ),
)

ACTIVATIONS = ELEMENTWISE + GATES

_NATIVE_OPTIONS = {"situglu": ("beta1", "beta2"), "clamped_swiglu": ("limit", "alpha", "offset")}


def native_options(name: str, options: tuple[float, ...]) -> dict[str, float]:
    """A gate's options as the native kernels call them."""
    return dict(zip(_NATIVE_OPTIONS[name], options, strict=True)) if options else {}
