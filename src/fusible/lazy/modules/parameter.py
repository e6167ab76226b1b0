"""Parameters that have no value yet, and the check of a value for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy.dtypes import check_dtype, dtype
from fusible.lazy.frontend import Tensor, as_shape
from fusible.lazy.printing import Shape

__all__ = ["ANY", "DefaultParameter", "UninitializedError", "check_fits"]

ANY = -1
"""Stands for any size in an alternative shape."""


class UninitializedError(ArgumentError):
    """A parameter was used before it had a value; ``parameter`` is that one."""

    def __init__(self, parameter: DefaultParameter) -> None:
        self.parameter = parameter
        self._label = parameter.label
        got = f"none, only its type {_spell(parameter.shape, parameter.dtype)}"
        super().__init__(expected("a value", of=self._label, got=got, do="load it by load_state_dict, or assign a tensor"))

    def rename(self, label: str) -> None:
        """Replace the parameter's name in the sentence by ``label``, which has its key in the state dict of an outer module."""
        self.args = (str(self).replace(self._label, label, 1),)
        self._label = label


class DefaultParameter(Tensor):
    """A parameter of a module that has a shape and a dtype, and no value until one is loaded or assigned.

    ``alternatives`` are further (shape, dtype) pairs that a value may have; a size of -1 there may be any. An ``optional`` parameter
    may stay without a value: ``load_state_dict`` does not miss it. Any other use than reading ``shape``, ``dtype``, ``ndim``, ``size`` and ``name``
    raises ``UninitializedError``.
    """

    __slots__ = ("_dtype", "_shape", "alternatives", "label", "optional")

    def __init__(self, shape: Any, dtype: dtype, *, alternatives: Sequence[tuple[Shape, dtype]] = (), optional: bool = False) -> None:
        self._shape = as_shape(shape)
        self._dtype = check_dtype(dtype)
        self.alternatives = tuple(alternatives)
        self.optional = optional
        self.label = "a parameter"

    @property
    def trace_tensor(self) -> NoReturn:  # type: ignore[override]
        raise UninitializedError(self)

    @trace_tensor.setter
    def trace_tensor(self, value: object) -> NoReturn:
        raise UninitializedError(self)

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def rank(self) -> int:
        return len(self._shape)

    @property
    def name(self) -> str | None:
        return None

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    def __copy__(self) -> DefaultParameter:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> DefaultParameter:
        make, arguments = self.__reduce__()
        return make(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._shape, self._dtype, self.alternatives, self.optional, self.label)

    def __repr__(self) -> str:
        return f"DefaultParameter(shape={self._shape}, dtype={self._dtype})"


def _again(shape: Shape, of: dtype, alternatives: tuple[tuple[Shape, dtype], ...], optional: bool, label: str) -> DefaultParameter:
    """The copy of a parameter, for a copy of its module. It is made anew, because there is no recorded value to copy."""
    made = DefaultParameter(shape, of, alternatives=alternatives, optional=optional)
    made.label = label
    return made


def _spell(shape: Shape, of: dtype) -> str:
    return f"{of} [{', '.join('any' if n is ANY else str(n) for n in shape)}]"


def check_fits(label: str, declared: Tensor, value: Any) -> Tensor:
    """``value`` itself, which is a tensor of the shape and dtype that ``declared`` has (or names as an alternative).

    Raises ``DTypeError`` for another type, ``ShapeError`` for another shape, and ``UninitializedError`` for a value that is itself without one.
    """
    if not isinstance(value, Tensor):
        raise DTypeError(expected("a lazy tensor", of=label, got=type(value).__name__, do="wrap the data in Tensor(data)"))
    traced = value.trace_tensor
    accepted = [(declared.shape, declared.dtype), *getattr(declared, "alternatives", ())]
    fitting = [
        of for shape, of in accepted if len(shape) == len(traced.shape) and all(a in (ANY, b) for a, b in zip(shape, traced.shape, strict=True))
    ]
    if traced.dtype in fitting:
        return value
    wanted = " or ".join(_spell(*of) for of in accepted)
    if fitting:
        raise DTypeError(expected(wanted, of=label, got=traced, do="cast the tensor first"))
    raise ShapeError(expected(wanted, of=label, got=traced, do="reshape the tensor, or make the module of its sizes"))
