"""``export_onnx``: a model as an ONNX file, whose weights in 8 or 4 bits are read by ``DequantizeLinear``."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, check_path, check_switch, expected
from fusible.files import Replacement, make_folder, put, replace_file
from fusible.models.exporting.program import checked_inputs, export_program
from fusible.models.text.libraries import library
from fusible.pytorch.lowering import as_operators

__all__ = ["export_onnx"]

_LEAST, _OF_4_BITS, _LATEST = 21, 23, 24
_LARGE = 1 << 30
"""Bytes of weights from which they lie in a file of their own: one message of protobuf has 2 GiB at most."""
_ALIGNED, _SMALL = 4096, 1024


def export_onnx(
    model: nn.Module,
    path: str | PathLike[str],
    *inputs: torch.Tensor,
    opset: int = 23,
    dynamic_shapes: Sequence[Mapping[int, Any] | None] | None = None,
    external_data: bool | None = None,
) -> None:
    """Write the inference of ``model`` to ``path`` as ONNX: what ``export_program`` makes of it, in the operators of ``opset``, from 21 on.

    Weights in FP8 are tensors of 8-bit floats, read by ``DequantizeLinear`` with a scale for each, or with ``block_size`` for each block (FP8 blocks,
    MXFP8); those of NVFP4 have 4 bits (from opset 23 on), and a second ``DequantizeLinear`` for their scales. Where a recipe quantizes activations,
    ``QuantizeLinear`` stands before. Without ``external_data``, weights of 1 GiB and more lie in ``path`` with ``.data`` behind its name.

    Raises what ``export_program`` raises, ``MissingModuleError`` where onnxscript is not installed, and ``FileError`` where the file cannot be
    written.
    """
    check_path(path, "path of export_onnx")
    check_switch(external_data, "external_data of export_onnx", optional=True)
    if not isinstance(opset, int) or isinstance(opset, bool) or not _LEAST <= opset <= _LATEST:
        raise ArgumentError(expected(f"from {_LEAST} to {_LATEST}", of="the opset of an ONNX file", got=repr(opset), do="choose one of these"))
    checked_inputs(model, inputs)
    library("onnxscript", "onnx")
    with as_operators():
        program = export_program(model, *inputs, dynamic_shapes=dynamic_shapes)
    if opset < _OF_4_BITS and any(tensor.dtype is torch.float4_e2m1fn_x2 for tensor in (*program.buffers(), *program.constants.values())):
        do = "choose a later one, or another format"
        raise ArgumentError(expected(f"{_OF_4_BITS} for weights in 4 bits", of="the opset of an ONNX file", got=opset, do=do))
    made = _translated(program, opset)
    _name(made.graph, _parameters(model))
    _write(Path(path), made, external_data)


def _translated(program: Any, opset: int) -> Any:
    """The model in the intermediate form of the package onnx_ir."""
    optimizer = library("onnxscript", "onnx", "onnxscript.optimizer")
    with _quiet():
        # Without torch's optimization: it fuses rotary positions in a way that onnxruntime refuses. Constants are folded below.
        options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False}
        made = torch.onnx.export(program, opset_version=opset, custom_translation_table=_translations(opset), **options)
        assert made is not None
        optimizer.optimize_ir(made.model)
    for one in (*made.model.graph.all_nodes(), *(value for node in made.model.graph.all_nodes() for value in node.outputs)):
        one.metadata_props.clear()  # the exporter notes at each the lines of source that it came from
    return made.model


def _translations(opset: int) -> dict[Any, Any]:
    """By torch's operator the function that writes it in ONNX's of an opset."""
    op = getattr(library("onnxscript", "onnx"), f"opset{opset}")

    def dequantize(codes: Any, scale: Any, block: int) -> Any:
        return op.DequantizeLinear(codes, scale, axis=-1, block_size=block) if block else op.DequantizeLinear(codes, scale)

    def quantize(x: Any, scale: Any, dtype: int) -> Any:
        return op.QuantizeLinear(x, scale, output_dtype=dtype)

    def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float = 0.0) -> Any:
        return op.RMSNormalization(x, weight, axis=-len(shape), epsilon=eps)

    functions: dict[Any, Any] = {torch.ops.fusible.dequantize.default: dequantize, torch.ops.fusible.quantize.default: quantize}
    return functions | ({torch.ops.aten.rms_norm.default: rms_norm} if hasattr(op, "RMSNormalization") else {})


def _parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of the model's ``forward``."""
    return [name for name in inspect.signature(getattr(type(model), "original", type(model)).forward).parameters if name != "self"]


def _name(graph: Any, names: Sequence[str]) -> None:
    """Call the inputs by ``names``, the only output of tokens ``logits``, and their dimensions ``batch`` and ``sequence``."""
    for value, name in zip(graph.inputs, names, strict=False):
        value.name = name
    first = graph.inputs[0]
    if not first.dtype.is_integer() or len(first.shape) != 2:
        return
    if len(graph.outputs) == 1:
        graph.outputs[0].name = "logits"
    own = {str(dim): name for dim, name in zip(first.shape, ("batch", "sequence"), strict=True) if not isinstance(dim, int)}
    values = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *values):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else re.sub(r"\w+", lambda word: own.get(word[0], word[0]), str(dim.value)) for dim in value.shape]
            value.shape = type(value.shape)(dims)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter tells of itself."""
    logger = logging.getLogger("torch.onnx")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(former)


def _write(path: Path, model: Any, external: bool | None) -> None:
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    serialized = library("onnx_ir", "onnx").serde.serialize_model
    if not external and (external is not None or sum(weight.nbytes for weight in weights.values()) < _LARGE):
        make_folder(path.parent)
        replace_file(path, serialized(model).SerializeToString())
        return
    replacement = Replacement(path.parent, path.name)
    try:
        _put_aside(replacement, f"{path.name}.data", model, weights)
        replacement.complete({path.name: serialized(model).SerializeToString()})
    except BaseException:
        replacement.abandon()
        raise


def _put_aside(replacement: Replacement, name: str, model: Any, weights: Mapping[str, Any]) -> None:
    """Write weights to a file of their own, to which the model then points. Small ones stay: runtimes look for shapes in the model."""
    kind, offset = library("onnx_ir", "onnx").ExternalTensor, 0
    with replacement.file(name) as stream:
        for own, weight in ((own, weight) for own, weight in weights.items() if weight.nbytes > _SMALL):
            put(stream, bytes(-offset % _ALIGNED))
            offset += -offset % _ALIGNED
            put(stream, weight.tobytes())
            model.graph.initializers[own].const_value = kind(name, offset, weight.nbytes, weight.dtype, shape=weight.shape, name=own)
            offset += weight.nbytes
