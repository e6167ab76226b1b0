"""Every code block of the documentation: Python is run, C++ is compiled by the page that has it, and commands name what exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks, pages

from fusible import knobs
from fusible.cli.command import all_commands
from fusible.cli.main import _parser

NAMES = [page.relative_to(ROOT).as_posix() for page in pages()]
LANGUAGES = {"", "cpp", "python", "sh", "text"}
PRINTED = {"docs/lazy/day-in-the-life.md", "docs/ops.md", "docs/scaling.md"}
"""The pages whose text blocks are lines that their code prints."""
SHELL = [pytest.param(name, block.text, id=f"{name}:{block.line}") for name in NAMES for block in blocks(ROOT / name) if block.language == "sh"]


def test_the_pages_are_found() -> None:
    assert {"docs/architecture.md", "docs/extending.md"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_names_a_language_that_is_checked(name: str) -> None:
    assert {block.language for block in blocks(ROOT / name)} <= LANGUAGES


@pytest.mark.parametrize("name", [name for name in NAMES if any(block.language == "python" for block in blocks(ROOT / name))])
def test_the_python_of_a_page_runs_in_order(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "doc_pages.py"), str(ROOT / name)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = [line for block in blocks(ROOT / name) if block.language == "text" and name in PRINTED for line in block.text.splitlines()]
    assert [line for line in shown if line not in done.stdout.splitlines()] == []


def test_figures_are_those_of_the_results() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.page", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_guide_needs_no_compiler(tmp_path: Path) -> None:
    """Where there is none, the guide says so, and its other backends serve."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "doc_pages.py"), str(ROOT / "docs" / "extending.md")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "AwesomeLU has no native kernel here, and torch serves it: the search path: expected a C++ compiler" in done.stdout
    assert "add_awesomelu_bwd_fused" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    missing = [target for target in targets if not ((ROOT / name).parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_paths_in_the_tree_are_there(name: str) -> None:
    named = re.findall(r"`((?:src|cppsrc|tests|benchmarks|examples)/[^`*\s:]*)", (ROOT / name).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_paths_in_the_tables_of_rooms_and_words_are_there() -> None:
    """The last cell of a row, from the package on."""
    named = re.findall(r"\| `([a-z_/]+(?:\.py|/))` \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(named) > 30 and [path for path in named if not (ROOT / "src" / "fusible" / path).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_environment_variables_are_knobs(name: str) -> None:
    known = {knob.name for knob in vars(knobs).values() if isinstance(knob, knobs.Knob)} | {"FUSIBLE_MODULE", "FUSIBLE_REQUIRE_KERNELS"}
    assert set(re.findall(r"\bFUSIBLE_[A-Z_]+\b", (ROOT / name).read_text())) <= known


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, split into words, without comments and prompts."""
    lines = [shlex.split(line.removeprefix("$ "), comments=True) for line in text.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words]


@pytest.mark.parametrize(("name", "text"), SHELL)
def test_commands_name_what_exists(name: str, text: str) -> None:
    for words in commands(text):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        asked = {word for word in rest if "=" not in word and not word.startswith("-")}
        assert asked <= targets, f"make has no {asked - targets}"
    elif program == "fusible":
        try:
            _, unknown = _parser(all_commands()).parse_known_args(rest)
        except SystemExit as left:
            assert left.code == 0, f"fusible refuses {rest}"
        else:
            assert not unknown, f"fusible has no {unknown}"
    elif program == "pip":
        known = {"fusible", *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
        for word in rest:
            name, _, extras = word.rstrip("]").partition("[")
            assert name in ("install", "-e", ".", "fusible"), f"pip {word}: not of this project"
            assert set(filter(None, extras.split(","))) <= known, f"no extra {extras}"


@pytest.mark.parametrize(
    "wrong", ["make nothing", "fusible train --no-such-option", "fusible nothing", "pip install 'fusible[nothing]'", "pip install elsewhere"]
)
def test_a_command_that_names_nothing_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_command(shlex.split(wrong))


def test_a_page_whose_code_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2, 'line 6'\n```\n")
    command = [sys.executable, str(ROOT / "tests" / "doc_pages.py"), str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and 'page.md", line 6' in done.stderr
