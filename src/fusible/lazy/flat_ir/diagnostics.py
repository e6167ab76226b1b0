"""Finding the user's line for what MLIR or an engine reports about an operation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fusible.errors import CompileError, expected
from fusible.lazy.config import config
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.source import excerpt, place_of

if TYPE_CHECKING:
    from fusible.lazy.flat_ir.flat_ir import FlatIR

__all__ = ["VALID", "blamed", "location_name", "op_refusal", "refusal"]

VALID = "a valid StableHLO operation"
"""What errors say that MLIR expected."""

_NAMES = re.compile(r"[a-z0-9_]*:[\w.,]*->([\w.,]+)")
"""The part of a location that names tensors."""

_PLACES = re.compile(r'([^\s"]+)"?:(\d+):(\d+)')
"""The part that names the user's line."""

_LOCATION = re.compile(r'"[^"\s]*->[^"\s]*"\("[^"]*":\d+:\d+\): |loc\("[^"\s]*->[^"\s]*"\("[^"]*":\d+:\d+\)\):? ?')
"""A location as MLIR prints it before a diagnostic, and behind an operation."""

_LONGEST = 600

_SYMBOLS = re.compile(r'[@"]([\w.$:-]{4,})')
"""Names in a module's text: targets of calls, and quoted attributes."""


def location_name(op: FlatIROp) -> str:
    """``label:operands->results``, by the tensors' names."""
    return f"{op.label}:{','.join([t.name for t in op.inputs])}->{','.join([t.name for t in op.outputs])}"


def _all_ops(flat: FlatIR) -> Iterator[FlatIROp]:
    yield from flat.ops
    for function in flat.functions:
        yield from function.ops


def blamed(flat: FlatIR, text: str, module: str = "") -> FlatIROp | None:
    """The operation that a diagnostic is about, or ``None`` where that is unknown.

    Where the diagnostic names tensors, it is the operation that makes one of them. Where it gives a line and a column, it is the first one recorded
    there. Where it gives no location ("no implementation of the custom call to my_target"), it is the only one whose text has such a name.
    ``module`` is the text of the module with locations.
    """
    by_output = {op.outputs[0].name: op for op in _all_ops(flat)}
    found = _named(by_output, text)
    if found is not None:
        return found
    places = {(file, int(line), int(column)) for file, line, column in _PLACES.findall(text)}
    for op in by_output.values() if places else ():
        place = place_of(op.outputs[0].source)
        if (place.file, place.line, place.column + 1) in places:
            return op
    lines = [line for line in module.split("\n") if any(symbol in text for symbol in _SYMBOLS.findall(line.split(" loc(")[0]))]
    return _named(by_output, lines[0]) if len(lines) == 1 else None


def _named(by_output: Mapping[str, FlatIROp], text: str) -> FlatIROp | None:
    names = (found[1].split(",")[0] for found in _NAMES.finditer(text))
    return next((by_output[name] for name in names if name in by_output), None)


def op_refusal(op: FlatIROp, why: object, what: str = VALID) -> CompileError:
    """The error for an operation that is refused: the user's line with carets, then one sentence, then what lowering says of its tensors."""
    out = op.outputs[0]
    sentence = expected(
        what, of=f"{op.label} ({type(op).__name__})", got=_one_line(why), do="change the operation at that line, or report this program"
    )
    lines = [excerpt(out.source), sentence]
    made = [t for t in dict.fromkeys([*op.outputs, *op.inputs]) if t.reason_details]
    lines += [f"    {t}: introduced to {t.reason_details}" for t in made]
    error = CompileError("\n".join(lines))
    error.located = True
    return error


def refusal(flat: FlatIR, why: object, what: str, module: str = "") -> CompileError:
    """The error for a program that MLIR or an engine refuses. It names the operation that is to blame; ``what`` says what was expected of it.

    ``module`` is as for ``blamed``. ``config.extra_error_information`` adds the FlatIR ("flat_ir") and the whole
    diagnostic ("diagnostic").
    """
    op = blamed(flat, str(why), module)
    if op is not None:
        error = op_refusal(op, why, what)
    else:
        error = CompileError(expected(what, of="a recorded program", got=_one_line(why), do="simplify the program, or report it"))
    extra = config.extra_error_information
    if "flat_ir" in extra:
        error.args = (f"{error}\n{_marked(flat, op)}",)
    if "diagnostic" in extra:
        error.args = (f"{error}\n{why}",)
    return error


def _marked(flat: FlatIR, op: FlatIROp | None) -> str:
    lines = str(flat).split("\n")
    return "\n".join(f"-> {line}" if op is not None and line.strip() == str(op) else line for line in lines)


def _one_line(why: object) -> str:
    """A diagnostic in one line, without the locations: the user's line stands before it."""
    return " ".join(_LOCATION.sub("", str(why)).split())[:_LONGEST].removesuffix(".")
