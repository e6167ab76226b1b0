"""The code blocks of a page of documentation, and how they are run: in order, in one namespace, in an empty directory.

A block whose first line is a comment that names a file (``# awesome/ops.py``) is that file: it is written, and where it is Python, imported.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Block", "blocks", "pages", "run", "write_file"]

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line of the page that it begins on, and the file that it is, if any."""

    language: str
    text: str
    line: int
    file: str | None


def pages() -> list[Path]:
    """Every page of documentation."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")])


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        named = _FILE.match(match[2])
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1, named[1] if named else None))
    return found


def write_file(block: Block, directory: Path) -> Path:
    """Write a block that is a file."""
    assert block.file is not None
    path = directory / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    return path


def run(page: Path, directory: Path) -> dict[str, Any]:
    """Run the Python of a page in ``directory``, which must be on ``sys.path``; gives the namespace that it leaves."""
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    for block in blocks(page):
        if block.file is not None:
            write_file(block, directory)
            importlib.invalidate_caches()
            if block.language == "python":
                importlib.import_module(block.file.removesuffix(".py").replace("/", "."))
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    return namespace


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path.cwd()))
    run(Path(sys.argv[1]), Path.cwd())
