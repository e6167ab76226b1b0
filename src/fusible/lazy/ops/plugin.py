"""Calls of functions that the user registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, FusibleError, expected
from fusible.lazy.dtypes import BY_NUMPY, check_dtype, dtype
from fusible.lazy.engine.plugins import full_name, plugin_named
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir import ops as flat
from fusible.lazy.frontend import TensorLike, as_shape, as_tensor, located, record_all
from fusible.lazy.locate import pointing
from fusible.lazy.printing import Shape
from fusible.lazy.trace import TraceOp, TraceTensor

__all__ = ["Plugin", "attribute_text", "plugin"]

Types = tuple[tuple[Shape, dtype], ...]


class Plugin(TraceOp):
    """A call of the handler registered as ``target``. ``attributes`` are pairs of a name and an MLIR attribute as text."""

    target: str
    output_info: Types
    attributes: tuple[tuple[str, str], ...]

    def infer_all(self, *inputs: TraceTensor) -> list[tuple[Shape, dtype]]:
        return list(self.output_info)

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        flat.CustomCallOp(list(inputs), list(outputs), target=self.target, config=self.attributes)


@located
def plugin(
    name: str | None = None,
    inputs: Sequence[TensorLike] = (),
    output_info: Sequence[tuple[Any, dtype]] | None = None,
    version: str = "1",
    namespace: str = "",
    *,
    op: str | None = None,
    **kwargs: Any,
) -> Any:
    """The results of a handler that ``register_plugin`` made known, on ``inputs``: one tensor, or a list of several.

    Two overloads: ``plugin(name, inputs, output_info, version, namespace, **attributes)``, and ``plugin("namespace::name", inputs, **attributes)``
    for a plugin that was registered with a function of its outputs. ``output_info`` is a pair of a shape and a dtype for every output; where
    that function exists, the number of dimensions may replace the shape, and ``output_info`` must agree with what the function returns.

    An attribute is decoded by its type: an int as int64, a float as double, a bool, a string, a numpy number as what it is, and a list or
    1-dimensional array of signed integers, floats or bools as a span. Raises ``ArgumentError`` for a name that is not registered and for outputs
    that are not told, and ``DTypeError`` for another kind of attribute.
    """
    if (name is None) == (op is None):
        raise ArgumentError(expected("one name", of="plugin", got=f"name={name!r} and op={op!r}", do="pass one of them"))
    called = full_name(str(name or op), namespace)
    found = plugin_named(called, version)
    tensors = [as_tensor(t) for t in inputs]
    told = None
    if found.outputs is not None:
        told = _types(found.outputs(*tensors, **kwargs), called, None)
    info = told if output_info is None else _types(output_info, called, told)
    if not info:
        raise _wrong("the shape and dtype of every output", called, "none", "pass output_info, or register the plugin with a function of its outputs")
    attributes = tuple((key, attribute_text(key, value)) for key, value in sorted(kwargs.items()))
    results = record_all(Plugin(found.target, info, attributes), *tensors)
    return results[0] if len(results) == 1 else results


def _wrong(wanted: str, called: str, got: object, do: str) -> ArgumentError:
    return pointing(ArgumentError(expected(wanted, of=f"output_info of plugin {called!r}", got=got, do=do)), "output_info")


def _types(outputs: Sequence[tuple[Any, dtype]], called: str, told: Types | None) -> Types:
    """The given outputs as shapes and dtypes. They must agree with ``told``, what the plugin's own function returned; there a rank may replace a
    shape."""
    try:
        pairs = [(size, check_dtype(of)) for size, of in outputs]
    except (TypeError, ValueError) as error:
        if isinstance(error, FusibleError):
            raise
        raise _wrong("pairs of a shape and a dtype", called, repr(outputs), "pass [(shape, dtype), ...]") from None
    if told is not None and len(pairs) != len(told):
        raise _wrong(f"{len(told)} outputs", called, len(pairs), "agree with what its registered function tells")
    types = []
    for i, (size, of) in enumerate(pairs):
        rank_only = hasattr(size, "__index__")
        if rank_only and told is None:
            raise _wrong("shapes", called, f"a number of dimensions, {size}", "pass the shape, or register the plugin with a function of its outputs")
        shape = told[i][0] if told is not None and rank_only and len(told[i][0]) == size else as_shape(() if rank_only else size)
        if told is not None and (shape, of) != told[i]:
            raise _wrong(f"{told[i][1]} {list(told[i][0])}", called, f"{of} with {size}", "agree with what its registered function tells")
        types.append((shape, of))
    return tuple(types)


def attribute_text(name: str, value: Any) -> str:
    """A value as the text of the MLIR attribute that a handler decodes."""
    if isinstance(value, str):
        return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in value.encode()) + '"'
    array = np.asarray(value) if isinstance(value, bool | int | float | np.generic | np.ndarray | list | tuple) else np.asarray(None)
    of = BY_NUMPY.get(array.dtype)
    if of is None or of.kind == "float8" or of.bits < 8 or array.ndim > 1 or (array.ndim and of.kind == "uint"):
        wanted = "a number, a string, or a list of signed integers, floats or bools"
        error = DTypeError(expected(wanted, of=f"the attribute {name} of a plugin", got=f"a {type(value).__name__}", do="pass tensors as inputs"))
        raise pointing(error, name)
    items = [_number(item, of) for item in array.reshape(-1)]
    if not array.ndim:
        return items[0] if of.kind == "bool" else f"{items[0]} : {of.mlir}"
    return f"array<{of.mlir}: {', '.join(items)}>" if items else f"array<{of.mlir}>"


def _number(item: Any, of: dtype) -> str:
    if of.kind == "bool":
        return "true" if item else "false"
    if of.is_integer:
        return str(int(item))
    return f"{float(item):.17e}" if np.isfinite(item) else f"0x{int(item.view(f'u{item.itemsize}')):0{2 * item.itemsize}X}"
