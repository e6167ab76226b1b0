"""Running a script as ``python script.py`` does, with Fusible under the names it imports."""

from __future__ import annotations

import argparse
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

from fusible.compat.device_map import cuda_on_cpu
from fusible.compat.names import install
from fusible.errors import ArgumentError, expected

__all__ = ["run_script"]


def run_script(options: argparse.Namespace) -> int:
    """Run ``options.script`` with ``options.args`` as ``__main__`` and return 0, or 1 where it raised: its traceback is on the error stream.

    ``options.device`` is ``"cpu"`` for ``cuda_on_cpu``, or None; ``options.replace``, ``options.replace_package`` and ``options.tripy`` are
    those of ``install``.
    ``SystemExit`` and ``KeyboardInterrupt`` pass. Raises ``ArgumentError`` where there is no such file.
    """
    script = Path(options.script)
    if not script.is_file():
        raise ArgumentError(expected("a Python file", of="fusible run", got=options.script, do="name the script to run"))
    install(replace=options.replace, replace_package=options.replace_package, tripy=options.tripy)
    sys.argv = [options.script, *options.args]
    if not sys.flags.safe_path:  # then its first entry is the directory of whoever started Python
        sys.path[0] = str(script.resolve().parent)
    with cuda_on_cpu() if options.device == "cpu" else nullcontext():
        try:
            runpy.run_path(options.script, run_name="__main__")
        except Exception as error:
            _show(error, options.script)
            return 1
    return 0


def _show(error: Exception, script: str) -> None:
    """The traceback from the script's own first line on, as Python shows it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    error = error.with_traceback(trace or (None if isinstance(error, SyntaxError) else error.__traceback__))
    sys.excepthook(type(error), error, error.__traceback__)
