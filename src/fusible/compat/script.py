"""Running a script as ``python script.py`` does, or a module as ``python -m module``, with Fusible under the names it imports."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fusible import knobs
from fusible.compat.device_map import cuda_on_cpu
from fusible.compat.names import install
from fusible.errors import ArgumentError, expected

__all__ = ["Service", "run_script", "serve_child"]

_SITE = str(Path(__file__).with_name("site"))


@dataclass(frozen=True)
class Service:
    """What is done for a program: the options of ``fusible run``. ``device`` is ``"cpu"`` for ``cuda_on_cpu``, at ``capability``, or None; the others
    are those of ``install``."""

    device: str | None = None
    capability: tuple[int, int] = (9, 0)
    replace: bool = False
    replace_package: bool = False
    tripy: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Service:
        """The service that a command line asks for; options that it lacks have their defaults."""
        return cls(**{f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)})

    @contextmanager
    def serving(self) -> Iterator[None]:
        """In this process, and for as long as the context is open. The names stay afterwards."""
        install(replace=self.replace, replace_package=self.replace_package, tripy=self.tripy)
        with ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(cuda_on_cpu(self.capability))
            yield

    @contextmanager
    def for_children(self) -> Iterator[None]:
        """The Python processes that are started while the context is open are served too: they find ``site/sitecustomize.py``, and it the knob."""
        text = json.dumps(asdict(self))
        with knobs.replacing("PYTHONPATH", _with_site), knobs.replacing(knobs.FUSIBLE_RUN.name, lambda _: text):
            yield


def _with_site(path: str | None) -> str:
    return os.pathsep.join(filter(None, (_SITE, path)))


_served = ExitStack()


def serve_child() -> None:
    """Serve this process as ``fusible run`` served the one that started it, until it ends."""
    asked: dict[str, Any] | None = knobs.FUSIBLE_RUN.get()
    if asked is not None:
        _served.enter_context(Service(**{**asked, "capability": tuple(asked["capability"])}).serving())


def run_script(options: argparse.Namespace) -> int:
    """Run ``options.script`` with ``options.args`` as ``__main__``, or ``options.module``, a list of a module's name and its arguments, and return 0,
    or 1 where it raised: its traceback is on the error stream.

    The other options are those of ``Service``; the Python processes that the program starts are served as it is. ``SystemExit`` and
    ``KeyboardInterrupt`` pass. Raises ``ArgumentError`` where there is no such file or module.
    """
    module: list[str] | None = getattr(options, "module", None)
    name, *args = module if module else [options.script, *options.args]
    if not name:
        raise ArgumentError(expected("a script, or -m and a module", of="fusible run", got="none", do="name what to run"))
    file = _file_of_module(name) if module else _file_of_script(name)
    service = Service.of(options)
    with service.for_children(), service.serving():
        sys.argv = [str(file) if module else name, *args]
        _look_first_in(os.getcwd() if module else str(file.resolve().parent))
        try:
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except Exception as error:
            _show(error, sys.argv[0])
            return 1
    return 0


def _look_first_in(folder: str) -> None:
    if not sys.flags.safe_path:  # then the first entry is the directory of whoever started Python
        sys.path[0] = folder


def _file_of_script(name: str) -> Path:
    if not Path(name).is_file():
        raise ArgumentError(expected("a Python file", of="fusible run", got=name, do="name the script to run"))
    return Path(name)


def _file_of_module(name: str) -> Path:
    """The file that ``python -m name`` runs. Raises ``ArgumentError`` where there is none."""
    former = sys.path[0]
    _look_first_in(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[0] = former
    if spec is None or spec.origin is None:
        raise ArgumentError(expected("a module that can be run", of="fusible run -m", got=name, do="name one as python -m takes it"))
    return Path(spec.origin)


def _show(error: Exception, script: str) -> None:
    """The traceback from the script's own first line on, as Python shows it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    error = error.with_traceback(trace or (None if isinstance(error, SyntaxError) else error.__traceback__))
    sys.excepthook(type(error), error, error.__traceback__)
