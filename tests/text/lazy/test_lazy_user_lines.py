"""The line of the user's that an error begins with, and what its sentence calls things."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, CheckpointError, CompileError, DTypeError, FusibleError, ShapeError

_TWO, _THREE = lazy.ones((2,)), lazy.ones((3,))
_INFOS = [lazy.InputInfo((3,), lazy.float32)]
_COMPILED = lazy.compile(lambda x: x + 1.0, args=_INFOS)


_CASES: list[tuple[type[FusibleError], str, str, Callable[[], object]]] = [
    (
        ShapeError,
        "_TWO @ _THREE",
        "the operands of matmul: expected shapes [..., k] and [k], [k] and [..., k, n], or [k] twice, got float32 [2] (made at",
        lambda: _TWO @ _THREE,
    ),
    (
        ShapeError,
        "_TWO @ lazy.ones(())",
        "the operands of matmul: expected shapes [..., k] and [k], [k] and [..., k, n], or [k] twice, got float32 [2] (made at",
        lambda: _TWO @ lazy.ones(()),
    ),
    (
        ShapeError,
        "lazy.stack([_TWO, _THREE])",
        "the tensors of stack: expected one shape, got float32 [2] (made at",
        lambda: lazy.stack([_TWO, _THREE]),
    ),
    (DTypeError, '"x"', "out_features of Linear: expected an int of at least 0, got 'x'; pass", lambda: lazy.Linear(3, "x")),
    (DTypeError, "1.5", "in_channels of Conv: expected an int of at least 0, got 1.5; pass", lambda: lazy.Conv(1.5, 3, (2, 2))),
    (ShapeError, "-1", "num_embeddings of Embedding: expected an int of at least 0, got -1; pass", lambda: lazy.Embedding(-1, 3)),
    (DTypeError, "None", "num_channels of GroupNorm: expected an int of at least 0, got None; pass", lambda: lazy.GroupNorm(2, num_channels=None)),
    (DTypeError, "[3]", "num_channels of InstanceNorm: expected an int of at least 0, got [3]; pass", lambda: lazy.InstanceNorm([3])),
    (DTypeError, '"3"', "num_features of BatchNorm: expected an int of at least 0, got '3'; pass", lambda: lazy.BatchNorm("3")),
    (
        ShapeError,
        "_COMPILED.run(np.ones(4, np.float32))",
        "x of the executable <lambda>: expected shape (3,), got (4,); reshape it",
        lambda: _COMPILED.run(np.ones(4, np.float32)),
    ),
    (ArgumentError, "_COMPILED.run()", "the executable <lambda>: expected 1 inputs, got 0; pass one per InputInfo.", lambda: _COMPILED.run()),
    (
        CompileError,
        "x.tolist()",
        "an evaluation: expected tensors with values, got one that depends on the argument x of a function being compiled (at",
        lambda: lazy.compile(lambda x: x.tolist(), args=_INFOS),
    ),
    (
        ShapeError,
        "x + _TWO",
        "the operands of add: expected sizes that are equal or 1, counted from the last dimension, got float32 [3] 'x' (made at",
        lambda: lazy.compile(lambda x: x + _TWO, args=_INFOS),
    ),
    (
        CheckpointError,
        "lazy.Executable.load(__file__)",
        f"{__file__}: expected an intact file of Executable.save, got something else; save the executable again.",
        lambda: lazy.Executable.load(__file__),
    ),
    (
        ArgumentError,
        '_COMPILED.save("/nowhere/at/all")',
        "a file to save, /nowhere/at/all: expected a directory that exists, got /nowhere/at; make it first.",
        lambda: _COMPILED.save("/nowhere/at/all"),
    ),
]


@pytest.mark.parametrize("case", range(len(_CASES)))
def test_an_error_marks_what_is_wrong_in_the_users_line(case: int) -> None:
    kind, marked, sentence, call = _CASES[case]
    with pytest.raises(kind) as caught:
        call()
    where, line, carets, said = str(caught.value).split("\n")
    assert where.startswith(f"{__file__}:{call.__code__.co_firstlineno}, in <lambda>")
    assert line[carets.index("^") : carets.rindex("^") + 1] == marked
    assert said.startswith(sentence) or sentence in said


def test_a_file_that_is_not_there_is_pythons_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="program"):
        lazy.Executable.load(tmp_path / "program")
