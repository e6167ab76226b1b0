"""Files are read and written in one room, ``fusible.files``: whatever else touches one is listed here, with what it is."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "fusible"
ATTRIBUTES = {"read_bytes", "read_text", "write_bytes", "write_text", "loads", "load_file", "save_file", "safe_open", "NamedTemporaryFile", "fdopen"}
QUALIFIED = {("torch", "load"), ("torch", "save"), ("np", "load"), ("np", "fromfile"), ("json", "load"), ("json", "loads")}
QUALIFIED |= {("os", "open"), ("io", "open"), ("os", "rename"), ("os", "replace"), ("pickle", "load"), ("pickle", "loads"), ("zipfile", "ZipFile")}
ELSEWHERE = {
    "cli/main.py": {"open"},  # /dev/null
    "cli/training/trainer.py": {"loads"},  # what other stages have told
    "cli/training/job.py": {"read_text"},  # of fusible.cli.training.text, by read_file
    "cpp_extensions/__init__.py": {"read_text"},  # the package's own stub
    "machine.py": {"open", "read_text", "write_text"},  # what the system lays under /proc and /sys
    "lazy/compilation/saving.py": {"ZipFile"},  # an archive in memory
    "tex/selection/stub.py": {"read_text", "write_text"},  # make stub: the package's own sources
    "compat/nvidia_state.py": {"load", "save"},  # weights_only, of bytes; to memory
    "compat/nvidia_files/extra_states.py": {"load"},  # weights_only, of bytes and of files that the room has mapped
    "compat/nvidia_files/writing.py": {"save"},  # to memory
}


def touched(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in {"open", *ATTRIBUTES}:
            found.add(node.func.id)
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in ATTRIBUTES or (owner, node.func.attr) in QUALIFIED:
                found.add(node.func.attr)
    return found


def test_a_file_is_found_however_it_is_touched() -> None:
    assert touched("open('x')") == {"open"}
    assert touched("from pathlib import Path\nPath('x').read_bytes()") == {"read_bytes"}
    assert touched("import json\njson.loads('1')") == {"loads"}
    assert touched("import torch\ntorch.load(x, weights_only=False)") == {"load"}
    assert touched("cache.open\nengine.load(x)") == set()


def test_files_are_touched_in_one_room() -> None:
    found = {str(path.relative_to(SOURCES)): touched(path.read_text()) for path in sorted(SOURCES.rglob("*.py")) if path.parent != SOURCES / "files"}
    assert {name: what for name, what in found.items() if what} == ELSEWHERE
