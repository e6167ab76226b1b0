"""Packages that are loaded when they are wanted, and what to install where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from fusible.errors import MissingModuleError, expected

__all__ = ["library"]


def library(name: str, extra: str = "models", module: str | None = None) -> Any:
    """The package ``name``, or the ``module`` of Fusible that imports it. Raises ``MissingModuleError`` where it is not installed.

    ``extra``: of Fusible, that brings it; empty for one that users have whose models are of it.
    """
    try:
        return importlib.import_module(module or name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        do = f"install fusible[{extra}]" if extra else f"install {name}"
        raise MissingModuleError(expected("an installed package", of=f"the package {name}", got="none", do=do), name=name) from None
