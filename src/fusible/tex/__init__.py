"""tex: the one door to kernels.

The ``transformer_engine_torch`` interface, served by interchangeable backends that are chosen per call: ``tex.gelu(x, None)`` goes to the best
backend that serves it; ``tex.explain("gelu", x, None)`` says which and why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusible.tex import backends, classes, enums, grouped_mlp_experimental, prim
from fusible.tex.classes import *
from fusible.tex.enums import *
from fusible.tex.factories import build_quantized, register_factory
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request, function, requires
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.operands import register_kind
from fusible.tex.registry import Decision, registry
from fusible.tex.selection.dispatch import Call, dispatcher, explain, hand_over, record
from fusible.tex.selection.extend import declare, implement, undeclare, unimplement
from fusible.tex.selection.implementations import BackendImplKind, BackendPriority, OpImpl
from fusible.tex.selection.management import coverage, get_backend, get_policy, list_backends, register_backend, set_backend, set_policy
from fusible.tex.selection.policy import Policy
from fusible.tex.selection.taping import RecordedCall, listening

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]:
        """The functions are made from their declarations below; type checkers see them as callables."""
        ...


tex = sys.modules[__name__]
"""The module itself, so that ``from transformer_engine_fl_torch import *`` brings ``tex.gelu`` as well as ``gelu``."""

_FUNCTIONS = sorted(name for name in DECLARATIONS if not name.startswith("prim_"))
globals().update({name: dispatcher(DECLARATIONS[name]) for name in _FUNCTIONS})

__all__ = [
    "BackendImplKind",
    "BackendPriority",
    "Call",
    "Decision",
    "OpImpl",
    "Policy",
    "RecordedCall",
    "Request",
    "SpecializedCall",
    "TEXBackendBase",
    "backends",
    "build_quantized",
    "coverage",
    "declare",
    "explain",
    "function",
    "get_backend",
    "get_policy",
    "grouped_mlp_experimental",
    "hand_over",
    "implement",
    "list_backends",
    "listening",
    "prim",
    "record",
    "register_backend",
    "register_factory",
    "register_kind",
    "registry",
    "requires",
    "set_backend",
    "set_policy",
    "specialized_by",
    "tex",
    "undeclare",
    "unimplement",
]
__all__ += [*classes.__all__, *enums.__all__, *_FUNCTIONS]
__all__.sort()  # pyright: ignore[reportUnsupportedDunderAll]
