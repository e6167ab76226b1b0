"""Compiles a user's own native functions against Fusible's binding layer.

A source file includes ``fusible/module.hpp`` and writes ``FUSIBLE_MODULE(name, m) { m.def("f", wrap(f)); }``; see ``build``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fusible.errors import BackendError, CompileError, expected

__all__ = ["build", "get_include"]

_COMPILERS = ("c++", "g++", "clang++")
_PREFIX = "fusible_"
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden")


def get_include() -> Path:
    """The directory that holds ``fusible/module.hpp`` and the headers that it needs.

    Raises ``BackendError`` where the package was installed without its compiled extension, and so without headers.
    """
    spec = importlib.util.find_spec("fusible.cpp_extensions._native")
    if spec is None or spec.origin is None:
        got = "a pure Python installation"
        raise BackendError(expected("the compiled extension", of="fusible.cpp_extensions", got=got, do="install with a C++ compiler"))
    return Path(spec.origin).parent / "include"


def build(
    name: str,
    sources: Sequence[str | Path],
    *,
    directory: str | Path | None = None,
    flags: Sequence[str] = (),
    compiler: str | None = None,
) -> ModuleType:
    """Compiles ``sources`` into the extension module ``name`` and imports it.

    ``directory`` receives the library (default: a temporary one, which goes when the library is loaded); ``flags`` are given to the compiler last;
    ``compiler`` is a program (default: the first of c++, g++, clang++ on the path). pybind11's headers come from the installed package.

    Raises ``BackendError`` where there is no compiler or no pybind11, ``CompileError`` with the compiler's output where it fails.
    """
    program = _find_compiler(compiler)
    if directory is None:
        _sweep()
        # A library that is loaded needs its file no longer; and hooks of a process that is killed, or ends by os._exit, are not called.
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}_", ignore_cleanup_errors=True) as made:
            return build(name, sources, directory=made, flags=flags, compiler=program)
    target = Path(directory) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [get_include(), _pybind11_include(), Path(sysconfig.get_path("include"))]
    command = [program, *_FLAGS, *(f"-I{path}" for path in includes), *map(str, sources), "-o", str(target), *flags]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        status = f"exit status {finished.returncode} of {program}"
        sentence = expected("sources that compile", of=f"the extension {name!r}", got=status, do="mend what it reports")
        raise CompileError(f"{sentence}\n{finished.stderr.strip()}")
    return _load(name, target)


def _sweep() -> None:
    """Remove the temporary directories of processes that were killed while they compiled."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("_")[0]
        if owner.isdigit() and not _runs(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _find_compiler(compiler: str | None) -> str:
    for candidate in (compiler,) if compiler else _COMPILERS:
        if found := shutil.which(candidate):
            return found
    raise BackendError(expected("a C++ compiler", of="the search path", got=f"no {compiler or ', '.join(_COMPILERS)}", do="install g++ or clang++"))


def _pybind11_include() -> Path:
    spec = importlib.util.find_spec("pybind11")
    if spec is None or spec.origin is None:
        raise BackendError(expected("the headers", of="pybind11", got="no such package", do="install pybind11"))
    return Path(spec.origin).parent / "include"


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
