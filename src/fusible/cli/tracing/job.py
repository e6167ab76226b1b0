"""Running a script and watching what it evaluates and compiles."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from fusible.cli.console import make_console
from fusible.cli.tracing.view import ProgramView
from fusible.errors import ArgumentError, expected
from fusible.lazy.evaluation.compiler import watching

__all__ = ["trace_script"]


def trace_script(options: argparse.Namespace) -> int:
    """Run ``options.script`` with ``options.args`` as ``__main__`` and print its programs; return 0, or 1 where it raised.

    Its traceback is then on the error stream, from its own first line on. Raises ``ArgumentError`` where there is no such file.
    """
    script = Path(options.script)
    if not script.is_file():
        raise ArgumentError(expected("a Python file", of="fusible trace", got=options.script, do="name the script to run"))
    before = sys.argv, sys.path[:]
    sys.argv = [options.script, *options.args]
    sys.path.insert(0, str(script.resolve().parent))
    view = ProgramView(make_console(), optimized=options.optimized)
    try:
        with watching(view.show):
            runpy.run_path(options.script, run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != options.script:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace or error.__traceback__), trace or error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    view.summarize()
    return 0
