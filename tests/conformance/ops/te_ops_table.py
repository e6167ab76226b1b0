"""The table of the basic operations of ``fusible.pytorch.ops``: how to make each, and what it computes. References are those of ``ops_table``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ops_table
import torch
from torch import Tensor

from fusible.pytorch import ops
from fusible.pytorch.ops import FusibleOperation

__all__ = ["ELSEWHERE", "OUT", "TE_TABLE", "TeRecord"]

OUT = 64
ELSEWHERE = frozenset({"AllGather", "AllReduce", "GroupedLinear", "ReduceScatter", "ScaledTanhSReLU"})
"""Operations that tests of their own drive, as they need expert groups, several processes or plain torch; so do tensor-parallel
linears."""


@dataclass(frozen=True)
class TeRecord:
    """``reference(x, values)``: what the operation gives for ``x [rows, in]``; ``values`` has its parameters and extra inputs by name.

    ``extras``: its extra inputs; ``"scales"`` has a value per row, any other the shape of x. ``extra_output``: it gives its input as an extra output.
    ``length``: the longest sum, beside the number of rows. ``roundings``: values of the activations' type that a result passes through. ``asks``: it
    asks for quantized operands itself; then a reference without roundings says nothing of it under a recipe.
    """

    name: str
    make: Callable[[int, torch.dtype], FusibleOperation] = field(repr=False)
    reference: Callable[[Tensor, Mapping[str, Tensor]], Tensor] = field(repr=False)
    width: int = 64
    extras: Sequence[str] = ()
    extra_output: bool = False
    length: int = 1
    roundings: int = 1
    asks: bool = False


TE_TABLE: dict[str, TeRecord] = {}


def _enter(name: str, make: Callable[[int, torch.dtype], FusibleOperation], reference: Callable[..., Tensor], **rest: Any) -> None:
    assert name not in TE_TABLE
    TE_TABLE[name] = TeRecord(name, make, reference, **rest)


def _shared(name: str) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """The reference of ``ops_table``, which calls per-row scales ``3.scales``."""
    if name in ops_table.SIDED:
        return lambda x, values: ops_table.SIDED[name].reference(x, {"3.scales": values["scales"]}, ())
    return lambda x, values: ops_table.TABLE[name].reference(x, values, ())


_ACTIVATIONS = "GELU ErfGELU GLU QGELU ReGLU ReLU SReGLU SReLU SiLU SwiGLU SiTUGLU ClampedSwiGLU".split()
_GEGLUS = {"GEGLU": "GeGLU", "ErfGEGLU": "ErfGeGLU", "QGEGLU": "QGeGLU"}
for _name, _known in {**dict(zip(_ACTIVATIONS, _ACTIVATIONS, strict=True)), **_GEGLUS}.items():
    _enter(_name, lambda w, d, n=_name: getattr(ops, n)(), _shared(_known))
for _name in ("ScaledSReLU", "ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"):
    _enter(_name, lambda w, d, n=_name: getattr(ops, n)(), _shared(_name), extras=("scales",), length=64)
_OPTIONS = {"SwiGLU": {}, "SiTUGLU": ops_table._SITU, "ClampedSwiGLU": ops_table._CLAMP}
for (_name, _options), _scaled in zip(_OPTIONS.items(), ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"), strict=True):
    _how = {"glu_interleave_size": 3, **_options}
    _enter(f"{_name}-blocks of 3", lambda w, d, n=_name, o=_how: getattr(ops, n)(**o), _shared(f"{_name}-blocks of 3"), width=192)
    _made = f"{_scaled}-blocks of 3"
    _enter(_made, lambda w, d, n=_scaled, o=_how: getattr(ops, n)(**o), _shared(_made), width=192, extras=("scales",), length=192)

for _zero in (False, True):
    _suffix, _norm = ("-zero_centered_gamma", {"zero_centered_gamma": True}) if _zero else ("", {})
    for _name in ("LayerNorm", "RMSNorm"):
        _enter(
            _name + _suffix,
            lambda w, d, n=_name, o=_norm: getattr(ops, n)(w, eps=1e-3, dtype=d, **o),
            _shared(_name + _suffix),
            length=64,
        )
_enter("L2Normalization", lambda w, d: ops.L2Normalization(), _shared("L2Normalization"), length=64)
_enter("L2Normalization-eps", lambda w, d: ops.L2Normalization(eps=0.5), _shared("L2Normalization-eps"), length=64)
_enter("ConstantScale", lambda w, d: ops.ConstantScale(-0.3), _shared("ConstantScale"))
_enter("Identity", lambda w, d: ops.Identity(), _shared("Identity"))
_enter("Reshape", lambda w, d: ops.Reshape((-1, w)), _shared("Identity"))
_enter("Dropout-off", lambda w, d: ops.Dropout(0.0), _shared("Dropout-off"))
for _in_place in (False, True):
    _suffix = "-in_place" if _in_place else ""
    _enter(
        f"AddExtraInput{_suffix}", lambda w, d, p=_in_place: ops.AddExtraInput(in_place=p), lambda x, values: x + values["extra"], extras=("extra",)
    )
    _enter(f"MakeExtraOutput{_suffix}", lambda w, d, p=_in_place: ops.MakeExtraOutput(in_place=p), _shared("Identity"), extra_output=True)
_enter("Bias", lambda w, d: ops.Bias(w, dtype=d), _shared("Add"))
_enter("BasicLinear", lambda w, d: ops.BasicLinear(w, OUT, dtype=d), _shared("MMT"), length=64, asks=True)
_enter("Linear", lambda w, d: ops.Linear(w, OUT, dtype=d), _shared("Linear"), length=64, roundings=2, asks=True)
_enter("Linear-without bias", lambda w, d: ops.Linear(w, OUT, bias=False, dtype=d), _shared("MMT"), length=64, asks=True)
for _forward in (False, True):
    for _backward in (False, True):
        _enter(
            f"Quantize-{_forward}-{_backward}",
            lambda w, d, f=_forward, b=_backward: ops.Quantize(forward=f, backward=b),
            _shared("Identity"),
            asks=_forward or _backward,
        )
