"""Calls with an empty dimension, made from a sample: one dimension of its tensors has no elements, and numbers that count it are 0.

Nobody has to write down which dimensions of a function may be empty. A call that passes the checks and that the torch backend takes is valid; any
backend must give the same result, which is mostly shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch

from fusible import tex
from fusible.conformance.memory import holds, tensors
from fusible.conformance.table import Disagreement, Output, Sample, measure
from fusible.errors import NotServedError
from fusible.quantized import GroupedTensorStorage

__all__ = ["check_of_nothing", "compare_with_reference", "emptied", "tex_function"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def emptied(arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """A copy of ``arguments`` in which every dimension of ``size`` elements is empty, and every integer that is ``size`` is 0. Integer tensors become
    zeros, for they are indices and lengths."""
    made: dict[int, Any] = {}

    def cut(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: cut(value) for name, value in x.items()}
        if isinstance(x, list | tuple) and not isinstance(x, torch.Size):
            return type(x)(cut(value) for value in x)
        if type(x) is int or isinstance(x, torch.Size):
            return 0 if x == size else x
        if id(x) not in made:
            made[id(x)] = _tensor(x, size) if type(x) in _PLAIN else _holder(x, size, cut) if holds(x) else deepcopy(x)
        return made[id(x)]

    return cut(arguments)


def _tensor(x: torch.Tensor, size: int) -> torch.Tensor:
    y = x.new_zeros([0 if n == size else n for n in x.shape])
    return y if x.dtype in (torch.int32, torch.int64) or not y.numel() else y.copy_(x)


def _holder(x: Any, size: int, cut: Callable[[Any], Any]) -> Any:
    """A quantized tensor field by field. The buffers of a grouped tensor are flat, so its logical shape decides."""
    twin = copy(x)
    if isinstance(x, GroupedTensorStorage):
        if size not in x.logical_shape:
            return deepcopy(x)
        twin.rowwise_data, twin.columnwise_data = (None if data is None else data.new_zeros(0) for data in (x.rowwise_data, x.columnwise_data))
    for name, value in vars(twin).items():
        setattr(twin, name, cut(value))
    return twin


def check_of_nothing(function: str, call: Callable[..., Any], sample: Sample, most: int | None = None) -> None:
    """Raise ``Disagreement`` unless the calls with an empty dimension, all or the first ``most``, agree with the reference."""
    for size, arguments in list(_taken(function, sample))[:most]:
        again = deepcopy(arguments)
        theirs = _of_reference(function, again)
        try:
            result = call(function, **arguments)
        except NotServedError:
            continue
        compare_with_reference(f"{sample.label} with nothing in place of {size}", sample.outputs, (result, arguments), (theirs, again))


def _taken(function: str, sample: Sample) -> Iterator[tuple[int, dict[str, Any]]]:
    """The calls with an empty dimension that the reference takes, by the former size of that dimension."""
    shapes = [x.shape for _, x in tensors(sample.arguments)]
    shapes += [x.logical_shape for x in sample.arguments.values() if isinstance(x, GroupedTensorStorage)]
    for size in sorted({n for shape in shapes for n in shape if n > 1}):
        arguments = emptied(sample.arguments, size)
        try:
            _of_reference(function, deepcopy(arguments))
        except Exception:
            continue
        yield size, arguments


def _of_reference(function: str, arguments: dict[str, Any]) -> Any:
    with tex.set_backend("torch", strict=True):
        return tex_function(function)(**arguments)


def tex_function(name: str) -> Callable[..., Any]:
    """The function of tex that a record is of: of ``"prim_add"`` it is ``tex.prim.add``."""
    return getattr(tex.prim, name.removeprefix("prim_")) if name.startswith("prim_") else getattr(tex, name)


def compare_with_reference(what: str, outputs: Sequence[Output], mine: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Raise ``Disagreement``, which names ``what``, unless two calls, ``(result, arguments)`` each, gave the same outputs. Of outputs that depend on
    random numbers only the shapes are compared."""
    for output in outputs:
        try:
            _compare(output, mine, other)
        except Disagreement as error:
            raise Disagreement(f"{what}: output {output.at or 0}: {error}") from None


def _compare(output: Output, mine: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    if callable(output.at):
        return
    got, wanted = output.find(*mine), output.find(*other)
    if output.drawn:
        if isinstance(wanted, torch.Tensor) and (not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (wanted.shape, wanted.dtype)):
            raise Disagreement(f"{got} instead of {wanted.dtype} {list(wanted.shape)}")
        return
    near = isinstance(output.reference, torch.Tensor) and output.reference.dtype is torch.float64
    if isinstance(wanted, torch.Tensor) and near:
        output, wanted = replace(output, dtype=wanted.dtype), wanted.double()
    share = measure(output, got, wanted)
    if share > 2:  # each may be a bound away from float64
        raise Disagreement(f"{share / 2:.3g} times its bound")
