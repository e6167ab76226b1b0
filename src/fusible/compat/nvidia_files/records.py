"""What a file of NVIDIA's package may name: for each name what stands for it here. Nothing of the package is loaded, and nothing of it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusible.errors import CheckpointError, expected
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
)
from fusible.tex import DType

__all__ = ["ATTRIBUTES", "DTYPE", "NamedFile", "QUANTIZERS", "StoredTensor", "TENSORS", "stand_ins"]

_PACKAGE = "transformer_engine.pytorch"
_TENSORS = f"{_PACKAGE}.tensor"
DTYPE = f"{_PACKAGE}.constants.DType"
"""The package's enumeration of types; older versions have it in their extension."""
_DTYPES = DTYPE, "transformer_engine_torch.DType", "transformer_engine_extensions.DType"
_BLOCK_FORMATS = "transformer_engine_torch.Float8BlockScaleTensorFormat", f"{_PACKAGE}.constants.Float8BlockScaleTensorFormat"
_RECORDS = "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling Format MMParams QParams _FormatHelper".split()

ATTRIBUTES = {"fp8_dtype": "dtype", "fp4_dtype": "dtype", "rowwise": "rowwise_usage", "columnwise": "columnwise_usage"}
"""The attributes of a quantizer that are not called as the constructor's arguments are."""
QUANTIZERS: dict[str, type[Any]] = {
    f"{_TENSORS}.float8_tensor.Float8CurrentScalingQuantizer": Float8CurrentScalingQuantizer,
    f"{_TENSORS}.float8_blockwise_tensor.Float8BlockQuantizer": Float8BlockQuantizer,
    f"{_TENSORS}.mxfp8_tensor.MXFP8Quantizer": MXFP8Quantizer,
    f"{_TENSORS}.nvfp4_tensor.NVFP4Quantizer": NVFP4Quantizer,
}


@dataclass(frozen=True)
class StoredTensor:
    """How files have a class of quantized tensors: as a call of the package's ``function`` in a ``module``, with these ``fields`` in their order.

    ``quantizer``: makes one for a tensor that brings none, of its type of elements.
    """

    kind: type[Any]
    module: str
    function: str
    fields: tuple[str, ...]
    quantizer: Callable[[DType], Any]

    def made(self, *arguments: Any) -> Any:
        """The tensor. Versions that have fewer fields leave the last ones out."""
        fields = dict(zip(self.fields, arguments, strict=False))
        data = next(each for name in ("data", "rowwise_data", "data_transpose", "columnwise_data") if (each := fields.get(name)) is not None)
        shape, dtype = fields.pop("shape", None), fields.pop("dtype")
        if _ordinal(fields.pop("data_format", None)):
            do = "load it by NVIDIA's package and save it anew"
            raise CheckpointError(expected("scales in the order that products read", of=f"a {self.kind.__name__}", got="the compact one", do=do))
        element = next(name for name in ("fp8_dtype", "fp4_dtype") if name in fields)
        fields[element] = DType(_ordinal(fields[element]))
        fields["quantizer"] = _quantizer(fields.get("quantizer")) or self.quantizer(fields[element])
        return self.kind(tuple(data.shape if shape is None else shape), dtype, **{**_ABSENT.get(self.kind, {}), **fields})


_WAYS = "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv"
_NVFP4 = (
    f"shape {_WAYS} amax_rowwise amax_columnwise fp4_dtype dtype quantizer with_gemm_swizzled_scales row_scaled_nvfp4 nvfp4_use_4over6 nvfp4_e4m3_max"
)
_ABSENT: dict[type, dict[str, Any]] = {MXFP8Tensor: {"with_gemm_swizzled_scales": False}, NVFP4Tensor: {"with_gemm_swizzled_scales": False}}
"""The fields that some versions lack, with what they mean."""


def _stored(kind: type[Any], file: str, fields: str, quantizer: Callable[[DType], Any]) -> StoredTensor:
    return StoredTensor(kind, f"{_TENSORS}.{file}_tensor", f"_make_{file}_tensor_in_reduce_ex", tuple(fields.split()), quantizer)


TENSORS = (
    _stored(Float8Tensor, "float8", "data fp8_dtype fp8_scale_inv dtype shape data_transpose", Float8CurrentScalingQuantizer),
    _stored(Float8BlockwiseQTensor, "float8_blockwise", f"shape {_WAYS} fp8_dtype dtype quantizer is_2D_scaled data_format", Float8BlockQuantizer),
    _stored(MXFP8Tensor, "mxfp8", f"{_WAYS} fp8_dtype dtype shape quantizer with_gemm_swizzled_scales", MXFP8Quantizer),
    _stored(NVFP4Tensor, "nvfp4", _NVFP4, lambda _: NVFP4Quantizer()),
)


class _Value:
    """An object that a file describes, by the arguments that it is made with or by its state."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.state = arguments[0] if len(arguments) == 1 else arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class NamedFile(_Value):
    """``io.BytesIO``."""

    @property
    def content(self) -> bytes:
        return self.state[0] if isinstance(self.state, tuple) else self.state


class _Enumerator(_Value):
    """A member of one of the package's enumerations, by its number."""


class _DType(_Enumerator):
    pass


class _BlockFormat(_Enumerator):
    """How the scales of FP8 in blocks are ordered, of which some versions know two: 0 is the one that products read."""


class _Record(_Value):
    """A recipe or a format of the package, of which nothing is read."""


def _ordinal(of: Any) -> int:
    state = of.state if isinstance(of, _Enumerator) else of
    return 0 if state is None else int(state[0] if isinstance(state, tuple) else state)


_QUANTIZER_OF: dict[type, type[Any]] = {type(cls.__name__, (_Value,), {}): cls for cls in QUANTIZERS.values()}
_TENSOR_OF: dict[type, StoredTensor] = {type(each.kind.__name__, (_Value,), {}): each for each in TENSORS}
_MAKE = {each.kind: partial(each.made) for each in TENSORS}
"""One function for a class, whichever of its names a file has: torch calls what it has been told of alone."""


def _quantizer(of: Any) -> Any:
    """The quantizer of the package's attributes; None where there is none."""
    if of is None or not isinstance(of.state, dict):
        return None
    cls, found = _QUANTIZER_OF[type(of)], of.state
    arguments: dict[str, Any] = {}
    for name in inspect.signature(cls).parameters:
        value = found.get(ATTRIBUTES.get(name, name))
        if name not in _OF_A_PROCESS and value is not None:
            arguments[name] = DType(_ordinal(value)) if name in ("fp8_dtype", "fp4_dtype") else value
    if "rht_matrix_random_sign_mask_t" in found:
        arguments["with_random_sign_mask"] = bool(found["rht_matrix_random_sign_mask_t"])
    return cls(**arguments)


_OF_A_PROCESS = frozenset({"with_amax_reduction", "amax_reduction_group", "device"})


def _attribute(of: Any, name: Any) -> Any:
    """``getattr``, for a member of an enumeration and for the function that makes a class of tensors, and for nothing else."""
    if of is _DType and name in DType.__members__:
        return _DType(int(DType[name]))
    if of is _BlockFormat and name in ("GEMM_READY", "COMPACT"):
        return _BlockFormat(int(name == "COMPACT"))
    if of is _Record and isinstance(name, str):
        return _Record()
    if of in _TENSOR_OF and name == "_make_in_reduce_ex":
        return _MAKE[_TENSOR_OF[of].kind]
    do = "use a checkpoint without it: nothing of it was run"
    raise CheckpointError(expected("members of enumerations", of="a file of Transformer Engine", got=f"an attribute {name!r}", do=do))


def stand_ins() -> list[Any]:
    """For ``torch.serialization.safe_globals``: what stands for a name, and the name."""
    found: list[Any] = [(NamedFile, "_io.BytesIO"), (_attribute, "builtins.getattr"), (_attribute, "__builtin__.getattr")]
    found += [(_DType, name) for name in _DTYPES] + [(_BlockFormat, name) for name in _BLOCK_FORMATS]
    found += [(_Record, f"transformer_engine.common.recipe.{name}") for name in _RECORDS]
    found += [(cls, name) for cls, name in zip(_QUANTIZER_OF, QUANTIZERS, strict=True)]
    for cls, each in _TENSOR_OF.items():
        before = f"{_PACKAGE}.{each.module.rpartition('.')[2]}"  # the module's name in versions 1.x
        found += [(_MAKE[each.kind], f"{each.module}.{each.function}"), (cls, f"{each.module}.{cls.__name__}"), (cls, f"{before}.{cls.__name__}")]
    return found
