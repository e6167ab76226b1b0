"""``TEXBackendBase``: what a backend is. A backend overrides what it has; every other function stays unserved."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from fusible.tex.interface.activation import Activation
from fusible.tex.interface.attention import Attention
from fusible.tex.interface.context_parallel import ContextParallel
from fusible.tex.interface.declare import DECLARATIONS, Request, binds_by_name
from fusible.tex.interface.dropout import Dropout
from fusible.tex.interface.gemm import GEMM
from fusible.tex.interface.grouped import Grouped
from fusible.tex.interface.layout import Layout
from fusible.tex.interface.moe import MoE
from fusible.tex.interface.normalization import Normalization
from fusible.tex.interface.optimizer import Optimizer
from fusible.tex.interface.platform import Platform
from fusible.tex.interface.prim import Prim
from fusible.tex.interface.quantize import Quantize
from fusible.tex.interface.recipe import Recipe
from fusible.tex.interface.rope import Rope
from fusible.tex.interface.sharded_cast import ShardedCast
from fusible.tex.interface.softmax import Softmax
from fusible.tex.interface.swizzle import Swizzle
from fusible.tex.interface.transpose import Transpose

__all__ = ["TEXBackendBase"]


class TEXBackendBase(
    Activation,
    Attention,
    ContextParallel,
    Dropout,
    GEMM,
    Grouped,
    Layout,
    MoE,
    Normalization,
    Optimizer,
    Platform,
    Prim,
    Quantize,
    Recipe,
    Rope,
    ShardedCast,
    Softmax,
    Swizzle,
    Transpose,
):
    """A provider of tex functions.

    ``NAME`` is matched without regard to case; the highest ``PRIORITY`` that serves a call wins; ``REFERENCE`` marks the backend that comes
    last whatever the priorities. ``DEVICES`` are the device kinds it serves, or None for every device that holds real tensors. ``OWN_LAYOUTS`` are
    the functions whose grouped tensors have buffers in an order that only this backend reads: another is given their values. A public method is a
    function of tex, or is named in ``HELPERS`` of the class that has it: registration refuses any other, which would never be called. It takes
    the parameters of the declaration, of which it may leave out those that are idle.

    A policy means a backend by ``NAME``, by ``VENDOR`` or another of its vendor's names (``VENDOR_NAMES``), by ``KIND`` (``"vendor"``, ``"flagos"``
    for FlagGems, ``"own"`` for this package's, ``"reference"``), or by ``IMPL_ID``, where it was registered function by function.
    """

    NAME: str = ""
    VENDOR: str = ""
    PRIORITY: int = 0
    REFERENCE: bool = False
    DEVICES: frozenset[str] | None = None
    OWN_LAYOUTS: frozenset[str] = frozenset()
    HELPERS: frozenset[str] = frozenset()
    KIND: str = "vendor"
    VENDOR_NAMES: frozenset[str] = frozenset()
    IMPL_ID: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, declaration in DECLARATIONS.items():
            if not declaration.idle:
                continue
            method = inspect.getattr_static(cls, name)
            if isinstance(method, FunctionType) and method is not getattr(TEXBackendBase, name):
                bound = binds_by_name(declaration, method)
                if bound is not method:
                    setattr(cls, name, bound)

    @property
    def name(self) -> str:
        return self.NAME

    @property
    def vendor(self) -> str:
        return self.VENDOR

    @property
    def priority(self) -> int:
        return self.PRIORITY

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, or None where it can. Asked once, until backends or policy change."""
        return None

    def is_available(self) -> bool:
        """Whether this backend can run here."""
        return self.unavailable() is None

    def get_attention_backend(self, attention_params: Any) -> Any:
        """Which attention NVIDIA's package uses for a problem, as its own function of that name gives it, or None where this backend has no say.

        Asked where the package is loaded with ``NVTE_PLUGIN=fusible.plugin``.
        """
        return None

    def get_flash_attention_class(self) -> Any:
        """The class that NVIDIA's package makes in place of its ``FlashAttention``, or None; asked as ``get_attention_backend`` is."""
        return None

    def lacks(self, function: str) -> str | None:
        """Why this backend does not implement ``function`` for any arguments; None where it does."""
        if function in vars(self) or getattr(type(self), function, None) is not getattr(TEXBackendBase, function, None):
            return None
        declaration = DECLARATIONS.get(function)
        return declaration.unserved if declaration is not None and declaration.unserved else "not implemented by it"

    def supports(self, request: Request) -> str | None:
        """Why this backend refuses ``request``, or None where it serves it."""
        lacking = self.lacks(request.function)
        if lacking is not None:
            return lacking
        devices = request.devices
        if self.DEVICES is None and "lazy" in devices:
            return "serves real tensors, and these record"
        if self.DEVICES is not None and not devices <= self.DEVICES:
            return f"serves tensors on {', '.join(sorted(self.DEVICES))}, and these are on {', '.join(sorted(devices - self.DEVICES))}"
        supports = getattr(getattr(self, request.function), "__supports__", None)
        return supports(request) if supports else None
