"""What was wrong with a call that failed: its arguments, held against the declaration.

A call that succeeds costs nothing for this. When a backend's method raises, dispatch asks ``examine`` whether an argument is not what the
declaration says; if so, the user gets that sentence, with the method's own error as its cause, and otherwise the error as it came. So a declaration
may say what the kernels do not look at, and no good call is refused by one; and a kernel's own failure stays its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, FusibleError, NotServedError, ShapeError, expected, subject, with_owner
from fusible.tex import enums
from fusible.tex.calls.argument_kinds import kind_of, shown
from fusible.tex.calls.argument_relations import unrelated
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.calls.index_relations import wrong_indices
from fusible.tex.calls.memory_checks import overlaps_itself
from fusible.tex.formats import is_quantized
from fusible.tex.interface.declare import Declaration
from fusible.tex.interface.layouts import LayoutOf, layout_of_text
from fusible.tex.operands import not_dense
from fusible.tex.protocol import to_torch

__all__ = ["blame", "check_before", "check_length", "check_sorts", "examine"]

_BUFFERS = ("scale", "amax", "_data", "_rowwise_data", "_columnwise_data", "rowwise_data", "columnwise_data")
"""Where quantizers, quantized tensors and grouped ones hold tensors."""
_NOT_THE_ARGUMENTS = (MemoryError, RecursionError, ImportError)
"""Errors that no argument explains."""


def blame(declaration: Declaration, error: Exception, arguments: Mapping[str, Any]) -> None:
    """Raise a better error than ``error`` where one is found: one that says which argument is wrong, or at least names the function."""
    if isinstance(error, _NOT_THE_ARGUMENTS) or (isinstance(error, NotServedError) and declaration.unserved):
        return
    name = declaration.name.removeprefix("prim_")
    named = _named(declaration, arguments)
    ours = isinstance(error, ArgumentError | DTypeError | NotServedError)
    if ours and error.argument in named and name in _words(str(error)):
        return  # it was found by holding this call against its declaration
    if isinstance(error, ArgumentError):
        found = wrong_indices(name, named)
        if found is not None:
            _name_function(found, name, named)
            raise found from error
    if ours:
        _name_function(error, name, named)
    said = ours and not _words(subject(str(error))).isdisjoint(named)
    wrong = examine(declaration, named, classes_alone=said or isinstance(error, NotServedError))
    if wrong is None and not ours and "meta tensor" in str(error):
        wrong = _without_data(named, name)
    if wrong is None and not ours and "single memory location" in str(error):
        wrong = _overlapping(named, name)
    if wrong is None and not ours and "overflow" in str(error):
        wrong = _too_large(named, name)
    if wrong is not None and not (ours and {name, wrong.argument} <= _words(str(error))):
        raise wrong from error


def check_sorts(declaration: Declaration, arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that is of another class or dtype than ``declaration`` says, or on meta beside others that have data.

    All of this follows from the arguments' kinds and sorts (``fusible.tex.operands``), so that dispatch asks once for each combination of these. A
    list whose sort is its class is looked at no further: another of that sort may hold something else.
    """
    arguments = {name: value for name, value in arguments.items() if not _a_list_beside(declaration, name, value)}
    wrong = examine(declaration, arguments, classes_alone=True)
    if wrong is not None:
        raise wrong
    of, named = declaration.name.removeprefix("prim_"), _named(declaration, arguments)
    # torch writes nothing, and says nothing, where one operand of a sum in place has no data
    wrong = _of_dtypes(declaration, named, of) or (_without_data(named, of) if _some_without_data(named) else None)
    if wrong is not None:
        raise wrong


def _a_list_beside(declaration: Declaration, name: str, value: Any) -> bool:
    """Whether an argument is a list, as declared, and decides nothing."""
    if type(value) not in (list, tuple) or name in declaration.asks:
        return False
    said = kind_of(declaration.signature.parameters[name].annotation)
    return said is None or said.wrong([], name) is None


def check_length(declaration: Declaration, argument: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``ShapeError`` unless ``argument`` is a vector of the length that is declared by itself."""
    of, named = declaration.name.removeprefix("prim_"), _named(declaration, arguments)
    wrong = _of_shape(layout_of_text(declaration.where[argument]), named[argument], argument, of, {}, named)
    if wrong is not None:
        raise wrong


def check_before(declaration: Declaration, arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that is not what the declaration says: for functions that would have written to another one by then.

    No values are looked at but those of single integers, so what passed once passes again, at a tenth of the cost.
    """
    try:
        seen = declaration.name, tuple([_seen(value) for value in arguments.values()])
    except _LookedAtAnew:
        seen = None
    if seen in _PASSED:
        return
    wrong = examine(declaration, arguments)
    if wrong is not None:
        raise wrong
    if seen is not None:
        if len(_PASSED) >= _MANY:
            _PASSED.clear()
        _PASSED.add(seen)


class _LookedAtAnew(Exception):
    """An argument holds more than ``_seen`` tells."""


_MANY = 1024
_PASSED: set[tuple[str, tuple[Any, ...]]] = set()
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, *(cls for cls in vars(enums).values() if isinstance(cls, type))})


def _seen(value: Any) -> tuple[Any, ...]:
    """All of an argument that an examination asks for."""
    kind = type(value)
    if kind in _TENSORS and (value.is_floating_point() or value.numel() != 1):
        return value.dtype, value.shape, value.device, value.layout
    if kind in _VALUES:
        return kind, value
    if kind is list or kind is tuple:
        return kind, *[_seen(item) for item in value]
    raise _LookedAtAnew


def examine(declaration: Declaration, arguments: Mapping[str, Any], *, classes_alone: bool = False) -> FusibleError | None:
    """The error of the first argument that is not what ``declaration`` says, or None.

    Classes are looked at first, then memory layouts, devices, and the declared dtypes and shapes.
    """
    wrong = _examine(declaration, arguments, classes_alone)
    if wrong is not None:
        named = _named(declaration, arguments)
        wrong.argument = next(word for word in re.findall(r"\w+", subject(str(wrong))) if word in named)
    return wrong


def _examine(declaration: Declaration, arguments: Mapping[str, Any], classes_alone: bool) -> FusibleError | None:
    of = declaration.name.removeprefix("prim_")
    parameters = declaration.signature.parameters
    named = _named(declaration, arguments)
    for name, value in named.items():
        said = kind_of(parameters[name].annotation) if name in parameters else None
        found = said.wrong(value, name) if said is not None else None
        if found is not None:
            return found.error(of)
    if classes_alone:
        return None
    tensors = [(place, x) for name, value in named.items() for place, x in _tensors(name, value)]
    return _of_layouts(tensors, of) or _of_devices(tensors, of) or _of_shapes(declaration, named, of) or _of_relations(declaration, named, of)


def _named(declaration: Declaration, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, those that a function takes by ``**`` among them."""
    parameters, named = declaration.signature.parameters, dict[str, Any]()
    for name, value in arguments.items():
        kind = parameters[name].kind if name in parameters else inspect.Parameter.KEYWORD_ONLY
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


def _too_large(named: Mapping[str, Any], of: str) -> FusibleError | None:
    """Of a call whose sizes multiply to more than 64 bits hold: the argument that has them."""
    name = next((name for name in ("shape", "shapes") if name in named), None)
    if name is None:
        return None
    wanted, do = "sizes whose product is below 2^63 bytes", "pass the sizes of a tensor that memory holds"
    error = ShapeError(expected(wanted, of=f"{name} of {of}", got=str(list(named[name])), do=do))
    error.argument = name
    return error


def _some_without_data(named: Mapping[str, Any]) -> bool:
    """Whether some of the tensors are on meta and others are not."""
    devices = {x.device.type for name, value in named.items() for _, x in _tensors(name, value)}
    return len(devices) > 1 and "meta" in devices


def _of_dtypes(declaration: Declaration, named: Mapping[str, Any], of: str) -> FusibleError | None:
    """Which of the arguments whose layout is declared is of another dtype, or has an item that is."""
    dtypes: dict[str, torch.dtype | None] = {}
    for name, text in declaration.where.items():
        if named.get(name) is not None:
            dtypes = dtypes or {name: _dtype(value) for name, value in named.items()}
            wrong = _of_dtype(layout_of_text(text), named[name], name, of, dtypes)
            if wrong is not None:
                return wrong
    return None


def _of_dtype(layout: LayoutOf, x: Any, place: str, of: str, dtypes: Mapping[str, torch.dtype | None]) -> FusibleError | None:
    if isinstance(x, list | tuple):
        found = (_of_dtype(layout, item, f"{place}[{i}]", of, dtypes) for i, item in enumerate(x))
        return next((wrong for wrong in found if wrong is not None), None)
    if is_quantized(x) or is_grouped(x) or not hasattr(x, "shape"):  # the shape of one of NVIDIA's may warn
        return None
    wanted = layout.wrong_dtype(_dtype(x), dtypes)
    return DTypeError(expected(wanted, of=f"{place} of {of}", got=shown(x), do="pass such a tensor")) if wanted else None


def _overlapping(named: Mapping[str, Any], of: str) -> FusibleError | None:
    """Of a call that would have written to a tensor whose elements share memory: which that is."""
    place = next((place for name, value in named.items() for place, x in _tensors(name, value) if overlaps_itself(x)), None)
    if place is None:
        return None
    wanted = "memory of its own for each element"
    error = ArgumentError(expected(wanted, of=f"{place} of {of}", got="a tensor that overlaps itself", do="pass x.clone()"))
    error.argument = re.split(r"\W", place)[0]
    return error


def _without_data(named: Mapping[str, Any], of: str) -> FusibleError | None:
    place = next((place for name, value in named.items() for place, x in _tensors(name, value) if x.device.type == "meta"), None)
    if place is None:
        return None
    return ArgumentError(expected("a tensor with data", of=f"{place} of {of}", got="one on meta", do="make it on another device"))


def _tensors(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The torch tensors of an argument, and where each is; of a quantizer, those that it reads and writes."""
    if isinstance(value, torch.Tensor) and not is_quantized(value) and not is_grouped(value):
        yield place, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{place}[{i}]", item)
    elif hasattr(value, "rowwise_usage") or is_quantized(value) or is_grouped(value):
        for attribute in _BUFFERS:
            yield from _tensors(f"{place}.{attribute}", getattr(value, attribute, None))


def _of_layouts(tensors: Sequence[tuple[str, torch.Tensor]], of: str) -> FusibleError | None:
    for place, x in tensors:
        if x.layout is not torch.strided:
            return not_dense(x, f"{place} of {of}")
    return None


def _of_devices(tensors: Sequence[tuple[str, torch.Tensor]], of: str) -> FusibleError | None:
    """Which tensor lies elsewhere than most do; of equally many, the later one."""
    devices = [x.device for _, x in tensors]
    if len(set(devices)) < 2:
        return None
    usual = max(devices, key=devices.count)
    place, x = next((place, x) for place, x in tensors if x.device != usual)
    return ArgumentError(expected(f"a tensor on {usual}", of=f"{place} of {of}", got=f"one on {x.device}", do="move it there"))


def _of_shapes(declaration: Declaration, named: Mapping[str, Any], of: str) -> FusibleError | None:
    sizes: dict[str, int] = {}
    of_items: dict[int, dict[str, int]] = {}
    for name, text in declaration.where.items():
        value, layout = named.get(name), layout_of_text(text)
        if value is None:
            continue
        if layout.count is None:
            wrong = _of_shape(layout, value, name, of, sizes, named)
            if wrong is not None:
                return wrong
            continue
        if not isinstance(value, list | tuple):
            continue
        length = int(layout.count) if layout.count.isdigit() else sizes.setdefault(layout.count, len(value))
        if length != len(value):
            wanted = f"a list of {length}"
            return ArgumentError(expected(wanted, of=f"{name} of {of}", got=f"{len(value)}", do="pass lists of equal length"))
        for i, item in enumerate(value):
            wrong = _of_shape(layout, item, f"{name}[{i}]", of, of_items.setdefault(i, {}), named)
            if wrong is not None:
                return wrong
    return None


def _of_relations(declaration: Declaration, named: Mapping[str, Any], of: str) -> FusibleError | None:
    return unrelated(declaration.name, named, of) if len(named) == len(declaration.signature.parameters) else None


def _of_shape(layout: LayoutOf, x: Any, place: str, of: str, sizes: dict[str, int], named: Mapping[str, Any]) -> FusibleError | None:
    if isinstance(x, list | tuple):
        return next((wrong for i, item in enumerate(x) if (wrong := _of_shape(layout, item, f"{place}[{i}]", of, {}, named))), None)
    if is_quantized(x) or is_grouped(x) or not hasattr(x, "shape"):  # the shape of one of NVIDIA's may warn
        return None
    wrong_dtype = _of_dtype(layout, x, place, of, {name: _dtype(value) for name, value in named.items()})
    if wrong_dtype is not None:
        return wrong_dtype
    numbers = {name: value for name, value in named.items() if type(value) is int}
    wanted = layout.wrong_shape(tuple(x.shape), sizes, numbers)
    got, do = list(x.shape), "pass a tensor of that shape"
    return ShapeError(expected(f"shape {wanted}", of=f"{place} of {of}", got=got, do=do)) if wanted else None


def _dtype(x: Any) -> torch.dtype | None:
    try:
        return to_torch(x.dtype) if hasattr(x, "dtype") and not is_quantized(x) else None
    except DTypeError:
        return getattr(x, "dtype", None)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


_OF_KERNELS = {
    "a dtype": ("otype", "dtype", "output_dtype", "D_type", "fake_dtype"),
    "a grouped tensor": ("first_dims",),
    "a quantizer": ("quantizer", "o_quantizer"),
    "a tensor to quantize[a-zA-Z0-9 ]*": ("tensor", "input", "tensor_list", "inp", "shape"),
    "addend": ("D",),
    "amax": ("partial_amax_list",),
    "an FP8 format": ("fp8_dtype", "dtype", "out_dtype"),
    "an alignment": ("alignments",),
    "bias_grad": ("bias",),
    "block scales": ("scale_tensors", "tensors", "tensor"),
    "cached_lengths": ("cu_cached_lens",),
    "copies": ("tensor_lists",),
    "dst": ("out", "otype"),
    "dst_columns": ("output", "quantizer"),
    "exponents": ("input", "output", "A", "B"),
    "exponents_columns": ("output", "quantizer"),
    "extra_logits": ("SoftmaxOffset",),
    "first": ("tensor_lists",),
    "first_scales": ("tensor_lists",),
    "flag": ("noop_flag",),
    "freqs": ("q_freqs",),
    "grad": ("dO", "output_grad_", "output_grads_"),
    "gradients": ("tensor_lists",),
    "grads": ("output_grads_", "output_grad_"),
    "inputs": ("tensor_lists",),
    "left": ("B",),
    "left_scale": ("B",),
    "left_scales": ("B",),
    "lengths_kv": ("cu_seqlens_kv",),
    "lengths_q": ("cu_seqlens_q",),
    "master_scales": ("tensor_lists",),
    "masters": ("tensor_lists",),
    "momenta": ("tensor_lists",),
    "new_lengths": ("cu_new_lens",),
    "out": ("O", "out_list", "columnwise_data_list"),
    "outputs": ("tensor_lists",),
    "pre_gelu": ("gelu_in", "pre_gelu_out"),
    "q": ("Q",),
    "results": ("softmax_results_",),
    "right": ("A",),
    "right_scale": ("A",),
    "right_scales": ("A",),
    "rng_state": ("rng_gen", "Aux_CTX_Tensors"),
    "rows_padded": ("rows_padded_list",),
    "scale": ("scale_list",),
    "scale_inv": ("input", "tensor", "tensor_list"),
    "scale_bytes": ("input", "output", "A", "B"),
    "scale_inv_columns": ("output", "quantizer"),
    "second": ("tensor_lists",),
    "second_scales": ("tensor_lists",),
    "src": ("input", "tensor", "output_grads"),
    "starts_kv": ("cu_seqlens_kv_padded",),
    "starts_q": ("cu_seqlens_q_padded",),
    "stats": ("Aux_CTX_Tensors",),
    "table": ("page_table",),
    "tensors": ("tensor_lists",),
    "the given output": ("out", "ln_out", "output", "D", "grad_input"),
    "the input": ("input", "input_2h", "output_grads"),
    "the slice by start_offset": ("start_offset", "start_offset_list"),
    "tile_rows and tile_cols": ("tile_rows_list",),
    "transform": ("quantizer",),
    "weights": ("tensor_lists",),
    "Bias": ("bias",),
}
"""What code that serves several functions calls an argument in its sentences, and what these functions call it."""


def _name_function(error: FusibleError, name: str, parameters: Mapping[str, Any]) -> None:
    """Let the sentence of an error say of which function it speaks, and by its own name for the argument."""
    text = str(error)
    if not subject(text):
        return
    if name not in _words(text):
        text = with_owner(text, name)
    if _words(subject(text)).isdisjoint(parameters):
        for general, own in _OF_KERNELS.items():
            known = next((argument for argument in own if argument in parameters), None)
            if known is not None:
                text = re.sub(rf"\b{general}(?=: expected | of |, the )", known, text, count=1)
    error.args = (text, *error.args[1:])
