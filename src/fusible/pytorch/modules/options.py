"""``ModuleWithOptions``: a module whose constructor's arguments are attributes that may be set, as those of an operation.

An option is kept once, as an attribute of the module. The ops are made of the attributes (``make_ops``), when the module is made and whenever one of
them is set: so what is printed is what is computed.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.engine.bound import note_change, without_memory
from fusible.pytorch.modules.base import BaseModule
from fusible.tex.calls.argument_kinds import Kind, shown
from fusible.tex.calls.constructors import constructor_kinds

__all__ = ["ModuleWithOptions"]

_HERE = __name__.partition(".")[0] + "."
_NONE = object()


class ModuleWithOptions(BaseModule):
    """A subclass calls ``nn.Module.__init__``, assigns its options and parameters, then ``super().__init__(*self.make_ops())``.

    An option that is set takes effect at the next call, and scales and amax histories stay. A value that an op cannot have, and another one of what
    is among ``fixed_options``, raise ``ArgumentError``, or ``DTypeError``, and nothing has changed then.
    """

    fixed_options: ClassVar[frozenset[str]] = frozenset()
    """The options by which parameters, the columns of x or extra inputs were made."""
    initial_options: ClassVar[frozenset[str]] = frozenset()
    """The options by which a module begins, and which it does not keep."""
    _options: ClassVar[Mapping[str, Kind | None]] = {}
    """The arguments of the constructors of the class and its bases, with what their annotations allow."""
    _shapes: Mapping[str, Tensor] | None = None
    """By name what stands for each parameter and buffer of which the ops were made; None before they are."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        made = cls.__dict__.get("__init__")
        super().__init_subclass__(**kwargs)
        if made is not None and cls.__module__.startswith(_HERE):
            _, *named = (p.name for p in inspect.signature(made).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
            kinds = constructor_kinds(made)
            cls._options = {**cls._options, **{name: kinds.get(name) for name in named}}

    def __init__(self, *ops: Op | None) -> None:
        super().__init__(*ops)
        self._shapes = {name: arg for b in self._bound for name, arg in zip(b.parameters, b.op.args, strict=True)}

    @abstractmethod
    def make_ops(self) -> Iterable[Op | None]:
        """The ops that compute by the options as they are: as many of them, in the same order, whatever the options are."""

    @property
    def accumulating_parameters(self) -> tuple[str, ...]:
        """The parameters whose gradients are added to their ``main_grad``."""
        return ()

    def tensor_of(self, name: str) -> Tensor | None:
        """What ``make_ops`` makes an op of: a parameter or buffer of the module, or once it is made what stands for it; None for one that there is
        not."""
        if self._shapes is not None:
            return self._shapes.get(name)
        tensor = getattr(self, name, None)
        return None if tensor is None else make_nvte_tensor(tensor)

    def _place(self, index: int) -> int | None:
        return index

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._options or self._shapes is None:
            super().__setattr__(name, value)
        elif not (name in self._shapes or name in self._parameters or name in self._buffers):
            self._set_option(name, _kept(value))
        elif value is None or isinstance(value, torch.Tensor):
            super().__setattr__(name, value)  # pyright: ignore[reportArgumentType] - nn.Module takes None too
        else:
            raise _made_by(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._options and name in vars(self) and name not in (self._shapes or ()):
            raise ArgumentError(expected("a value", of=f"{name} of {type(self).__name__}", got="none", do="set another one"))
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._shapes is not None and param is not None and name in self._options and name not in self._shapes:
            of, do = f"{name} of a {type(self).__name__} that was made without", f"make another module with {name}=True"
            raise ArgumentError(expected("none", of=of, got="a parameter", do=do))
        super().register_parameter(name, param)

    def _set_option(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in self.initial_options and not type(self).__init__.__module__.startswith(_HERE):
            super().__setattr__(name, value)  # of a user's class, which may keep what it likes
            return
        if name in self.fixed_options or name in self.initial_options:
            if own.get(name, _NONE) != value:
                raise _made_by(self, name, value)
            return
        kind = self._options[name]
        wrong = None if kind is None else kind.wrong(value, name)
        if wrong is not None:
            raise wrong.error(type(self).__name__)
        other = object.__new__(type(self))
        vars(other).update(own, **{name: value})
        made = _exchanges(self, other, name)
        changed = {"_changes": self._changes + 1, **self.exchanged(made)} if made else {}
        note_change()  # for an interrupt that comes after the write
        own.update({name: value, **changed})  # at once: an interrupt finds the option and the op, or neither
        note_change()  # for another thread that has looked before


def _kept(value: Any) -> Any:
    """An option's value as something that nobody else can write to."""
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    return tuple(value) if isinstance(value, list) else value


def _exchanges(module: ModuleWithOptions, other: ModuleWithOptions, name: str) -> dict[Op, Op]:
    """What takes the place of ops of ``module`` where its options are those of ``other``, whose ``name`` alone differs.

    Of an op that ``parallelize``, or a quantized weight, has put in the place of the one that the module had made, the rest stays. Raises
    ``ArgumentError`` where that would not be what is asked for.
    """
    found: dict[Op, Op] = {}
    rebound = module.accumulating_parameters != other.accumulating_parameters
    former, latter = ([without_memory(op) for op in each.make_ops() if op is not None] for each in (module, other))
    for now, before, after in zip((b.op for b in module.local_ops()), former, latter, strict=True):
        names = (vars(before).keys() | vars(after).keys()) - set(after.arg_names)
        another = type(after) is not type(before)
        changed = [each for each in names if another or _differ(before, after, each)]
        if not changed and not rebound:
            continue
        if type(now) is not type(before) or any(_differ(now, before, each) for each in changed) or (rebound and module.shares):
            of, got = f"{name} of a {type(module).__name__} that parallelize has laid out", repr(vars(other)[name])
            raise ArgumentError(expected(repr(vars(module)[name]), of=of, got=got, do="set it before"))
        found[now] = after if another else now.with_(**{each: getattr(after, each) for each in changed})
    return found


def _differ(one: Op, other: Op, name: str) -> bool:
    a, b = getattr(one, name, _NONE), getattr(other, name, _NONE)
    return a is not b and a != b


def _made_by(module: ModuleWithOptions, name: str, value: Any) -> ArgumentError:
    what = f"{vars(module)[name]!r}, by which it was made" if name in vars(module) else "what it was made by"
    return ArgumentError(expected(what, of=f"{name} of {type(module).__name__}", got=shown(value), do="make another module"))
