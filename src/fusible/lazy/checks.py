"""Checks of programs on their way: of each trace that is lowered, and of each FlatIR before and after every pass.

They are for tests, which register ``check_trace`` and ``check_flat_ir`` here. Programs of users run none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CHECKS", "run_checks"]

CHECKS: dict[str, Callable[[Any], object]] = {}
"""By the name of a program's class, the function that raises where a program is not valid."""


def run_checks(program: Any) -> None:
    """Run the check of ``program``'s class, if there is one."""
    if CHECKS:
        check = CHECKS.get(type(program).__name__)
        if check is not None:
            check(program)
