"""The workflows ask for what there is: targets of the Makefile, subcommands of ``fusible``, files of the repository."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import fusible.cli.commands

ROOT = Path(__file__).resolve().parents[2]
SUBCOMMANDS = {module.name.replace("_", "-") for module in pkgutil.iter_modules(fusible.cli.commands.__path__)}
WORKFLOWS = sorted([*(ROOT / ".github" / "workflows").glob("*.yml"), *(ROOT / "examples" / "workflows").glob("*.yml")])


def _commands(workflow: Path) -> list[str]:
    return re.findall(r"(?:run|CIBW_TEST_COMMAND): (.+)", workflow.read_text(encoding="utf-8"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_asks_for_what_there_is(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = _commands(workflow)
    assert commands
    for command in commands:
        program, *arguments = command.split()
        if program == "make":
            assert arguments[0] in targets, command
        if program == "fusible":
            assert arguments[0] in SUBCOMMANDS, command
        for path in re.findall(r"\{project\}/(\S+)", command):
            assert (ROOT / path).is_file(), command


def test_there_is_one_that_builds_and_one_to_copy() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in WORKFLOWS]
    assert found == [".github/workflows/wheels.yml", "examples/workflows/transformer-engine-tests.yml"]
