"""Runs a program's text, or pytest, over another build of the native kernels: ``python sanitized_python.py EXTENSION ARGUMENTS...``.

The extension takes the installed one's place by its name, before anything asks for it. ``ARGUMENTS`` are a program and its own, or ``pytest`` and
its own.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib.machinery import ExtensionFileLoader

NAME = "fusible.cpp_extensions._native"


def take_place(path: str) -> None:
    """Load the extension at ``path`` as Fusible's own; torch comes first, as in the package."""
    import torch  # noqa: F401

    loader = ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module


if __name__ == "__main__":
    take_place(sys.argv[1])
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "pytest":
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
