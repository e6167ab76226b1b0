"""Calls of the compiled kernels as data: each as a function of its own, and many as one native program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.layouts import HOST
from fusible.tex.calls.call_text import compiled_once
from fusible.tex.interface.kernel_calls import Buffer, KernelCall, KernelCalls, Operand, View, as_data
from fusible.tex.interface.specialize import SpecializedCall

__all__ = ["Value", "call", "native_program", "specialized"]


def call(function: str, **arguments: Any) -> KernelCall:
    """A call of a native function."""
    return KernelCall(function, arguments)


def specialized(result: Any, *calls: KernelCall) -> SpecializedCall:
    """What comes to ``calls`` and gives ``result``."""
    operands, kernels = as_data(calls, result)
    return SpecializedCall(_function_of(kernels, len(operands)), operands, kernels)


def _function_of(kernels: KernelCalls, count: int) -> Callable[..., Any]:
    """The calls as a Python function of the operands, a line each."""
    text = _Text()
    for function, arguments in kernels.calls:
        passed = ", ".join(f"{name}={text.of(value)}" for name, value in arguments.items())
        text.lines.append(f"    {text.named(_OWN.get(function) or getattr(native, function))}({passed})")
    text.lines.append(f"    return {text.of(kernels.result)}")
    head = f"def compute({', '.join(f'o{number}' for number in range(count))}):"
    return compiled_once("\n".join((head, *text.lines)) + "\n", f"{__file__}: call", text.names)


class _Text:
    """The lines of a function so far, and the values of the names in them: shapes and numbers too, for calls of other sizes to have the same text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._made: dict[int, str] = {}

    def named(self, value: Any) -> str:
        self.names[name := f"c{len(self.names)}"] = value
        return name

    def of(self, value: Any) -> str:
        """How ``value`` stands in a line; buffers and views are made where they first come."""
        if isinstance(value, list):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, Operand):
            return f"o{value.number}"
        if isinstance(value, Buffer):
            return self._made_by(
                value, f"{self.named(torch.empty)}({self.named(value.shape)}, dtype={self.named(value.dtype)}, device={self.named(HOST)})"
            )
        if isinstance(value, View):
            return self._made_by(value, f"{self.named(_view)}({self.of(value.of)}, {self.named(value)})")
        return repr(value) if value is None or type(value) in (bool, str) else self.named(value)

    def _made_by(self, value: Any, text: str) -> str:
        if id(value) not in self._made:
            self._made[id(value)] = name = f"t{len(self._made)}"
            self.lines.append(f"    {name} = {text}")
        return self._made[id(value)]


def _view(of: Tensor, view: View) -> Tensor:
    begin = (of.storage_offset() * of.element_size() + view.offset) // view.dtype.itemsize
    if of.dtype is view.dtype:
        return torch.as_strided(of, view.shape, view.strides, begin)
    return torch.empty(0, dtype=view.dtype, device=HOST).set_(of.untyped_storage(), begin, view.shape, view.strides)


def _copy(src: Tensor, dst: Tensor) -> None:
    dst.copy_(src)


def _zero(dst: Tensor) -> None:
    dst.zero_()


def _quotient(src: Tensor, by: float, dst: Tensor) -> None:
    torch.div(src, torch.full_like(src, by), out=dst)


_OWN = {"copy": _copy, "round": _copy, "zero": _zero, "quotient": _quotient}
"""What programs have in the place of torch."""


Value = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The number of a tensor, the byte of it at which the value begins, and dtype, shape and strides."""


def native_program(
    tensors: int, values: Sequence[Value], calls: Sequence[tuple[str, dict[str, Any], dict[str, int]]]
) -> Callable[[list[Tensor]], bool]:
    """``calls`` as one function of a list of ``tensors``: what it returns is whether it has made them, as it does not where memory that one writes to
    is that of another tensor, too, or where a tensor's numbers are negated in word only (``torch._neg_view``).

    A call: the function's name, what is the same each time, and the numbers of ``values``, by parameter.
    """
    run: Callable[[list[Tensor]], bool] = native.program(tensors, list(values), list(calls))
    return run
