"""What a conversion has read of a module: where that has been set anew since, the pipeline that was made of it computes the module no more.

Options are a module's public attributes, its own and those that its class has for all, which cannot change but by being set anew: numbers, words,
switches, functions, tuples of these, and None, as an epsilon, or the share that drops out. The form of a layer is the shape of each parameter, or
that it has none of the name. Of what is computed from other parameters, as ``torch.nn.utils.parametrize`` does, the form stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from types import BuiltinFunctionType, FunctionType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as torchs

from fusible.pytorch.engine.lowered import own_parameter
from fusible.pytorch.modules.base import has_hooks

__all__ = ["AsFound", "Form", "Options", "are_looked_at", "form_of", "has_form", "has_options", "options_of"]

Options = tuple[tuple[str, Any], ...]
_OF_CALLS = ("training", "gradient_checkpointing")
"""What says how a module is called, and is no option of what it computes."""
Form = tuple[tuple[str, torch.Size | None], ...]
"""By the names of parameters their shapes; None for one that there is not."""


def options_of(module: nn.Module) -> Options:
    """The options of a module, as they are now."""
    classes = takewhile(lambda cls: cls is not nn.Module, type(module).__mro__)
    of_classes = {name: value for cls in reversed([*classes]) for name, value in vars(cls).items() if isinstance(value, _NUMBERS_AND_WORDS)}
    public = [(name, value) for name, value in (of_classes | vars(module)).items() if not name.startswith("_") and name not in _OF_CALLS]
    return tuple((name, value) for name, value in public if _is_option(value))


_NUMBERS_AND_WORDS = (int, float, str)
_SET_ANEW = (*_NUMBERS_AND_WORDS, torch.dtype, FunctionType, BuiltinFunctionType, type(None))


def _is_option(value: Any) -> bool:
    return all(map(_is_option, value)) if isinstance(value, tuple) else isinstance(value, _SET_ANEW)


def has_options(module: nn.Module, options: Options) -> bool:
    """Whether the options of a module are these still."""
    return all([(now := getattr(module, name, None)) is found or _equals(now, found) for name, found in options])


def _equals(now: Any, found: Any) -> bool:
    """Whether a value is another object of the same value, as NaN has after a pickle, and as a copy of a number has."""
    if not isinstance(now, (*_NUMBERS_AND_WORDS, tuple)):
        return False
    return now == found or (now != now and found != found and isinstance(found, float))


def form_of(layer: nn.Module) -> Form:
    """The form of a layer, as it is now."""
    return tuple((name, None if parameter is None else parameter.shape) for name, parameter in layer._parameters.items())


def has_form(layer: nn.Module, form: Form) -> bool:
    """Whether a layer has this form still."""
    for name, shape in form:
        if name in layer._parameters:
            parameter = layer._parameters[name]
            if parameter is None and shape is not None:
                parameter = own_parameter(layer, name)
            if (None if parameter is None else parameter.shape) != shape:
                return False
    return True


@dataclass(frozen=True)
class AsFound:
    """Of modules that compute together: the options of those that were tried, and the forms of those whose parameters a pipeline takes."""

    options: tuple[tuple[nn.Module, Options], ...]
    forms: tuple[tuple[nn.Module, Form], ...]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], layers: Iterable[nn.Module]) -> Self:
        return cls(tuple((module, options_of(module)) for module in dict.fromkeys(modules)), tuple((layer, form_of(layer)) for layer in layers))

    def holds(self) -> bool:
        """Whether nothing of it has been set anew."""
        return all([has_form(layer, form) for layer, form in self.forms]) and all([has_options(module, found) for module, found in self.options])


def are_looked_at(modules: Iterable[Any]) -> bool:
    """Whether somebody looks at what one of the modules is called on or gives, or changes it: by a hook of its own or one of all modules, or by
    another forward in its place."""
    if not torch.compiler.is_compiling() and torchs._has_any_global_hook():  # of those the compiler calls none
        return True
    return any([has_hooks(module) or "forward" in vars(module) for module in modules])
