"""What a process keeps of the memory that it frees."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fusible.cli import main

_FAULTS = """
import resource, torch
from fusible import keep_freed_memory
{call}
def step():
    held = [torch.empty({mebibytes} * 2**20, dtype=torch.uint8).fill_(1) for _ in range({count})]
for _ in range(12):  # until what is small has found its places
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone is asked to keep memory")
@pytest.mark.parametrize(("mebibytes", "count"), [(24, 4), (96, 1)], ids=["some blocks", "one above what glibc keeps by a threshold"])
def test_kept_memory_is_not_fetched_again(mebibytes: int, count: int) -> None:
    """By its page faults: 96 MiB that are allocated, freed and allocated again, in a process of its own.

    By glibc's own rules what lies behind a block decides whether it goes, so both processes begin as ones that give back every block of a mebibyte.
    """
    faults = {}
    for call in ("", "assert keep_freed_memory()"):
        command, given = (
            [sys.executable, "-c", _FAULTS.format(call=call, mebibytes=mebibytes, count=count)],
            {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        )
        faults[call] = int(subprocess.run(command, capture_output=True, text=True, check=True, env=given).stdout)
    # Now and then something small lies where a block was, and how large pages are is the machine's.
    assert faults[""] > 3 * faults["assert keep_freed_memory()"]


def test_a_command_keeps_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(sys.modules[main.__module__], "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(sys, "argv", ["fusible", "info"])
    for text, expected in (("", [True]), ("0", [True, True]), ("1", [True, True])):
        monkeypatch.setenv("FUSIBLE_RETURN_MEMORY", text)
        assert main() == 0 and kept == expected
    assert main(["info"]) == 0 and kept == [True, True], "a caller of main has a process of its own"
    monkeypatch.setenv("FUSIBLE_RETURN_MEMORY", "perhaps")
    assert main() == 2
    assert "FUSIBLE_RETURN_MEMORY: expected 1, true, yes" in capsys.readouterr().err
