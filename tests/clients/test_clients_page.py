"""docs/clients.md says what the tests of clients declare, and what it gives to copy can be run."""

from __future__ import annotations

import shlex

import pytest
from client_page import PAGE, Row, declared, row, text, versions

from fusible.cli.command import all_commands
from fusible.cli.main import _parser


def test_the_page_is_what_the_tests_declare() -> None:
    assert PAGE.read_text() == text(declared()), "docs/clients.md: expected what the tests declare; write it by `make clients-page`"


def test_a_failure_is_on_the_page() -> None:
    rows = declared()
    failed = rows[0].test
    lines = text(rows, {failed: "one | other"}).splitlines()
    assert sum("| no: one \\| other |" in line for line in lines) == sum(line.test == failed for line in rows) > 0
    assert text(rows, {failed: "the reason"}) != text(rows)


def test_the_rows_are_ordered_by_client_and_have_versions() -> None:
    lines = text([row("b", "torch", feature="second", command=""), row("a", "accelerate", "transformers", feature="first", command="")]).splitlines()
    known = versions()
    rows = [line for line in lines if line.startswith("| ") and "---" not in line][1:]
    assert [line.split(" | ")[2] for line in rows] == ["first", "second"]
    assert rows[0].startswith(f"| accelerate with transformers | {known['accelerate']}, {known['transformers']} |")


@pytest.mark.parametrize("line", declared(), ids=lambda line: line.test)
def test_a_command_is_one_that_fusible_takes(line: Row) -> None:
    program, *rest = shlex.split(line.command)
    known, unknown = _parser(all_commands()).parse_known_args(rest)
    assert program == "fusible" and not unknown and known.device == "cpu" and rest[-1] == "train.py"
