"""The base of every module: its parameters by name, its children, and loading."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusible.errors import CheckpointError, DTypeError, FusibleError, check_switch, expected
from fusible.lazy.compilation.parametrized import Parametrized
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import locate, shows_user
from fusible.lazy.modules.parameter import DefaultParameter, UninitializedError, check_fits
from fusible.lazy.ops.fill import ones

__all__ = ["LoadedKeys", "Module"]

_DECLARED = "_declared"
"""The attribute with the declarations, by name, of the parameters that were declared without a value and have one now."""


class LoadedKeys(NamedTuple):
    """The parameters that ``load_state_dict`` did not find, and the names that belong to no parameter."""

    missing_keys: set[str]
    unexpected_keys: set[str]


class _Slot(NamedTuple):
    """The place of a parameter or child: ``holder[key]``, where ``holder`` is the attributes of a module, or a list or dict among them."""

    module: Module
    name: str
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]

    @property
    def declared(self) -> Tensor:
        return vars(self.module).get(_DECLARED, {}).get(self.name, self.value)

    def set(self, value: Tensor) -> None:
        """Put a value that fits in its place; the declaration outlives it."""
        if isinstance(self.value, DefaultParameter):
            vars(self.module).setdefault(_DECLARED, {}).setdefault(self.name, self.value)
        self.holder[self.key] = value


class _Signature:
    """Lets ``inspect.signature(module)`` be the signature of its ``forward``. That of the class stays the signature of its constructor."""

    def __get__(self, module: Module | None, owner: type) -> inspect.Signature:
        if module is None:
            raise AttributeError("__signature__")
        return inspect.signature(module.forward)


class Module(Parametrized):
    """Parameters and submodules, and a ``forward`` that computes with them; ``module(x)`` calls ``forward(x)``.

    Every attribute that is a lazy ``Tensor`` is a parameter, and every one that is a ``Module`` a child; so are those in lists and dicts among the
    attributes, under names such as ``blocks.0`` (tuples are not looked into). A ``DefaultParameter`` declares a parameter whose value is to be
    loaded. A parameter keeps its shape and dtype: assigning a tensor of others raises ``ShapeError`` or ``DTypeError``, and leaves it as it was.
    ``None`` takes the value from an optional one.
    """

    __signature__ = _Signature()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes; a subclass defines it."""
        raise NotImplementedError(expected("a method forward", of=f"the module {type(self).__name__}", got="none", do="define forward(self, x)"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.forward(*args, **kwargs)
        except FusibleError as error:
            if isinstance(error, UninitializedError):
                self._name_in(error)
            locate(error, ())
            raise

    def _name_in(self, error: UninitializedError) -> None:
        for path, slot in self._state():
            if slot.value is error.parameter:
                error.rename(self._label(path))
                return

    def _name_parameters(self) -> None:
        for name, parameter in self.state_dict().items():
            if not isinstance(parameter, DefaultParameter) and parameter.name is None:
                parameter.name = name

    @shows_user
    def __setattr__(self, name: str, value: Any) -> None:
        declared = vars(self).get(_DECLARED, {})
        current = vars(self).get(name)
        if isinstance(value, DefaultParameter):
            value.label = self._label(name)
            declared.pop(name, None)
        elif isinstance(current, DefaultParameter) or name in declared or (isinstance(current, Tensor) and isinstance(value, Tensor)):
            slot = _Slot(self, name, vars(self), name)
            if value is None and getattr(slot.declared, "optional", False):
                slot.set(slot.declared)
                return
            slot.set(check_fits(self._label(name), slot.declared, value))
            return
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        vars(self).get(_DECLARED, {}).pop(name, None)
        object.__delattr__(self, name)

    def _label(self, path: str) -> str:
        return f"the parameter {path!r} of {type(self).__name__}"

    def _slots(self, kind: type) -> Iterator[_Slot]:
        """The places of the parameters (or children) of this module, without its children's, in the order of assignment."""
        for name in [n for n in vars(self) if n != _DECLARED]:
            yield from _search(self, vars(self), name, name, kind)

    def _state(self, prefix: str = "") -> Iterator[tuple[str, _Slot]]:
        """Every parameter of the module and its children by its key in the state dict."""
        for slot in self._slots(Tensor):
            yield prefix + slot.name, slot
        for name, child in self.named_children():
            yield from child._state(f"{prefix}{name}.")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter of this module itself, without its children's: ``state_dict`` has all."""
        for slot in self._slots(Tensor):
            yield slot.name, slot.value

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of each child."""
        for slot in self._slots(Module):
            yield slot.name, slot.value

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter of the module and its children by name (``blocks.0.weight``). The tensors are the module's own, not copies."""
        return {path: slot.value for path, slot in self._state()}

    @shows_user
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Give the parameters the values in ``state_dict``: lazy tensors, numpy arrays (copied), or DLPack exporters (shared where possible).

        A lazy tensor that is recorded and not evaluated is computed by every program that reads it: ``eval()`` it first.
        Returns the names that are missing from it and those that the module has no parameter for; with ``strict`` either raises
        ``CheckpointError``. Raises ``ShapeError`` or ``DTypeError`` for a value of another shape or dtype. Where it raises nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            do = "pass what state_dict() gave"
            raise DTypeError(expected("a mapping of names to values", of="state_dict of load_state_dict", got=type(state_dict).__qualname__, do=do))
        check_switch(strict, "strict of load_state_dict")
        slots = dict(self._state())
        missing = {path for path, slot in slots.items() if path not in state_dict and not getattr(slot.declared, "optional", False)}
        unexpected = set(state_dict) - set(slots)
        if strict and (missing or unexpected):
            got = " and ".join(f"{what}: {_few(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys)
            do = "load the state dict of the same architecture, or pass strict=False"
            raise CheckpointError(expected("every parameter and no other", of=f"a state dict for {type(self).__name__}", got=got, do=do))
        values = {path: v if isinstance(v := state_dict[path], Tensor) else Tensor(v) for path in slots if path in state_dict}
        for path, value in values.items():
            check_fits(self._label(path), slots[path].declared, value)
        for path, value in values.items():
            slots[path].set(value)
        return LoadedKeys(missing, unexpected)

    load_from_state_dict = load_state_dict

    def initialize_dummy_parameters(self) -> None:
        """Set every parameter without a value to ones, but for optional ones, in this module and its children: to try a model without weights."""
        for _, slot in self._state():
            if isinstance(slot.value, DefaultParameter) and not slot.value.optional:
                slot.set(ones(slot.value.shape, slot.value.dtype))

    def __repr__(self) -> str:
        lines = [f"{name}: {_spell(parameter)}" for name, parameter in self.named_parameters()]
        lines += [f"{name}: {child!r}" for name, child in self.named_children()]
        inner = textwrap.indent("\n".join(lines), "    ")
        return f"{type(self).__name__}(\n{inner}\n)" if lines else f"{type(self).__name__}()"


def _spell(parameter: Tensor) -> str:
    return f"{parameter.dtype} {list(parameter.shape)}{', no value' if isinstance(parameter, DefaultParameter) else ''}"


def _search(module: Module, holder: Any, key: Any, name: str, kind: type) -> Iterator[_Slot]:
    value = holder[key]
    if isinstance(value, kind):
        yield _Slot(module, name, holder, key)
    elif isinstance(value, list | dict):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _search(module, value, inner, f"{name}.{inner}", kind)


def _few(names: set[str], limit: int = 8) -> str:
    """The first names in order, and how many more there are."""
    listed = ", ".join(sorted(names)[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
