"""The compiled kernels within a program: calls of ``fusible.cpp_extensions`` that XLA makes by its foreign-function interface, without Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusible import cpp_extensions, lazy
from fusible.errors import MissingModuleError, expected
from fusible.lazy import Tensor
from fusible.lazy.engine.pjrt import run_large_by
from fusible.lazy.engine.plugins import full_name, is_registered, plugin_named, register_plugin
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.flat_ir.ops import CustomCallOp
from fusible.lazy.frontend import record_all
from fusible.lazy.ops.plugin import Plugin, attribute_text
from fusible.locks import Lock
from fusible.tex.enums import DType

__all__ = ["E8M0", "Result", "call", "dtype_number", "kernels_of", "multiplies_halves", "register", "serves", "takes"]

_NAME, _NAMESPACE, _VERSION = "native", "fusible", "1"
"""What a program calls. A version that takes other attributes has another number."""

_NUMBERS = {lazy.float32: DType.kFloat32, lazy.float16: DType.kFloat16, lazy.bfloat16: DType.kBFloat16, lazy.uint8: DType.kByte}
E8M0 = 9
"""The number of float8_e8m0fnu among the types of kernels; programs have it as bytes, and tex has none."""
_lock = Lock()
_WORTH = 1 << 13
"""Elements from which on a call costs less than what XLA makes of the formula: at 8,192 of bfloat16 GELU, LayerNorm and casts took 35 to 38 us where
XLA took 61 to 72, at 4,096 as long (a Xeon with two threads); products of 64 rows and 128 columns take as long either way."""


class Result(NamedTuple):
    """A tensor that a native function writes, ``zeroed`` before where it writes to a part of it."""

    shape: Sequence[int]
    dtype: lazy.dtype
    zeroed: bool = False


def dtype_number(dtype: lazy.dtype) -> int:
    """A dtype as native functions take it."""
    return int(_NUMBERS[dtype])


def takes(x: Tensor) -> bool:
    """Whether kernels take tensors of that type, of sizes that are known when the call is recorded."""
    return x.dtype in _NUMBERS and all(type(n) is int for n in x.shape)


def serves(*tensors: Tensor) -> bool:
    """Whether a kernel computes what follows from ``tensors``: there are kernels here, which take these, and the work is worth a call."""
    return cpp_extensions.available and all(map(takes, tensors)) and max(x.size for x in tensors) >= _WORTH


def multiplies_halves(*operands: Tensor) -> bool:
    """Whether operands are of bfloat16 and the CPU has dot products of it. Other products of plain floats XLA makes as fast, or faster."""
    return all(x.dtype is lazy.bfloat16 for x in operands) and cpp_extensions.available and cpp_extensions.multiplies_halves()


def register() -> str:
    """Let programs call the kernels; returns by what name. Raises ``MissingModuleError`` where there are none."""
    name = full_name(_NAME, _NAMESPACE)
    if not cpp_extensions.available:
        of, do = f"a program that calls {name} version {_VERSION}", "install with a C++ compiler, or record it anew where there are none"
        raise MissingModuleError(expected("the compiled kernels", of=of, got=cpp_extensions.reason, do=do))
    with _lock:
        if not is_registered(name, _VERSION):
            register_plugin(_NAME, cpp_extensions.xla_handler(), version=_VERSION, namespace=_NAMESPACE)
            run_large_by(cpp_extensions.run_with_team)
    return plugin_named(name, _VERSION).target


def kernels_of(program: FlatIR) -> Counter[str]:
    """The native functions that a program calls, and how often."""
    target = f"{full_name(_NAME, _NAMESPACE)}@{_VERSION}"
    calls = [dict(op.config)["function"] for op in program.ops if isinstance(op, CustomCallOp) and op.target == target]
    return Counter(name.strip('"') for name in calls)


def call(function: str, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Record a call of a native function; what it writes, by the names of its parameters. A ``Result`` among the arguments stands for a tensor to be
    written, and None for a parameter that is left out."""
    operands: list[Tensor] = []
    results: dict[str, Result] = {}
    attributes = [("function", attribute_text("function", function))]
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, Result):
            results[name] = value
            value = -len(results)
        elif isinstance(value, Tensor):
            operands.append(value)
            value = len(operands) - 1
        attributes.append((name, attribute_text(name, np.int64(value) if type(value) is int else value)))
    zeroed = sum(1 << i for i, result in enumerate(results.values()) if result.zeroed)
    if zeroed:
        attributes.append(("zeroed", attribute_text("zeroed", np.int64(zeroed))))
    info = tuple((tuple(result.shape), result.dtype) for result in results.values())
    return dict(zip(results, record_all(Plugin(register(), info, tuple(sorted(attributes))), *operands), strict=True))
