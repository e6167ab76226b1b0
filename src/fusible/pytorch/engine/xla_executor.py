"""``XlaExecutor``: each pass recorded once on lazy tensors, and run as one compiled program from then on."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy.engine.engine import Program as Loaded
from fusible.lazy.engine.host import ALIGNMENT, pointer, view
from fusible.lazy.engine.pjrt import host_view, shares
from fusible.locks import Lock
from fusible.pytorch.engine.program import Program
from fusible.tex.backends.xla.kv_cache import in_place
from fusible.tex.backends.xla.native import kernels_of
from fusible.tex.calls.seeds import draw_seeds, supplying
from fusible.tex.selection.dispatch import recording_whole

__all__ = ["XlaExecutor", "read_tensor"]

_DTYPES: dict[torch.dtype, lazy.dtype] = {
    getattr(torch, name): getattr(lazy, name) for name in ("float32", "float16", "bfloat16", "int32", "int64", "uint8")
}

_BFLOAT16 = lazy.bfloat16.numpy
_CAPACITY = 256


_results: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
"""The buffers whose memory results have, by the address, the shape and the dtype of these: what forward keeps for backward is not placed again."""


class _Compiled:
    """A recorded program: its executable (None where it computes nothing), and where each of its results comes from.

    ``sources``: per result, ``i`` for the executable's output i, ``-1 - i`` for input i as it came, or as the program has written to it.
    ``seeds``: how many the program draws; they are its last input. ``kernels``: the native functions that it calls, and how often.
    """

    def __init__(self, executable: lazy.Executable | None, recorded: _Recorded, kernels: Counter[str]) -> None:
        self.sources, self.static, self.seeds, self.kernels = tuple(recorded.sources), recorded.static, recorded.seeds, kernels
        self._written = tuple(recorded.written)
        self._fetched = range(max(self.sources, default=-1) + 1)
        self._program = None if executable is None else executable.usual_program
        self._placed: dict[int, tuple[Hashable, Any]] = {}
        """Where each input lay at the last call, and the buffer of that memory, which it does not keep: it is for a tensor that lies there again, and
        one that was freed or moved is not kept for a program that may never run again."""

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        if self._program is not None:
            program, constants = self._program
            operands = [*inputs, draw_seeds(self.seeds)] if self.seeds else inputs
            placed = [self._buffer(program, i, x) for i, x in enumerate(operands)]
            buffers = program.launch(placed + constants)
            for i in self._written:
                if not inputs[i].is_contiguous() or inputs[i].data_ptr() % ALIGNMENT:
                    inputs[i].copy_(_tensor(host_view(placed[i], *program.inputs[i])))
            for i in self._fetched:
                output = _tensor(program.fetch(i, buffers[i]))
                _results[_place(output)] = buffers[i]
                outputs.append(output)
        return [outputs[source] if source >= 0 else inputs[-1 - source] for source in self.sources]

    def _buffer(self, program: Loaded, i: int, x: torch.Tensor) -> Any:
        """The engine's buffer of an input, which shares its memory where that is aligned: the one that there is, of a result or of the last call."""
        if not x.is_contiguous() or x.is_neg():
            return program.put(i, read_tensor(x))
        place = _place(x)
        former, buffer = self._placed.get(i, (None, None))
        if former == place:
            return buffer
        found = _results.get(place)
        if found is not None:
            return found
        array = read_tensor(x)
        if not shares(array, _DTYPES[x.dtype]):
            return program.put(i, array)
        buffer = program.put(i, view(pointer(array), array.shape, array.dtype, None))
        self._placed[i] = place, buffer
        return buffer


def _place(x: torch.Tensor) -> Hashable:
    return x.data_ptr(), x.shape, x.dtype


def read_tensor(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The array that shares the memory of ``x`` (of its copy where it is strided). By its address: DLPack takes twice as long, and a tensor that has
    given its ``numpy()`` can never be freed by its storage again, as FSDP2 frees parameters."""
    x = x.detach().resolve_neg().contiguous()
    return view(x.data_ptr(), tuple(x.shape), _DTYPES[x.dtype].numpy, x)


def _tensor(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """The tensor that shares the memory of an array and keeps it alive."""
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == _BFLOAT16 else torch.from_numpy(x)


class XlaExecutor:
    """Runs a program as one executable per key, shapes and dtypes. Safe under threads.

    Tensors are read and returned without copies (a strided one is made contiguous first), and a result that is an input is that very tensor.
    ``compiled`` counts the programs recorded so far; the last 256 used are kept. Raises ``DTypeError`` or ``ArgumentError`` for a tensor that no
    program can take, and ``ForkError`` in a forked child of a process that has compiled.
    """

    name = "xla"
    whole = True
    in_place = False

    def __init__(self) -> None:
        self.compiled = 0
        self._programs: OrderedDict[Hashable, _Compiled] = OrderedDict()
        self._lock = Lock()

    def describe(self) -> list[str]:
        """The lines of what the programs compiled so far call of the native kernels; the rest is XLA's own code."""
        with self._lock:
            kernels = sum((compiled.kernels for compiled in self._programs.values()), Counter[str]())
        called = ", ".join(f"{name} {count}" for name, count in sorted(kernels.items()))
        return ["", f"{len(self._programs)} programs compiled by XLA, with native calls: {called or 'none'}"] if self._programs else []

    def __call__(self, key: Hashable, program: Program, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        full_key = (key, tuple([(x.shape, x.dtype, x.is_cpu) for x in inputs]))
        with self._lock:
            compiled = self._programs.get(full_key)
            if compiled is not None:
                self._programs.move_to_end(full_key)
            else:
                compiled = self._programs[full_key] = _compile(program, inputs)
                self.compiled += 1
                if len(self._programs) > _CAPACITY:
                    self._programs.popitem(last=False)
        return compiled(inputs), compiled.static


def _info(x: torch.Tensor) -> lazy.InputInfo:
    if x.dtype not in _DTYPES:
        wanted = "fp32, fp16, bf16, int32, int64 or uint8"
        got, do = str(x.dtype).removeprefix("torch."), "cast it, or use executor='eager'"
        raise DTypeError(expected(wanted, of="a tensor of a compiled pass", got=got, do=do))
    if not x.is_cpu:
        raise ArgumentError(expected("a tensor in host memory", of="a compiled pass", got=f"one on {x.device}", do="move the model and its input"))
    return lazy.InputInfo(tuple(x.shape), _DTYPES[x.dtype])


def _compile(program: Program, inputs: list[torch.Tensor]) -> _Compiled:
    """Record ``program`` on placeholders of the inputs' types, and compile what it computes; one that draws seeds again, with these as an input."""
    infos = [_info(x) for x in inputs]
    recorded = _Recorded(program, len(inputs))
    try:
        with recording_whole():
            executable = lazy.compile(recorded, args=infos)
    except _DrawsSeeds:
        seeds = lazy.InputInfo((recorded.seeds,), lazy.int64)
        recorded = _Recorded(program, len(inputs))
        executable = lazy.compile(recorded, args=[*infos, seeds])
    return _Compiled(executable if recorded.computes else None, recorded, kernels_of(executable.flat_ir))


class _DrawsSeeds(Exception):
    """A program draws seeds, and none are among its inputs."""


class _Recorded:
    """``program`` as a function of lazy tensors: its ``count`` inputs, and the seeds that it draws. Raises ``_DrawsSeeds`` at its end where it drew
    ``seeds`` that are not there. ``computes``: whether it gives more than its inputs; ``written``: which of these it writes to."""

    def __init__(self, program: Program, count: int) -> None:
        self.program, self.count = program, count
        self.sources: list[int] = []
        self.static: Any = None
        self.seeds = 0
        self.computes = False
        self.written: set[int] = set()

    def __call__(self, *arguments: lazy.Tensor) -> list[lazy.Tensor]:
        leaves, seeds = list(arguments[: self.count]), arguments[self.count :]
        places = {leaf.trace_tensor: -1 - i for i, leaf in enumerate(leaves)}

        def supply() -> lazy.Tensor:
            self.seeds += 1
            return seeds[0][self.seeds - 1 : self.seeds] if seeds else lazy.zeros((1,), lazy.int64)

        with supplying(supply), in_place(leaves) as memory:
            results, self.static = self.program(list(leaves))
        if self.seeds and not seeds:
            raise _DrawsSeeds
        computed: list[lazy.Tensor] = []
        for result in results:
            place = places.get(result.trace_tensor)
            found = memory.found(result)
            if place is None and found is not None:
                place = places[found[0].trace_tensor]
            if place is None:
                place = places[result.trace_tensor] = len(computed)
                computed.append(result)
            self.sources.append(place)
        self.written = {-1 - places[x.trace_tensor] for x in memory.written}
        if memory.done:
            computed.append(functools.reduce(lambda a, b: a + b, memory.done))
        self.computes = bool(computed)
        return computed or [leaves[0]]
