"""The layering contracts hold, and each notices a violation that is planted in a copy of the package."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

PACKAGE = ROOT / "src" / "fusible"
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]  # they know the source tree alone
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the package in ``directory``, by the contracts of the ``pyproject.toml`` there."""
    environment = {**os.environ, "PYTHONPATH": str(directory / "src")}
    command = [sys.executable, "-c", LINT, "--no-cache", "--config", str(directory / "pyproject.toml")]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, apart from the source tree."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "fusible", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_are_kept(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


VIOLATIONS = {
    "torch stays out of the framework-oblivious rooms": [
        ("compute_pipeline/plan.py", "import torch"),
        ("ops/add.py", "from torch import nn"),
        ("fusions/mmt_add.py", "import torch.nn.functional"),
        ("lazy/frontend/tensor.py", "import torch"),
    ],
    "Imports point downwards": [
        ("ops/add.py", "from fusible.fusions import registered"),
        ("lazy/device.py", "from fusible import tex"),
        ("tex/selection/dispatch.py", "from fusible.quantized import Float8Tensor"),
        ("quantized/recipe.py", "from fusible.nvte import DType"),
        ("pytorch/engine/runner.py", "from fusible import cli"),
        ("errors.py", "from fusible.knobs import KNOBS"),
    ],
    "The compiled extension is imported by the backends that call it": [
        ("nvte/casting.py", "from fusible import cpp_extensions"),
        ("tex/backends/torch_backend/quantize.py", "from fusible.cpp_extensions import quantize"),
    ],
    "The command line names compat only when it runs a program": [("cli/info.py", "from fusible import compat")],
    "fusions is imported by compute_pipeline, and adapted by pytorch": [("cli/info.py", "from fusible import fusions")],
    "tex: what a call is, what is checked of it, who is chosen, who computes": [
        ("tex/selection/registry.py", "from fusible.tex.backends.cpu import CpuBackend"),
        ("tex/calls/gemm.py", "from fusible.tex.selection.dispatch import explain"),
        ("tex/formats/blocks.py", "from fusible.tex.calls import checks"),
        ("tex/interface/gemm.py", "from fusible.tex.calls import gemm"),
        ("tex/enums.py", "from fusible.tex import protocol"),
    ],
    "lazy: what is recorded is traced, lowered twice and run, each by rooms beneath": [
        ("lazy/ops/where.py", "from fusible.lazy.modules import Linear"),
        ("lazy/compilation/compile.py", "from fusible.lazy.ops.cast import cast"),
        ("lazy/frontend/convert.py", "from fusible.lazy.compilation.executable import Executable"),
        ("lazy/evaluation/compiler.py", "from fusible.lazy.frontend.tensor import Tensor"),
        ("lazy/trace/trace.py", "from fusible.lazy.evaluation.executor import materialize"),
        ("lazy/flat_ir/literals.py", "from fusible.lazy.trace.op import TraceOp"),
        ("lazy/stablehlo/module.py", "from fusible.lazy.flat_ir.flat_ir import FlatIR"),
        ("lazy/engine/host.py", "from fusible.lazy.stablehlo import mlir"),
        ("lazy/config.py", "from fusible.lazy.engine import engines"),
        ("lazy/dtypes.py", "from fusible.lazy import printing"),
    ],
    "pytorch: the engine knows neither modules nor operations": [
        ("pytorch/engine/runner.py", "from fusible.pytorch.modules import Linear"),
        ("pytorch/modules/linear.py", "from fusible.pytorch import ops"),
        ("pytorch/engine/scaling.py", "from fusible.pytorch import ops"),
    ],
    "Backends do not import one another": [("tex/backends/xla/gemm.py", "from fusible.tex.backends import torch_backend")],
}


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_planted_violation_is_caught_by_its_contract(copy: Path, contract: str) -> None:
    for file, line in VIOLATIONS[contract]:
        path = copy / "src" / "fusible" / file
        path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout
    reported = done.stdout.split("Broken contracts", 1)[1]
    for file, _ in VIOLATIONS[contract]:
        assert f"fusible.{file.removesuffix('.py').replace('/', '.')}" in reported, f"{file} is not reported"


def test_a_file_of_lazy_without_a_place_is_refused(copy: Path) -> None:
    (copy / "src" / "fusible" / "lazy" / "elsewhere.py").touch()
    done = lint(copy)
    assert done.returncode != 0 and "elsewhere" in done.stdout


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_no_function_is_too_long() -> None:
    """60 lines of a function's body, for a signature of the interface may alone have thirty. A file is as long as its concept."""
    functions = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.body[-1].end_lineno or 0) - node.body[0].lineno + 1
                functions += [f"{path.relative_to(PACKAGE)}: {node.name}, {count} lines"] if count > 60 else []
    assert not functions


READS = frozenset({"environ", "environb", "getenv", "putenv"})
SETS = {"lazy/engine/pjrt.py": "os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')"}
"""The one place beside ``knobs`` that touches the environment: XLA reads the variable when it is loaded, and is silenced by nothing else."""


def test_only_knobs_read_the_environment() -> None:
    found: dict[str, list[str]] = {}
    for path in sources():
        place = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        allowed = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and ast.unparse(call) == SETS.get(place)]
        inside = {id(node) for call in allowed for node in ast.walk(call)}
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if name in READS and id(node) not in inside:
                found.setdefault(place, []).append(ast.unparse(node))
    assert found.keys() == {"knobs.py"}, found
