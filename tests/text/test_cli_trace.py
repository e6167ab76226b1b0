"""What ``fusible trace`` shows of a script."""

from __future__ import annotations

import io
import linecache
from pathlib import Path

import pytest
from rich.console import Console

from fusible.cli import main
from fusible.cli.tracing import job
from fusible.cli.tracing.view import SIDE_BY_SIDE

_SCRIPT = """\
import fusible.lazy as tp

inp = tp.full((2, 3), value=0.5)
out = inp.tanh()
out.eval()
"""

_TRACE = """\
==== Trace IR ====
# seed.py:3: inp = tp.full((2, 3), value=0.5)
t0 = fill(value=0.5, shape=(2, 3), dtype=float32)
# seed.py:4: out = inp.tanh()
t1 = unaryelementwise(t0, kind=Kind.TANH)
outputs:
    t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]"""

_FLAT = """\
==== Flat IR ====
# seed.py:3: inp = tp.full((2, 3), value=0.5)
t_inter1: [shape=(), dtype=(float32), loc=(gpu:0)] = ConstantOp(data=0.5, dtype=float32, device=gpu:0)
t0: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)] = BroadcastOp(t_inter1, broadcast_dim=[])
# seed.py:4: out = inp.tanh()
t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)] = TanhOp(t0)
outputs:
    t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]"""

_STABLEHLO = """\
==== StableHLO IR ====
1: module {
2:   func.func @main() -> tensor<2x3xf32> {
# seed.py:3: inp = tp.full((2, 3), value=0.5)
3:     %cst = stablehlo.constant dense<5.000000e-01> : tensor<f32>
4:     %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x3xf32>
# seed.py:4: out = inp.tanh()
5:     %1 = stablehlo.tanh %0 : tensor<2x3xf32>
6:     return %1 : tensor<2x3xf32>
7:   }
8: }
9:"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lines that the command prints for a script, on a terminal of some width, and its exit code."""

    def run(text: str, width: int, *arguments: str) -> tuple[list[str], int]:
        stream = io.StringIO()
        monkeypatch.setattr(job, "make_console", lambda: Console(file=stream, width=width, highlight=False))
        monkeypatch.chdir(tmp_path)
        Path("seed.py").write_text(text)
        linecache.clearcache()
        code = main(["trace", *arguments, "seed.py"])
        return [line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n")], code

    return run


def test_a_narrow_terminal_gets_the_three_forms_one_below_the_other(shown) -> None:
    lines, code = shown(_SCRIPT, SIDE_BY_SIDE - 1)
    assert code == 0
    assert lines[0].startswith("evaluation 1 at seed.py:5: out.eval() ---")
    assert "\n".join(lines[1:-1]) == "\n".join([_TRACE, _FLAT, _STABLEHLO])
    assert lines[-1] == "1 evaluation, 0 compilations; 1 program"


def test_a_wide_terminal_gets_them_side_by_side(shown) -> None:
    lines, _ = shown(_SCRIPT, 420)
    columns = [lines[1].index(f"==== {name} IR ====") for name in ("Trace", "Flat", "StableHLO")]
    assert columns[0] == 0 < columns[1] < columns[2]
    ends = [columns[1], columns[2], 420]
    for text, start, end in zip((_TRACE, _FLAT, _STABLEHLO), columns, ends, strict=True):
        height = text.count("\n") + 1
        assert "\n".join(line[start:end].rstrip() for line in lines[1 : 1 + height]) == text


def test_an_operation_with_a_body_stands_under_the_line_that_recorded_it(shown) -> None:
    script = "import fusible.lazy as tp\nx = tp.ones((1, 2, 5))\ny = x.maxpool((2,))\nz = y.tanh()\nz.eval()\n"
    text = "\n".join(shown(script, 100)[0]).split("==== StableHLO IR ====\n")[1]
    owners: dict[str, str] = {}
    owner = ""
    for line in text.split("\n"):
        owner = line if line.startswith("# ") else owner
        for operation in ("broadcast_in_dim", "reduce_window", "maximum", "return", "tanh"):
            if f"stablehlo.{operation}" in line:
                owners[operation] = owner
    pooled = "# seed.py:3: y = x.maxpool((2,))"
    wanted = {"broadcast_in_dim": "# seed.py:2: x = tp.ones((1, 2, 5))", "reduce_window": pooled, "maximum": pooled, "return": pooled}
    assert owners == {**wanted, "tanh": "# seed.py:4: z = y.tanh()"}
    assert text.count(pooled) == 1


def test_a_program_is_shown_once_and_compilations_are_counted_apart(shown) -> None:
    script = """\
import sys
import fusible.lazy as tp

for _ in range(2):
    tp.ones((2,)).tanh().eval()
run = tp.compile(lambda x: x + x, args=[tp.InputInfo((2,), tp.float32)])
print(run(tp.ones((2,))).numpy()[0])
"""
    lines, code = shown(script, 100)
    text = "\n".join(lines)
    assert code == 0
    assert "evaluation 2 at seed.py:5: tp.ones((2,)).tanh().eval() ---" in text
    assert text.count("the program of evaluation 1") == 1
    assert "compilation 1 at seed.py:6: run = tp.compile(" in text
    assert lines[-1] == "3 evaluations, 1 compilation; 3 programs"


def test_the_optimized_form_says_what_the_passes_did(shown) -> None:
    lines, _ = shown(_SCRIPT, 100, "--optimized")
    text = "\n".join(lines)
    assert "t0: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)] = ConstantOp(data=[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]" in text
    assert "constant-folding: 3 -> 3 operations\n    t0 folded\n" in text
    assert "dead-code: 3 -> 2 operations\n    t_inter1 dropped" in text


def test_a_script_that_raises_shows_its_traceback_and_returns_1(shown, capsys) -> None:
    lines, code = shown("import fusible.lazy as tp\ntp.ones((2,)).eval()\nraise ValueError('mine')\n", 100)
    error = capsys.readouterr().err
    assert code == 1
    assert lines[0].startswith("evaluation 1")
    assert error.startswith('Traceback (most recent call last):\n  File "seed.py", line 3, in <module>') and "ValueError: mine" in error


def test_a_missing_script_is_one_sentence(capsys) -> None:
    assert main(["trace", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "fusible trace: expected a Python file, got nowhere.py; name the script to run.\n"
