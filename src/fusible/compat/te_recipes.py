"""Recipes by NVIDIA's names, which scripts change after they have made them, as that package lets them.

Whoever follows a recipe takes it as it is at that moment (``Recipe.settled``): an ``autocast`` when it is made, so that all calls inside are alike.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields
from typing import Any, Self

from fusible import quantized
from fusible.errors import NotServedError, check_number, expected

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
]


class _Open(quantized.Recipe):
    """A recipe whose options may be assigned. A value that the recipe cannot have raises, and is not set. Attributes of other names are the
    script's own. It has no hash, and equals a recipe of the same kind with the same options, also one of Fusible's own names."""

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if own.get("_is_immutable"):
            raise FrozenInstanceError(f"cannot assign to field {name!r} of a recipe that is in force: assign to the one that it was taken from")
        options = {field.name for field in fields(self) if field.init}
        if name not in options:
            own[name] = value
            return
        kind: Any = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)  # a script's own class may be made of other arguments
        changed = object.__new__(type(self))
        vars(changed).update(own, **{name: value})
        kind.__init__(changed, **{field.name: getattr(changed, field.name) for field in fields(kind) if field.init})
        own.update({key: found for key, found in vars(changed).items() if key in options})

    def __delattr__(self, name: str) -> None:
        if name in {field.name for field in fields(self)} or vars(self).get("_is_immutable"):
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def immutable(self) -> Self:
        if vars(self).get("_is_immutable"):
            return self
        made = copy.copy(self)
        vars(made)["_is_immutable"] = True
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, quantized.Recipe) or _kind(type(self)) is not _kind(type(other)):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self) if field.compare)

    def __hash__(self) -> int:
        if not vars(self).get("_is_immutable"):
            raise TypeError(f"unhashable type: {type(self).__name__!r}, whose options may change")
        return hash(tuple(getattr(self, field.name) for field in fields(self) if field.compare))


def _kind(cls: type) -> type:
    """For a class of this module the recipe that it derives from; any other class itself."""
    return cls.__bases__[1] if cls.__module__ == __name__ else cls


class DelayedScaling(_Open, quantized.DelayedScaling):
    __doc__ = f"""{quantized.DelayedScaling.__doc__}
    Scripts for older versions of NVIDIA's package give two options more: ``interval``, which has no effect since its version 1.8, and none here; and
    ``override_linear_precision``, which must be False for each product (``NotServedError``).
    """

    def __init__(self, *options: Any, interval: int = 1, override_linear_precision: Any = None, **named: Any) -> None:
        check_number(interval, "interval of DelayedScaling", least=1)
        if any(override_linear_precision if isinstance(override_linear_precision, Sequence) else (override_linear_precision,)):
            of, do = "override_linear_precision of DelayedScaling", "leave it out; a CustomRecipe says which tensors are quantized"
            raise NotServedError(expected("(False, False, False)", of=of, got=override_linear_precision, do=do))
        super().__init__(*options, **named)


functools.update_wrapper(DelayedScaling.__init__, quantized.DelayedScaling.__init__)  # its signature is that of today's options


class Float8CurrentScaling(_Open, quantized.Float8CurrentScaling):
    __doc__ = quantized.Float8CurrentScaling.__doc__


class Float8BlockScaling(_Open, quantized.Float8BlockScaling):
    __doc__ = quantized.Float8BlockScaling.__doc__


class MXFP8BlockScaling(_Open, quantized.MXFP8BlockScaling):
    __doc__ = quantized.MXFP8BlockScaling.__doc__


class NVFP4BlockScaling(_Open, quantized.NVFP4BlockScaling):
    __doc__ = quantized.NVFP4BlockScaling.__doc__


class CustomRecipe(_Open, quantized.CustomRecipe):
    __doc__ = quantized.CustomRecipe.__doc__
