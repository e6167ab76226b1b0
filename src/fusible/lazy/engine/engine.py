"""The interface of execution engines. An engine compiles a StableHLO module, runs it on host arrays, and writes and reads its binary."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fusible.errors import CompileError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.logger import logger
from fusible.lazy.printing import Shape

__all__ = ["Engine", "EngineRefusal", "Program", "Types"]

Types = Sequence[tuple[Shape, dtype]]
"""Shape and dtype of every input, or of every output."""

Array = np.ndarray[Any, Any]


class EngineRefusal(CompileError):
    """An engine refuses to compile or load a module.

    ``reason`` is the engine's diagnostic, from which the operation to blame is found; ``wanted`` says what the engine takes.
    """

    def __init__(self, wanted: str, reason: str) -> None:
        super().__init__(expected(wanted, of="a recorded program", got=" ".join(reason.split()), do="simplify the program, or report it"))
        self.wanted = wanted
        self.reason = reason


class Program(ABC):
    """A compiled module. Calling it runs it on host arrays and returns host arrays that it alone owns.

    A program trusts its caller for dtypes and shapes (engines check little more than byte sizes): ``Executable`` checks them. Every array must be
    C-contiguous. A call returns when its results are ready and its operands are no longer read. Calls may come from several threads.
    """

    inputs: tuple[tuple[Shape, dtype], ...]
    outputs: tuple[tuple[Shape, dtype], ...]

    @abstractmethod
    def put(self, index: int, array: Array) -> Any:
        """The buffer for input ``index``. It shares the memory of ``array``, and keeps it, where the engine can read that."""

    @abstractmethod
    def fetch(self, index: int, buffer: Any) -> Array:
        """The writable host array of the buffer of output ``index``."""

    @abstractmethod
    def execute(self, buffers: Sequence[Any]) -> list[Any]:
        """Run on buffers, and wait. The results are buffers, which may be inputs of any program."""

    @abstractmethod
    def serialize(self) -> bytes:
        """The binary that ``Engine.load`` of the same engine, version and processor takes."""

    def launch(self, buffers: Sequence[Any]) -> list[Any]:
        """``execute``, timed on the logger's channel where that is shown."""
        if logger.times:
            with logger.timed("execution"):
                return self.execute(buffers)
        return self.execute(buffers)

    def run(self, buffers: Sequence[Any]) -> list[Array]:
        """``launch``, with the results as host arrays."""
        return [self.fetch(i, buffer) for i, buffer in enumerate(self.launch(buffers))]

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        return self.run([self.put(i, array) for i, array in enumerate(arrays)])


class Engine(ABC):
    """``NAME`` is what ``config.engine`` calls it; ``ARTIFACT`` the form of StableHLO that it takes: ``bytecode``, or ``portable`` (VHLO)."""

    NAME: ClassVar[str]
    ARTIFACT: ClassVar[str] = "portable"

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the engine cannot be used here, or nothing."""

    @abstractmethod
    def fingerprint(self) -> str:
        """The versions, options and processor that a binary is bound to: it loads only where the fingerprint is equal."""

    def tag(self) -> str:
        """The engine and a digest of its fingerprint."""
        return f"{self.NAME} {hashlib.sha256(self.fingerprint().encode()).hexdigest()[:16]}"

    @abstractmethod
    def compile(self, artifact: bytes, inputs: Types, outputs: Types, level: int = 3) -> Program:
        """The program of a module whose ``main`` has these inputs and outputs. ``level``: the effort, 0 to 3. Raises ``EngineRefusal``."""

    @abstractmethod
    def load(self, binary: bytes, inputs: Types, outputs: Types) -> Program:
        """The program of what ``Program.serialize`` gave. It is machine code: load only what you wrote. Raises ``EngineRefusal``."""
