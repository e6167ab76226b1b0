"""Every lock is one that a forked child can take (``fusible.locks``)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "fusible"
KINDS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Queue", "SimpleQueue"}
MODULES = ("threading", "queue", "multiprocessing", "_thread")
OWN = {
    "locks.py": {"RLock"},
    "cli/serving/worker.py": {"Event", "SimpleQueue"},  # between the threads of a server, which is a process of its own
    "cli/training/memory.py": {"Event"},  # of a thread that it starts, and waits for, itself
}


def blocking(source: str) -> set[str]:
    """The names in ``KINDS`` that a file takes from ``MODULES``: what one thread may wait at for another."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {alias.name for alias in node.names}
    return found & KINDS


def test_a_lock_is_found_however_it_is_named() -> None:
    assert blocking("import threading\nx = threading.Lock()") == {"Lock"}
    assert blocking("from threading import RLock as R, local") == {"RLock"}
    assert blocking("from fusible.locks import Lock\nx = Lock()") == set()


def test_no_file_has_locks_of_its_own() -> None:
    found = {path.relative_to(SOURCES).as_posix(): names for path in SOURCES.rglob("*.py") if (names := blocking(path.read_text()))}
    assert found == OWN
