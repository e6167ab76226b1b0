"""What recipes and their parts have in common: options that are checked when given, and printed where they differ from the defaults."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, cast

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.knobs import Knob
from fusible.quantized.formats import Format

__all__ = ["MMParams", "Options", "QParams", "from_knob", "from_others"]

T = TypeVar("T")


class Options:
    """Base of frozen dataclasses of options: values of simple types are checked when given, and those that differ from the defaults are printed."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        for option in fields(self):
            types, called = _ACCEPTED.get(getattr(option.type, "__name__", option.type), (object, ""))
            if not isinstance(getattr(self, option.name), types):
                raise self._unfit(option.name, called, "give one", DTypeError)

    def _unfit(self, name: str, what: str, do: str, kind: type[ArgumentError | DTypeError] = ArgumentError) -> ArgumentError | DTypeError:
        """The error for the option ``name``, of which ``what`` was expected."""
        return kind(expected(what, of=f"{type(self).__name__}.{name}", got=_short(getattr(self, name)), do=do))

    def _check_one_of(self, name: str, *allowed: object) -> None:
        if getattr(self, name) not in allowed:
            *most, last = map(_short, allowed)
            raise self._unfit(name, f"{', '.join(most)} or {last}" if most else last, "give one of these" if most else "leave it at that")

    def _follows(self, name: str) -> bool:
        """Whether an option's value follows from the others, and need not be printed."""
        return False

    def __repr__(self) -> str:
        """The class and the options that differ from the defaults."""
        changed = [
            f"{f.name}={_short(getattr(self, f.name))}"
            for f in fields(self)
            if f.repr and getattr(self, f.name) != f.metadata.get("default", f.default) and not self._follows(f.name)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


def from_knob(knob: Knob[T]) -> T:
    """A dataclass field whose default is the knob's value when the object is made; what differs from the knob's own default is printed."""
    return cast(T, field(default_factory=knob.get, metadata={"default": knob.default}))


def from_others() -> Any:
    """A dataclass field that follows from the others where it is not given, or None."""
    return field(default=None)


def _short(value: object) -> str:
    return str(value) if isinstance(value, Enum) else repr(value)


@dataclass(frozen=True, repr=False)
class MMParams(Options):
    """Options of a matrix product: ``use_split_accumulator`` accumulates in full fp32 (every backend here does anyway)."""

    use_split_accumulator: bool = True


@dataclass(frozen=True, repr=False)
class QParams(Options):
    """Options of a quantization.

    ``power_2_scale``, ``amax_epsilon``: 8-bit scales rounded down to powers of two, and a lower bound of amax. ``random_hadamard_transform``,
    ``stochastic_rounding``, ``fp4_2d_quantization``: NVFP4's transform of the column-wise copy, unbiased rounding, and scales per 16x16 tile.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.amax_epsilon < float("inf"):
            raise self._unfit("amax_epsilon", "a finite number of at least 0", "give the least amax")


_ACCEPTED: dict[Any, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "str": (str, "a string"),
    "Format": (Format, "a Format"),
    "MMParams": (MMParams, "MMParams"),
    "QParams": ((QParams, type(None)), "QParams"),
}
"""By the name of an option's annotation: the types of its values, and what a message calls them."""
