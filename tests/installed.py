"""What an installation must do: ``python tests/installed.py``, by the Python that Fusible is installed for, outside the sources.

It prints what ``fusible info`` finds, and trains a few steps in bf16 and in FP8.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fusible
from fusible import cpp_extensions
from fusible.cli import main


def check() -> str | None:
    """What is wrong, or None."""
    sources = Path(__file__).resolve().parent.parent
    if sources in Path(fusible.__file__).resolve().parents and sources / "build" not in Path(fusible.__file__).resolve().parents:
        return f"fusible: expected an installed package, got the sources at {sources}; run it by another Python."
    if not cpp_extensions.available:
        return f"the wheel: expected native kernels, got none: {cpp_extensions.reason}"
    compiled = set(cpp_extensions.info()["levels_compiled"])
    if not compiled >= {"generic"}:
        return f"the wheel: expected the generic level, got {sorted(compiled)}."
    with tempfile.TemporaryDirectory() as folder:
        small = ["--steps", "4", "--layers", "1", "--hidden", "64", "--seq-len", "32", "--batch", "2", "--out", folder + "/run"]
        for arguments in (["info"], ["train", "--recipe", "bf16,delayed,mxfp8", *small]):
            if main(arguments):
                return f"`fusible {arguments[0]}`: expected it to end well, got an error."
    return None


if __name__ == "__main__":
    wrong = check()
    if wrong:
        sys.exit(wrong)
