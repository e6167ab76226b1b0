"""Engine binaries on disk, by the text of their module."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fusible.errors import CheckpointError, FileError, MissingFileError
from fusible.files import make_folder, read_file, replace_file
from fusible.lazy.engine.engine import Engine, EngineRefusal, Program, Types
from fusible.lazy.logger import logger
from fusible.lazy.stablehlo.module import StableHLO

__all__ = ["load_or_compile"]

_DIGEST = hashlib.sha256().digest_size


def load_or_compile(directory: str, engine: Engine, module: StableHLO, inputs: Types, outputs: Types, level: int) -> Program:
    """The program of ``module`` from its file in ``directory``. Without a file it is compiled, and written there.

    A file is named by the engine's fingerprint and the module's text. The text has no source lines, so a program that moves in its source file keeps
    its name. A file that is truncated, altered or refused by the engine is replaced by a new compilation, with a warning. Where no file can be
    written there is a warning too, and the program is returned all the same.
    """
    name = hashlib.sha256(f"{engine.NAME}\n{engine.fingerprint()}\n{level}\n{module.text}".encode()).hexdigest()
    path = Path(directory) / f"{name}.bin"
    program = _load(path, engine, inputs, outputs)
    if program is None:
        program = engine.compile(getattr(module, engine.ARTIFACT), inputs, outputs, level)
        _write(path, program.serialize())
    return program


def _load(path: Path, engine: Engine, inputs: Types, outputs: Types) -> Program | None:
    try:
        data = read_file(path)
    except MissingFileError:
        return None
    except CheckpointError as error:
        logger.warning(f"{path} is not used: {error}")
        return None
    digest, binary = data[:_DIGEST], data[_DIGEST:]
    if hashlib.sha256(binary).digest() != digest:
        logger.warning(f"{path} is damaged and is written anew")
        return None
    try:
        return engine.load(binary, inputs, outputs)
    except EngineRefusal as error:
        logger.warning(f"{path} is written anew: {' '.join(error.reason.split())}")
        return None


def _write(path: Path, binary: bytes) -> None:
    """Whole or not at all: other processes may read it."""
    try:
        make_folder(path.parent)
        replace_file(path, hashlib.sha256(binary).digest() + binary)
    except FileError as error:
        logger.warning(f"{path} is not written: {error}")
