"""The values that each annotation of nvte's functions allows."""

from __future__ import annotations

from typing import Any

from fusible.nvte.attention import AttentionAux, ScoreOptions, Sequences
from fusible.nvte.dtype import DType, QuantizedType
from fusible.nvte.execution import Pass
from fusible.nvte.flatten import STORAGES
from fusible.nvte.kv_cache import KVCache
from fusible.nvte.tensor import Tensor
from fusible.tex.calls.argument_kinds import Kind, kind_of

__all__ = ["EXACT", "KINDS"]


def _of(what: str, *classes: type) -> Kind:
    return Kind(what, lambda x: isinstance(x, classes))


_DATA = kind_of("Tensor")
assert _DATA is not None

_OWN = (AttentionAux, DType, KVCache, Pass, QuantizedType, ScoreOptions, Sequences, Tensor)
"""The classes that annotations name as they are."""

KINDS: dict[str, Any] = {
    **{cls.__name__: _of(f"an nvte.{cls.__name__}", cls) for cls in _OWN},
    "Data": _DATA,
    "Group": Kind("a process group, its name or None", lambda x: x is None or isinstance(x, str) or (hasattr(x, "size") and not hasattr(x, "dtype"))),
    "QuantizedTensorStorage": _of("a quantized tensor's storage", *STORAGES),
    "GroupedTensorStorage": _of("a grouped tensor's storage", *STORAGES),
    "Quantizer": kind_of("Quantizer"),
    "Type": _of("an nvte.DType or an nvte.QuantizedType", DType, QuantizedType),
}
KINDS["Weights"] = kind_of("Sequence[Tensor] | Tensor", KINDS)
"""By the names that annotations have."""

EXACT: dict[str, frozenset[type]] = {
    **{cls.__name__: frozenset({cls}) for cls in _OWN},
    "Type": frozenset({DType, QuantizedType}),
    "Weights": frozenset({Tensor}),
}
"""By annotation: the classes whose instances need no further look."""
