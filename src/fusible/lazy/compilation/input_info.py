"""The declared types of a compiled function's runtime inputs: shapes with fixed or dynamic dimensions, and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from fusible.errors import ArgumentError, DTypeError, ShapeError, check_switch, expected
from fusible.lazy.dims import SizeLike, size_of, symbol
from fusible.lazy.dtypes import check_dtype, dtype
from fusible.lazy.locate import shows_user

__all__ = ["Bounds", "DimensionInputInfo", "InputInfo", "NamedDimension", "Runtime"]


C = TypeVar("C", bound=type)


def _made_by_user(cls: C) -> C:
    """Let the errors of a dataclass begin with the user's line. Its ``__init__`` is generated, and cannot have the decorator itself."""
    cls.__init__ = shows_user(cls.__init__)
    return cls


@dataclass(frozen=True)
class Bounds:
    """The least, the most usual and the greatest value of a size, or of each size of a shape."""

    min: Any
    opt: Any
    max: Any

    def is_static(self) -> bool:
        """Whether one value is left."""
        return self.min == self.max

    def __iter__(self) -> Any:
        return iter((self.min, self.opt, self.max))


@_made_by_user
@dataclass(frozen=True)
class NamedDimension:
    """A dynamic dimension with a name: dimensions of one name are equal in every call. ``opt`` is what is compiled ahead."""

    name: str
    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DTypeError(expected("a text", of="the name of a dimension", got=repr(self.name), do='name it, for instance "batch"'))
        for field, value in zip(("min", "opt", "max"), _ordered((self.min, self.opt, self.max), self.name), strict=True):
            object.__setattr__(self, field, value)

    @property
    def bounds(self) -> tuple[int, int, int]:
        return self.min, self.opt, self.max


def _ordered(bounds: Any, what: str) -> tuple[int, int, int]:
    """Three sizes ``min <= opt <= max``; raises ``ShapeError`` or ``DTypeError`` for anything else."""
    sizes: list[Any] = [size_of(n) for n in bounds]
    if len(sizes) != 3 or not all(type(n) is int for n in sizes):
        got = repr(bounds)
        raise DTypeError(expected("three ints (min, opt, max)", of=f"the bounds of {what}", got=got, do="pass for instance (1, 8, 32)"))
    low, usual, high = sizes
    if not 0 <= low <= usual <= high:
        raise ShapeError(expected("0 <= min <= opt <= max", of=f"the bounds of {what}", got=f"({low}, {usual}, {high})", do="put them in this order"))
    return low, usual, high


def _dimension(dimension: Any) -> int | Bounds | NamedDimension:
    if isinstance(dimension, NamedDimension):
        return dimension
    if isinstance(dimension, Bounds | tuple | list):
        return Bounds(*_ordered(tuple(dimension), "a dynamic dimension of InputInfo"))
    size = size_of(dimension)
    if type(size) is not int:
        do = "pass an int, (min, opt, max) or a NamedDimension"
        raise DTypeError(expected("a size or its bounds", of="a dimension of InputInfo", got=repr(dimension), do=do))
    if size < 0:
        raise ShapeError(expected("a size of at least 0", of="a dimension of InputInfo", got=size, do="pass the size explicitly"))
    return size


@_made_by_user
@dataclass(frozen=True)
class InputInfo:
    """The shape and dtype of a runtime input of a compiled function.

    A dimension is an int, bounds ``(min, opt, max)`` of a dynamic size, or a ``NamedDimension``: ``InputInfo(((1, 8, 32), 64), float32)``. With
    ``donate`` the results of a call may take over the memory of its argument: the tensor is used up, and says so when it is used again.
    """

    shape: tuple[Any, ...]
    dtype: dtype
    donate: bool = False

    def __post_init__(self) -> None:
        alone = size_of(self.shape)
        if alone is None and not isinstance(self.shape, tuple | list):
            raise DTypeError(expected("a sequence of dimensions", of="a shape", got=repr(self.shape), do="pass for instance (2, 3)"))
        dimensions = tuple([_dimension(d) for d in (self.shape if alone is None else (alone,))])
        object.__setattr__(self, "shape", dimensions)
        check_dtype(self.dtype)
        check_switch(self.donate, "donate of InputInfo")

    @property
    def shape_bounds(self) -> Bounds:
        """The least, the usual and the greatest shape."""
        spans = [(d, d, d) if isinstance(d, int) else (d.min, d.opt, d.max) for d in self.shape]
        return Bounds(*(tuple([span[i] for span in spans]) for i in range(3)))

    @property
    def dimension_names(self) -> dict[int, str]:
        """By dimension its name, where it has one."""
        return {i: d.name for i, d in enumerate(self.shape) if isinstance(d, NamedDimension)}

    def sizes(self, name: str, named: dict[str, NamedDimension]) -> tuple[SizeLike, ...]:
        """The shape in which the argument ``name`` is recorded. ``named`` collects the named dimensions; raises where bounds disagree."""
        return tuple([_size(d, f"{name}.{i}", named) for i, d in enumerate(self.shape)])


def _size(dimension: int | Bounds | NamedDimension, name: str, named: dict[str, NamedDimension]) -> SizeLike:
    if isinstance(dimension, int):
        return dimension
    if isinstance(dimension, NamedDimension):
        first = named.setdefault(dimension.name, dimension)
        if first != dimension:
            got = f"{first.bounds} and {dimension.bounds}"
            do = "give them another name, or the same bounds"
            raise ArgumentError(expected("one set of bounds", of=f"the dimension {dimension.name!r}", got=got, do=do))
        name = dimension.name
    return symbol(name, dimension.min, dimension.opt, dimension.max)


@_made_by_user
@dataclass(frozen=True)
class DimensionInputInfo:
    """The bounds ``(min, opt, max)`` of a runtime input that is a size. The function receives a ``DimensionSize``; a call passes an int.

    ``value_bounds`` has each bound in a tuple of one, as the bounds of a shape are tuples.
    """

    value_bounds: Any

    def __post_init__(self) -> None:
        bounds = self.value_bounds
        if not isinstance(bounds, Bounds | tuple | list):
            of, do = "value_bounds of DimensionInputInfo", "pass for instance (1, 8, 32)"
            raise DTypeError(expected("three ints (min, opt, max)", of=of, got=repr(bounds), do=do))
        sizes = [n[0] if isinstance(n, tuple) and len(n) == 1 else n for n in bounds]
        object.__setattr__(self, "value_bounds", Bounds(*((n,) for n in _ordered(sizes, "DimensionInputInfo"))))

    @property
    def span(self) -> tuple[int, int, int]:
        """The bounds as numbers."""
        return tuple([n for (n,) in self.value_bounds])  # type: ignore[return-value] - three of them


Runtime = InputInfo | DimensionInputInfo
"""The declaration of a runtime input among the arguments of ``compile``."""
