"""Modules that NVIDIA's package would capture in CUDA graphs: without graphs they run eagerly, in the precision that is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from fusible.errors import ArgumentError, DTypeError, NotServedError, check_switch, expected

__all__ = ["run_uncaptured"]

_FORMER = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}
"""By an option of quantization, its former name."""

_OF = "make_graphed_callables"


def run_uncaptured(autocast: Callable[..., AbstractContextManager[Any]], modules: Any, options: Mapping[str, Any]) -> Any:
    """``modules`` (one or a tuple), each with a new ``forward`` that does what its CUDA graph would do: while the module is in the mode, training or
    not, that it is in now, it computes within ``autocast`` by ``options``. These are those of NVIDIA's ``make_graphed_callables``. ``module.reset()``
    undoes it. Options of the capture change nothing, and nothing is run to warm up.

    Raises ``DTypeError`` for what is no module, ``ArgumentError`` for an option under both of its names, or ``enabled`` of another number of modules,
    ``NotServedError`` for ``_order``, the schedule of a pipeline that graphs are replayed by. Nothing is changed then.
    """
    each = modules if isinstance(modules, tuple) else (modules,)
    for module in each:
        if not isinstance(module, nn.Module):
            raise DTypeError(expected("modules", of=_OF, got=type(module).__name__, do="pass a module, or a tuple of them"))
    if options.get("_order") is not None:
        raise NotServedError(expected("no _order", of=f"{_OF} without CUDA graphs", got="some", do="call the layers in the order of the schedule"))
    asked = {name: _asked(name, former, options) for name, former in _FORMER.items()}
    del asked["cache_quantized_params"]  # each call is told by is_first_microbatch
    enabled = asked.pop("enabled") or False
    switches = enabled if isinstance(enabled, tuple) else (enabled,) * len(each)
    if len(switches) != len(each):
        got, do = len(switches), "pass one for each, or one for all"
        raise ArgumentError(expected(f"{len(each)} of enabled", of=f"the modules of {_OF}", got=got, do=do))
    for switch in switches:
        check_switch(switch, f"enabled of {_OF}")
    asked["calibrating"] = asked["calibrating"] or False
    autocast(enabled=any(switches), **asked)  # which refuses what it cannot serve
    for module, switch in zip(each, switches, strict=True):
        captured = _AsCaptured(module, partial(autocast, enabled=switch, **asked))
        module.forward, module.reset = captured, captured.reset  # type: ignore[method-assign]
    return modules


def _asked(name: str, former: str, options: Mapping[str, Any]) -> Any:
    value, old = options.get(name), options.get(former)
    if value is not None and old is not None:
        raise ArgumentError(expected(f"{name} alone", of=_OF, got=f"{former} too, its former name", do="leave that out"))
    return old if value is None else value


class _AsCaptured:
    """The ``forward`` of a module that computes ``within`` a context while the module is in the mode that it was in. A copy of the module has one of
    its own, which computes by the copy's parameters."""

    def __init__(self, module: nn.Module, within: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module, self._forward, self._training, self._within = module, module.forward, module.training, within
        if isinstance(self._forward, _AsCaptured) and self._forward._training == module.training:  # the latest one holds
            self._forward = self._forward._forward
        self._former = {name: vars(module)[name] for name in ("forward", "reset") if name in vars(module)}

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsCaptured:
        made = object.__new__(_AsCaptured)
        memo[id(self)] = made
        # A group of processes is none that can be copied, nor need what is computed within be.
        vars(made).update({name: value if name == "_within" else copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._within() if self._module.training == self._training else nullcontext():
            return self._forward(*args, **kwargs)

    def reset(self) -> None:
        """Undo it: the module is as before."""
        del self._module.forward, self._module.reset
        for name, former in self._former.items():
            setattr(self._module, name, former)
