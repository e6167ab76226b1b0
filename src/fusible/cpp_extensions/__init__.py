"""The compiled CPU kernels, and what is needed to add to them.

The extension is loaded by the first use of one of its names, not by importing this package. Where it cannot be loaded (an installation
without a compiler) ``available`` is false, ``reason`` says why, and every native name raises ``BackendError`` with that reason.

``info()`` tells what was chosen; ``build()`` and ``get_include()`` compile a user's own functions against the same binding layer.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusible.cpp_extensions.attempt import why_not
from fusible.cpp_extensions.build import build, get_include
from fusible.errors import BackendError, expected
from fusible.knobs import FUSIBLE_CPU_LEVEL, FUSIBLE_NUM_THREADS

if TYPE_CHECKING:
    from fusible.cpp_extensions._native import *

    available: bool
    reason: str

__all__ = ["available", "build", "get_include", "info", "multiplies_halves", "reason"]

_HERE = frozenset(__all__)


def info() -> dict[str, Any]:
    """What the native kernels are and run on, for reports: level, levels, CPU features, OpenMP, threads, compiler, or the reason of absence."""
    if not _state("available"):
        return {"available": False, "reason": _state("reason")}
    names = ("get_level", "compiled_levels", "usable_levels", "cpu_features", "has_openmp", "get_num_threads", "compiler")
    level, compiled, usable, features, openmp, threads, made_by = (_state(name)() for name in names)
    return {
        "available": True,
        "reason": "",
        "level": level,
        "levels_compiled": compiled,
        "levels_usable": usable,
        "cpu_features": features,
        "openmp": openmp,
        "threads": threads,
        "compiler": made_by,
    }


def multiplies_halves() -> bool:
    """Whether the kernels multiply bfloat16 by instructions of the CPU, at the level in force: by dot products or by tiles."""
    return _state("get_level")() in ("avx512bf16", "amx")


def __getattr__(name: str) -> Any:
    if name.startswith("_") or (not _state("available") and name not in _HERE and name not in _declared()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _state(name)


def _declared() -> set[str]:
    """The native functions by name, where the extension itself cannot be asked."""
    stub = Path(__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    return set(re.findall(r"^def (\w+)", stub, flags=re.MULTILINE))


def _state(name: str) -> Any:
    namespace = globals()
    if "available" not in namespace:
        namespace.update(_load())
    if name in namespace:
        return namespace[name]
    if namespace["available"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = namespace["reason"]
    raise BackendError(expected("the compiled extension", of=f"fusible.cpp_extensions.{name}", got=missing, do="install with a C++ compiler"))


def _load() -> dict[str, Any]:
    """Loads the extension, after torch so that both use torch's OpenMP runtime, and applies the knobs that concern it."""
    try:
        importlib.import_module("torch")
        native = importlib.import_module("fusible.cpp_extensions._native")
    except ModuleNotFoundError as error:
        missing = f"an installation that was made without a working C++ compiler{why_not()}"
        reason = missing if error.name == f"{__name__}._native" else f"the compiled extension cannot be loaded ({error})"
        return {"available": False, "reason": reason}
    except ImportError as error:
        return {"available": False, "reason": f"the compiled extension cannot be loaded ({error})"}
    highest = FUSIBLE_CPU_LEVEL.get()
    native.set_level(highest if highest in native.usable_levels() else "")
    native.set_num_threads(FUSIBLE_NUM_THREADS.get())
    return {"available": True, "reason": ""} | {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}
