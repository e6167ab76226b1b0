"""Quantized tensors in checkpoints: plain tensors by name, and JSON. Nothing that is read is executed or unpickled."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, check_class, expected
from fusible.files import parse_json
from fusible.quantized.first_scale import FirstScale
from fusible.quantized.recipe import DelayedScaling
from fusible.tex import DType

__all__ = ["flatten_state_dict", "from_plain", "rebuild", "reduced", "register_saved", "to_plain", "unflatten_state_dict"]

_CLASSES: dict[str, type] = {}
"""The classes that a checkpoint may name: storages, tensors, quantizers."""

_ARGUMENTS = {"rowwise": "rowwise_usage", "columnwise": "columnwise_usage", "fp8_dtype": "dtype", "fp4_dtype": "dtype"}
"""The attributes of a quantizer that are not called as the constructor's arguments are."""

_OF_A_PROCESS = {"with_amax_reduction": False, "amax_reduction_group": None, "device": None}
"""What belongs to the process that quantizes, and is not saved."""


_FIRST = "first_scale_margin"
"""Of a quantizer whose scale follows from what is written until an iteration has observed it (``FirstScale``): its recipe's margin. A recipe's own
functions are not saved."""


def register_saved(*classes: type) -> None:
    """Let checkpoints name ``classes``: quantizers, or storages and quantized tensors that declare their fields as ``FieldStorage`` does.

    A quantizer is saved as its constructor's arguments, read from the attributes of the same names (``rowwise`` from ``rowwise_usage``,
    ``columnwise`` likewise, ``fp8_dtype`` and ``fp4_dtype`` from ``dtype``): numbers, strings, types, tensors and other quantizers.
    """
    for cls in classes:
        check_class(cls, "classes of register_saved")
        known = _CLASSES.get(cls.__name__, cls)
        if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            got = f"{cls.__module__}.{cls.__qualname__} after {known.__module__}.{known.__qualname__}"
            raise ArgumentError(expected("a new name", of="register_saved", got=got, do="rename the class: checkpoints name it"))
    _CLASSES.update({cls.__name__: cls for cls in classes})


def to_plain(x: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """``(tensors, header)`` of a quantized tensor or a bare storage: what it consists of by name, and what else makes it, fit for JSON.

    A quantizer is told by its options. One of delayed scaling is saved with its scale and amax as they are, and comes back with its own; an amax
    reduction group is not saved. Raises ``CheckpointError`` for a class that is not registered, and for a tensor whose data was taken out.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _header(x, "", tensors)


def from_plain(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> Any:
    """The quantized tensor or storage of ``to_plain``. Raises ``CheckpointError`` where tensors or header are not those of one."""
    try:
        made = _restored(header, "", tensors)
        # What is saved of it again is what was read: so no entry or tensor was left over, or taken for something that it only resembles.
        again, told = to_plain(made)
        if set(again) != set(tensors) or json.dumps(told, sort_keys=True) != json.dumps(header, sort_keys=True):
            got = "other entries: " + (", ".join(sorted(set(again) ^ set(tensors))) or "in the header")
            raise CheckpointError(expected("tensors and a header of to_plain", of="a quantized tensor", got=got, do="save it again"))
        return made
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(expected("tensors and a header of to_plain", of="a quantized tensor", got=got, do="save it again")) from error


def reduced(x: Any) -> tuple[str, dict[str, torch.Tensor], bool, bool]:
    """The arguments of ``rebuild`` for a quantized tensor."""
    tensors, header = to_plain(x)
    return json.dumps(header), tensors, bool(x.requires_grad), bool(getattr(x, "_is_param", False))


def rebuild(header: str, tensors: dict[str, torch.Tensor], requires_grad: bool, is_parameter: bool) -> Any:
    """A quantized tensor that ``torch.save`` wrote; allowed to ``torch.load(weights_only=True)`` where this package is imported."""
    x = from_plain(tensors, parse_json(header, of="a quantized tensor", do="save it again"))
    return torch.nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])


def flatten_state_dict(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """``(tensors, metadata)`` for ``safetensors.torch.save_file``: a quantized tensor ``w`` becomes ``w:rowwise_data`` and so on, and a JSON text
    under ``w`` in the metadata; every other tensor stays as it is.
    """
    flat: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in state.items():
        if not _is_storage(type(value)):
            flat[name] = value
            continue
        tensors, header = to_plain(value)
        metadata[name] = json.dumps(header)
        memories: set[int] = set()
        for part, tensor in tensors.items():
            # A safetensors file has no strides, and no two names for one memory.
            plain = tensor.detach().contiguous()
            flat[f"{name}:{part}"] = plain.clone() if plain.untyped_storage().data_ptr() in memories else plain
            memories.add(plain.untyped_storage().data_ptr())
    return flat, metadata


def unflatten_state_dict(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The state dict of ``flatten_state_dict``, of a file's tensors and its metadata; metadata of others is left alone."""
    state, taken = dict(tensors), {}
    for name, text in (metadata or {}).items():
        parts = {key.removeprefix(f"{name}:"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}:")}
        if not parts:
            continue
        taken[name] = from_plain(parts, parse_json(text, of=f"the metadata of {name}", do="save it again"))
        for part in parts:
            del state[f"{name}:{part}"]
    return {**state, **taken}


def _header(x: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    cls = type(x)
    if _CLASSES.get(cls.__name__) is not cls or not _is_storage(cls):
        raise CheckpointError(expected("a registered class", of="a quantized tensor to save", got=cls.__qualname__, do="dequantize it first"))
    fields = x.get_metadata()
    parts = {name: _header(fields[name], f"{prefix}{name}.", tensors) for name in x._PARTS if fields[name] is not None}
    mine = {f"{prefix}{name}": fields[name] for name in x._TENSORS if fields[name] is not None}
    if not mine and not parts:
        raise CheckpointError(expected("data", of=f"a {cls.__name__} to save", got="none", do="save it before it is cleared"))
    tensors.update(mine)
    return {
        "class": cls.__name__,
        "shape": list(x._saved_shape),
        "dtype": _encoded(x.dtype, "", tensors),
        "options": {name: _encoded(fields[name], "", tensors) for name in x._OPTIONS},
        "quantizer": None if fields["quantizer"] is None else _quantizer(fields["quantizer"], f"{prefix}quantizer.", tensors),
        "parts": parts,
    }


def _quantizer(quantizer: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    cls = type(quantizer)
    if _CLASSES.get(cls.__name__) is not cls:
        do = "register it by register_saved, or dequantize the tensor first"
        raise CheckpointError(expected("a quantizer of a registered class", of="a quantized tensor to save", got=cls.__qualname__, do=do))
    told: dict[str, Any] = {}
    for name in inspect.signature(cls).parameters:
        value = _OF_A_PROCESS[name] if name in _OF_A_PROCESS else getattr(quantizer, _ARGUMENTS.get(name, name))
        told[name] = _encoded(value, f"{prefix}{name}", tensors)
    others = {name: getattr(quantizer, name) for name in ("internal", "optimize_for_gemm") if name not in told}
    first = getattr(quantizer, "first_scale", None)
    others |= {_FIRST: first.recipe.margin} if first is not None else {}
    return {"class": cls.__name__, "arguments": told, "others": others, "usages": quantizer.get_usages()}


def _encoded(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON has it; a tensor is put among ``tensors``, without the memory around it."""
    if isinstance(value, DType):
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encoded(each, name, tensors) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().clone()
        return {"tensor": name}
    if type(value).__name__ in _CLASSES:
        return {"quantizer": _quantizer(value, f"{name}.", tensors)}
    do = "dequantize the tensor first"
    raise CheckpointError(expected("numbers, texts, types, tensors, quantizers", of="the options to save", got=type(value).__qualname__, do=do))


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, told), *_ = value.items()
    if kind == "dtype":
        found = getattr(torch, told)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(expected("a dtype", of="a quantized tensor", got=repr(told), do="save it again"))
        return found
    return tensors[told] if kind == "tensor" else _made_quantizer(told, tensors)


def _is_storage(cls: type) -> bool:
    return hasattr(cls, "_TENSORS")


def _class(name: str, storage: bool) -> Any:
    cls = _CLASSES.get(name)
    if cls is None or storage != _is_storage(cls):
        raise CheckpointError(expected(f"one of {', '.join(_CLASSES)}", of="the class of a quantized tensor", got=repr(name), do="register it"))
    return cls


def _made_quantizer(told: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    cls = _class(told["class"], False)
    made = cls(**{name: _decoded(value, tensors) for name, value in told["arguments"].items()})
    for name, value in told["others"].items():
        if name == _FIRST:
            made.first_scale = FirstScale(DelayedScaling(margin=value))  # type: ignore[attr-defined]
            continue
        if name not in ("internal", "optimize_for_gemm"):
            raise CheckpointError(expected("internal or optimize_for_gemm", of="a saved quantizer", got=repr(name), do="save it again"))
        setattr(made, name, bool(value))
    made.set_usage(**told["usages"])
    return made


def _restored(header: Mapping[str, Any], prefix: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    cls = _class(header["class"], True)
    fields: dict[str, Any] = {name: tensors.get(f"{prefix}{name}") for name in cls._TENSORS}
    for name in cls._PARTS:
        fields[name] = _restored(header["parts"][name], f"{prefix}{name}.", tensors) if name in header["parts"] else None
    if all(value is None for value in fields.values()):
        raise CheckpointError(expected("tensors", of=f"a {cls.__name__}", got="none of its names", do="save it again"))
    options = {name: header["options"][name] for name in cls._OPTIONS}
    fields |= {name: DType(value) if name in ("fp8_dtype", "fp4_dtype") else value for name, value in options.items()}
    fields["quantizer"] = None if header["quantizer"] is None else _made_quantizer(header["quantizer"], tensors)
    shape, dtype = tuple(header["shape"]), _decoded(header["dtype"], tensors)
    made: Any = cls(shape, dtype, **fields) if "shape" in inspect.signature(cls).parameters else cls(**fields, fake_dtype=dtype)
    wrong = made._check_buffers(shape)
    if wrong is not None:
        raise CheckpointError(expected(f"the buffers of {list(shape)}", of=f"a {cls.__name__}", got=wrong, do="save it again"))
    return made
