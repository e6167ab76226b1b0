"""What the annotations of nvte's functions stand for: of each, which values it allows."""

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


_TENSOR = _of("an nvte.Tensor", Tensor)
_DATA = kind_of("Tensor")
assert _DATA is not None

KINDS: dict[str, Any] = {
    "AttentionAux": _of("an nvte.AttentionAux", AttentionAux),
    "DType": _of("an nvte.DType", DType),
    "Data": _DATA,
    "KVCache": _of("an nvte.KVCache", KVCache),
    "Group": Kind("a process group or None", lambda x: x is None or (hasattr(x, "size") and not hasattr(x, "dtype"))),
    "Pass": _of("an nvte.Pass", Pass),
    "QuantizedTensorStorage": _of("a quantized tensor's storage", *STORAGES),
    "GroupedTensorStorage": _of("a grouped tensor's storage", *STORAGES),
    "Quantizer": kind_of("Quantizer"),
    "QuantizedType": _of("an nvte.QuantizedType", QuantizedType),
    "ScoreOptions": _of("an nvte.ScoreOptions", ScoreOptions),
    "Sequences": _of("an nvte.Sequences", Sequences),
    "Tensor": _TENSOR,
    "Type": _of("an nvte.DType or an nvte.QuantizedType", DType, QuantizedType),
}
KINDS["Weights"] = kind_of("Sequence[Tensor] | Tensor", KINDS)
"""By the names that annotations have."""

EXACT: dict[str, frozenset[type]] = {
    "AttentionAux": frozenset({AttentionAux}),
    "DType": frozenset({DType}),
    "KVCache": frozenset({KVCache}),
    "Pass": frozenset({Pass}),
    "QuantizedType": frozenset({QuantizedType}),
    "ScoreOptions": frozenset({ScoreOptions}),
    "Sequences": frozenset({Sequences}),
    "Tensor": frozenset({Tensor}),
    "Type": frozenset({DType, QuantizedType}),
    "Weights": frozenset({Tensor}),
}
"""Classes of which a look says it all."""
