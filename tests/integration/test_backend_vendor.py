"""A vendor's way: the template copied into the tree, and the page's backend outside of it, each through the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks, write_file

from fusible.conformance import Verdict, check_backend
from fusible.tex.backends import template
from fusible.tex.selection.registry import registry

PACKAGE = ROOT / "src" / "fusible"
TEMPLATE = PACKAGE / "tex" / "backends" / "template.py"
PAGE = ROOT / "docs" / "backends.md"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *words], env=known, capture_output=True, text=True, timeout=240)


def check(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "fusible", "check-backend", name, "--only", "rmsnorm_fwd", "--dtype", "float32,bfloat16", **environment)


def agrees(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr + done.stdout
    assert "1 functions: 1 agrees, " in done.stdout and "refused" in done.stdout


def test_the_template_passes_the_suite_and_is_shorter_than_its_page() -> None:
    template.register(registry)
    try:
        rows = list(check_backend("template"))
    finally:
        registry.unregister_backend("template")
    verdicts = {row.dtype: row.verdict for row in rows}
    assert verdicts["float32"] == Verdict.AGREES and set(verdicts.values()) == {Verdict.AGREES, Verdict.REFUSED}
    assert TEMPLATE.read_text().count("\n") < PAGE.read_text().count("\n")


def test_a_copy_in_the_tree(tmp_path: Path) -> None:
    """As in step 1 and 2 of the page, in a copy of the package."""
    tree = tmp_path / "fusible"
    shutil.copytree(PACKAGE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    text = TEMPLATE.read_text().replace("TemplateBackend", "HygonBackend").replace('"template"', '"hygon"').replace('"Nobody"', '"Hygon"')
    text = text.replace("class HygonBackend", "@registry.register_backend\nclass HygonBackend")
    text = text.replace("import Registry", "import Registry, registry")
    (tree / "tex" / "backends" / "hygon.py").write_text(text)
    entry = tree / "tex" / "backends" / "__init__.py"
    entry.write_text(entry.read_text().replace("import cpu, flaggems,", "import cpu, flaggems, hygon,"))
    # The tree that an editable installation finds by itself is another one: the copy is named first.
    finders = "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in type(finder).__module__]"
    code = f"import sys; {finders}; sys.path.insert(0, {str(tmp_path)!r}); import fusible; assert fusible.__file__.startswith({str(tmp_path)!r})\n"
    words = ["check-backend", "hygon", "--only", "rmsnorm_fwd", "--dtype", "float32,bfloat16"]
    agrees(run("-c", f"{code}from fusible.cli import main\nsys.exit(main({words}))"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """The page's own file, in a directory that Python looks in."""
    (block,) = [block for block in blocks(PAGE) if block.file == "hygon_tex.py"]
    write_file(block, tmp_path)
    return tmp_path


def path_with(directory: Path) -> str:
    return os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])


def test_out_of_tree_by_a_variable(outside: Path) -> None:
    agrees(check("hygon", TE_FL_PLUGIN_MODULES="hygon_tex", PYTHONPATH=path_with(outside)))


def test_out_of_tree_by_an_entry_point(outside: Path) -> None:
    metadata = outside / "hygon_tex-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hygon_tex\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[te_fl.plugin]\nhygon = hygon_tex:register\n")
    agrees(check("hygon", PYTHONPATH=path_with(outside)))


def test_a_backend_that_is_wrong_makes_the_command_fail(outside: Path) -> None:
    file = outside / "hygon_tex.py"
    file.write_text(file.read_text().replace("+ eps)", "+ 2 * eps)"))
    done = check("hygon", TE_FL_PLUGIN_MODULES="hygon_tex", PYTHONPATH=path_with(outside))
    assert done.returncode == 1 and "disagrees" in done.stdout and "times its bound" in done.stdout
