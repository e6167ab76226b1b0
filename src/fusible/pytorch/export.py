"""A module's inference pass as a file that runs without the module: its parameters and scales are constants of a saved executable."""

from __future__ import annotations

from collections.abc import Hashable
from os import PathLike
from typing import Any

import torch

from fusible import lazy
from fusible.errors import ArgumentError, expected
from fusible.pytorch.engine.autocast import current_autocast
from fusible.pytorch.engine.program import Program
from fusible.pytorch.engine.xla_executor import read_tensor
from fusible.pytorch.modules.base import BaseModule

__all__ = ["export"]


class _Exporting:
    """An executor that runs the pass as it stands, and compiles it as a function of its first input alone."""

    name = "xla"
    whole = True
    in_place = False

    def __init__(self, shape: torch.Size) -> None:
        self.shape = tuple(shape)
        self.executable: lazy.Executable | None = None

    def __call__(self, key: Hashable, program: Program, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if isinstance(key, tuple) and "weights" in key:  # they are quantized here, and constants of the program
            return program(inputs)
        flat, weights = tuple(inputs[0].shape), [lazy.Tensor(read_tensor(x)) for x in inputs[1:]]

        def inference(x: lazy.Tensor) -> lazy.Tensor:
            y = program([lazy.reshape(x, flat), *weights])[0][0]
            return lazy.reshape(y, (*self.shape[:-1], y.shape[-1]))

        dtype = lazy.Tensor(read_tensor(inputs[0][:1])).dtype
        self.executable = lazy.compile(inference, args=[lazy.InputInfo(self.shape, dtype)])
        return program(inputs)


def export(module: BaseModule, path: str | PathLike[str], x: torch.Tensor) -> None:
    """Write the inference pass of ``module`` on inputs of the shape and dtype of ``x`` to ``path``, under the ``autocast`` in force.

    ``fusible.lazy.Executable.load(path)`` reads it, in a process that needs neither torch nor the module's source: a function of one tensor, of
    ``x``'s shape. Weights are held as the pass reads them, 8-bit ones quantized. Raises ``ArgumentError`` for a module that calls other modules
    between its passes, and what a compiled pass raises.
    """
    if not isinstance(module, BaseModule) or not module.open:
        raise _of_several(module, "calls of several" if isinstance(module, BaseModule) else "a module of its own")
    exporting = _Exporting(x.shape)
    runner = module._runner()
    called = runner.uncompilable(current_autocast().recipe)
    if called:
        of, do = f"the module {type(module).__name__} to export", "export what is before it, or after it"
        raise ArgumentError(expected("operations of ours alone", of=of, got=called, do=do))
    former, runner.executor = runner.executor, exporting
    try:
        with torch.no_grad():
            module(x)
    finally:
        runner.executor = former
    if exporting.executable is None:
        raise _of_several(module, "calls of several")
    exporting.executable.save(path)


def _of_several(module: object, got: str) -> ArgumentError:
    of, do = f"the module {type(module).__name__} to export", "export a Sequential"
    return ArgumentError(expected("one pipeline of operations", of=of, got=got, do=do))
