"""Who runs a pass: eagerly, call by call, or as one compiled program."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fusible import tex
from fusible.errors import ArgumentError, BackendError, check_callable, check_switch, check_text, expected
from fusible.pytorch.engine.listing import Listing, deduplicate
from fusible.pytorch.engine.program import Executor, Program
from fusible.pytorch.engine.replay import Replay
from fusible.tex.selection.scope import current_scope

__all__ = ["DIRECT", "EagerExecutor", "make_executor", "register_executor"]

_KEPT = 1024
"""Listed programs per executor; one is a few kilobytes."""


class EagerExecutor:
    """Calls each kernel as the pass comes to it.

    The second run of a program on a shape is recorded; from the third on its tex calls are made directly, without the Python around them
    (``replay``). A program that computes elsewhere than by tex is always run as it stands.
    """

    name = "eager"
    whole = False
    in_place = True

    def __init__(self) -> None:
        self._replays: OrderedDict[Hashable, Replay | None] = OrderedDict()
        """By program, shape, and the policy of a ``with`` around the call, if any; None for one that has run once."""
        self._unlistable: set[Hashable] = set()

    def __call__(self, key: Hashable, program: Program, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        shaped = (key, inputs[0].shape, current_scope())
        replay = self._replays.get(shaped)
        if replay is not None and replay.epoch == tex.registry.epoch:
            return replay.run(inputs), replay.static
        if key in self._unlistable:
            return program(inputs)
        if shaped not in self._replays:
            self._keep(shaped, None)
            return program(inputs)
        epoch, own = tex.registry.epoch, deduplicate(inputs)
        inputs.clear()
        listing = Listing(own)
        with tex.listening(listing.note):
            outputs, static = program(own)
        listed = listing.finish(outputs, static, epoch)
        if listed is None:
            self._unlistable.add(key)
        else:
            self._keep(shaped, listed)
        return outputs, static

    def _keep(self, key: Hashable, replay: Replay | None) -> None:
        self._replays[key] = replay
        while len(self._replays) > _KEPT:
            self._replays.popitem(last=False)


class _Direct:
    """Runs a program as it stands, each time."""

    name = "eager"
    whole = False
    in_place = True

    def __call__(self, key: Hashable, program: Program, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        return program(inputs)


DIRECT = _Direct()
"""For programs that compute elsewhere than by tex."""


def _xla() -> Executor:
    if importlib.util.find_spec("jaxlib") is None:
        raise BackendError(expected("jaxlib", of="the executor 'xla'", got="no such package", do="install fusible[xla], or use executor='eager'"))
    from fusible.pytorch.engine.xla_executor import XlaExecutor  # noqa: PLC0415 - for what it costs: it brings jaxlib, which eager users need not have

    return XlaExecutor()


_EXECUTORS: dict[str, Callable[[], Executor]] = {"eager": EagerExecutor, "xla": _xla}


def register_executor(name: str, make: Callable[[], Executor], *, replace: bool = False) -> None:
    """Make an executor available as ``Sequential.compile(executor=name)``. Raises ``ArgumentError`` for a name that is taken, unless ``replace``."""
    check_text(name, "name of register_executor")
    check_callable(make, "make of register_executor")
    check_switch(replace, "replace of register_executor")
    if name in _EXECUTORS and not replace:
        do = "choose another name, or pass replace=True"
        raise ArgumentError(expected("a new name", of="register_executor", got=f"{name!r} again", do=do))
    _EXECUTORS[name] = make


def make_executor(name: str) -> Executor:
    """A new executor. Raises ``ArgumentError`` for an unknown name."""
    if name not in _EXECUTORS:
        raise ArgumentError(expected(f"one of {', '.join(_EXECUTORS)}", of="the executor", got=repr(name), do="name one of these"))
    return _EXECUTORS[name]()
