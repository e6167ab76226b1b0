"""Prints a program in its three forms, side by side or one below the other. Each line of the script precedes the operations that it recorded."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fusible.errors import FusibleError
from fusible.lazy import FlatIR, Trace
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.source import Source, place_of, user_frame

__all__ = ["ProgramView", "SIDE_BY_SIDE"]

SIDE_BY_SIDE = 150
"""The least width at which the three forms are printed side by side."""


class ProgramView:
    """Prints programs to ``console`` as they are asked for; with ``optimized``, the FlatIR and the module after the passes."""

    def __init__(self, console: Console, *, optimized: bool = False) -> None:
        self._console = console
        self._optimized = optimized
        self._seen: dict[object, str] = {}
        self._counts = {"evaluation": 0, "compilation": 0}

    def show(self, kind: str, trace: Trace) -> None:
        """Print one program: a watcher for ``fusible.lazy.evaluation.compiler.watching``."""
        self._counts[kind] += 1
        name = f"{kind} {self._counts[kind]}"
        known = self._seen.setdefault(trace.key(), name)
        self._console.print(Rule(Text(" ".join([name, *self._asked_for()])), align="left", characters="-"))
        if known != name:
            self._console.print(Text(f"the program of {known}"), soft_wrap=True)
            return
        flat = trace.to_flat_ir()
        if self._optimized:
            flat = flat.run(*DEFAULT_PASSES)
        self._columns([_trace_lines(trace), _flat_lines(flat), _module_text(flat)])
        for report in flat.report:
            self._console.print(Text(str(report)), soft_wrap=True)

    def summarize(self) -> None:
        """Print how many programs there were."""
        counts = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in self._counts.items())
        self._console.print(Text(f"{counts}; {len(self._seen)} programs" if len(self._seen) != 1 else f"{counts}; 1 program"))

    def _asked_for(self) -> list[str]:
        """The line of the user's program that asks for the value, outside of Fusible's frames."""
        frame = user_frame(sys._getframe(1))
        while frame is not None and "fusible" + os.sep + "cli" + os.sep in frame.f_code.co_filename:
            frame = user_frame(frame.f_back)
        return [] if frame is None else ["at", _line((frame.f_code, frame.f_lasti))]

    def _columns(self, texts: list[str]) -> None:
        if self._console.width < SIDE_BY_SIDE:
            for text in texts:
                self._console.print(Text(text), soft_wrap=True)
            return
        table = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in texts:
            table.add_column(overflow="fold", ratio=1)
        table.add_row(*map(Text, texts))
        self._console.print(table)


def _line(source: Source) -> str:
    """``script.py:3: out.eval()``."""
    place = place_of(source)
    return _spelled(place.file, place.line)


def _spelled(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{os.path.basename(file)}:{line}" + (f": {text}" if text else "")


def _annotated(lines: Iterable[tuple[str, str]]) -> str:
    """Lines of an IR, with a comment before each group that one line of the script recorded. ``lines``: pairs of both, ``""`` where none is known."""
    out: list[str] = []
    current = ""
    for line, recorded in lines:
        if recorded and recorded != current:
            out.append(f"# {recorded}")
        current = recorded
        out.append(line)
    return "\n".join(out)


def _trace_lines(trace: Trace) -> str:
    recorded = {", ".join(trace.names[out] for out in op.outputs): _line(op.outputs[0].source) for op in trace.ops}
    return _annotated((line, recorded.get(line.split(" = ")[0], "")) for line in str(trace).split("\n"))


def _flat_lines(flat: FlatIR) -> str:
    recorded = {str(op): _line(op.outputs[0].source) for op in flat.ops}
    return _annotated((line, recorded.get(line, "")) for line in str(flat).split("\n"))


def _module_text(flat: FlatIR) -> str:
    try:
        module = flat.to_stablehlo()
    except FusibleError as error:  # the script's own evaluation raises it next
        return f"==== StableHLO IR ====\nrefused: {error}"
    title, *lines = str(module).split("\n")
    recorded = ["" if place is None else _spelled(*place) for place in module.recorded]
    return "\n".join([title, _annotated(itertools.zip_longest(lines, recorded, fillvalue=""))])
