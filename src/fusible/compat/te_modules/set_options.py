"""Options of NVIDIA's layers that are set once the layer is made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fusible.errors import ArgumentError, expected
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, note_change, without_memory
from fusible.pytorch.modules.base import BaseModule
from fusible.tex.calls.argument_kinds import Kind
from fusible.tex.calls.constructors import constructor_kinds

__all__ = ["SetOptions"]

_HERE = __name__.partition(".")[0] + "."


class SetOptions(BaseModule):
    """Base of a layer whose ops are made of its options. Those that NVIDIA's layer reads at each call (``read_options``) take effect at the next one
    when they are set; scales and amax histories stay. One that chose which ops there are (``chosen_options``) keeps its value. ``ArgumentError`` or
    ``DTypeError`` for another one, and for a value that the constructor refuses; nothing has changed then."""

    read_options: ClassVar[frozenset[str]] = frozenset({"eps", "fuse_wgrad_accumulation", "name", "zero_centered_gamma"})
    chosen_options: ClassVar[frozenset[str]] = frozenset({"normalization", "return_layernorm_output"})
    _kinds: ClassVar[Mapping[str, Kind]] = {}
    """What the annotations of the constructors of the class and its bases allow."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        made = cls.__dict__.get("__init__")
        super().__init_subclass__(**kwargs)
        if made is not None and cls.__module__.startswith(_HERE):
            cls._kinds = {**cls._kinds, **constructor_kinds(made)}

    @abstractmethod
    def made_anew(self, option: str) -> Mapping[Op, Op]:
        """The ops that an option is a part of, each with the op by the options as they are now."""

    def _place(self, index: int) -> int | None:
        return index

    def current(self, bound: BoundOp) -> BoundOp:
        return bound if bound.place is None else next(b for b in self.bound_ops() if b.place == bound.place)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if "_bound" not in own or name not in own or name not in self.read_options | self.chosen_options:
            super().__setattr__(name, value)
        elif name in self.read_options:
            self._set_option(name, value)
        elif own[name] != value:
            of, do = f"{name} of {type(self).__name__}", "make another module"
            raise ArgumentError(expected(f"{own[name]!r}, by which it was made", of=of, got=repr(value), do=do))

    def _set_option(self, name: str, value: Any) -> None:
        own, kind = vars(self), self._kinds.get(name)
        wrong = None if kind is None else kind.wrong(value, name)
        if wrong is not None:
            raise wrong.error(type(self).__name__)
        other = object.__new__(type(self))
        vars(other).update(own, **{name: value})
        made = {op: without_memory(new) for op, new in other.made_anew(name).items()}
        changed = {name: value, **self.exchanged(made), "_changes": self._changes + 1}
        note_change()  # for an interrupt that comes after the write
        own.update(changed)  # at once: an interrupt finds the option and the ops, or neither
        note_change()  # for another thread that has looked before
