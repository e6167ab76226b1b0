"""``fusible run``: a script sees what it sees under ``python script.py``, and the names of Transformer Engine beside it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusible import compat
from fusible.cli.command import all_commands
from fusible.cli.main import _parser, main
from fusible.compat.script import run_script
from fusible.errors import ArgumentError

SEEN = """
import sys
from pathlib import Path
import helper
import transformer_engine_torch as tex
assert __name__ == "__main__" and __file__ == sys.argv[0] and Path(sys.path[0]).samefile(Path(__file__).parent)
assert callable(tex.gelu)
print(helper.X, *sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's own arguments and path come back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    yield
    compat.uninstall()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("X = 'helped'\n")
    path = tmp_path / "script.py"
    path.write_text(SEEN)
    return path


def test_a_script_runs_as_under_python(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(script), "--lr", "3", "--help", "--device", "gpu"]) == 0
    assert capfd.readouterr() == ("helped --lr 3 --help --device gpu\n", "")


def test_from_a_shell(script: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-m", "fusible", "run", str(script), "a"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "helped a\n", "")


def test_cuda_is_mapped_on_demand_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cuda.py"
    path.write_text("import torch\nprint(torch.cuda.is_available(), torch.zeros(1).is_cuda)\n")
    assert main(["run", "--device", "cpu", str(path)]) == 0
    if not torch.cuda.is_available():
        assert main(["run", str(path)]) == 0
        assert capfd.readouterr().out == "True True\nFalse False\n"


def test_a_module_runs_as_under_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A module of the folder that it is run in, and a package by its ``__main__``; both know who they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:], sys.path[0] == __import__('os').getcwd())\n")
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "__init__.py").write_text("")
    (tmp_path / "within" / "__main__.py").write_text("import sys\nfrom within import other\nprint(sys.argv[0] == __file__)\n")
    (tmp_path / "within" / "other.py").write_text("raise KeyError('here')\n")
    assert main(["run", "-m", "alone", "--device", "gpu", "-m"]) == 0
    assert capfd.readouterr().out == "__main__ alone ['--device', 'gpu', '-m'] True\n"
    assert main(["run", "-m", "within"]) == 1
    shown = capfd.readouterr().err
    assert f'File "{tmp_path}/within/__main__.py", line 2' in shown and "runpy" not in shown and shown.rstrip().endswith("KeyError: 'here'")


@pytest.mark.parametrize("name", ["nothing_of_this_name", "nothing.of.this", "fusible.nothing", ".", "xml"])
def test_a_missing_module_is_one_sentence(name: str) -> None:
    former = list(sys.path)
    with pytest.raises(ArgumentError) as refusal:
        run_script(argparse.Namespace(module=[name, "a"]))
    assert str(refusal.value) == f"fusible run -m: expected a module that can be run, got {name}; name one as python -m takes it."
    assert sys.path == former and not compat.installed() and "FUSIBLE_RUN" not in os.environ


def test_something_to_run_is_asked_for() -> None:
    for nothing in (argparse.Namespace(script=None, args=[]), argparse.Namespace(script=None, args=[], module=[])):
        with pytest.raises(ArgumentError, match=r"fusible run: expected a script, or -m and a module, got none; name what to run\."):
            run_script(nothing)


def test_the_environment_is_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "a")
    path = tmp_path / "script.py"
    path.write_text("import os\nassert os.environ['PYTHONPATH'].endswith(os.pathsep + 'a') and os.environ['FUSIBLE_RUN']\nraise KeyError\n")
    assert main(["run", str(path)]) == 1
    assert os.environ["PYTHONPATH"] == "a" and "FUSIBLE_RUN" not in os.environ


def test_an_error_shows_the_scripts_own_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    raise KeyError('here')\n\nf()\n")
    assert main(["run", str(path)]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>')
    assert shown.rstrip().endswith("KeyError: 'here'")


def test_a_script_that_is_no_python_says_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("x = = 1\n")
    assert main(["run", str(path)]) == 1
    shown = capfd.readouterr().err
    assert f'File "{path}", line 1' in shown and "SyntaxError" in shown and "runpy" not in shown


def test_the_scripts_own_exit_passes(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("raise SystemExit(7)\n")
    with pytest.raises(SystemExit) as left:
        main(["run", str(path)])
    assert left.value.code == 7


def test_an_installed_package_is_replaced_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("print('theirs')\n")
    path = tmp_path / "script.py"
    path.write_text("import transformer_engine.pytorch.ops as ops\nprint(ops.Bias.__module__.partition('.')[0])\n")
    assert main(["run", "--replace-package", str(path)]) == 0
    compat.uninstall()
    assert main(["run", str(path)]) == 1
    assert capfd.readouterr().out == "fusible\ntheirs\n"
    del sys.modules["transformer_engine"]  # the made-up one


def test_a_missing_script_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="fusible run: expected a Python file, got .*nothing.py; name the script to run."):
        run_script(argparse.Namespace(script=str(tmp_path / "nothing.py"), args=[], device=None, replace=False, replace_package=False))
    assert not compat.installed()


def test_its_options_end_where_the_script_begins() -> None:
    options, unknown = _parser(all_commands()).parse_known_args(["run", "--replace", "--device", "cpu", "a.py", "--replace-package", "-h"])
    assert (options.replace, options.replace_package, options.device, options.script) == (True, False, "cpu", "a.py")
    assert (options.args, unknown) == (["--replace-package", "-h"], [])
