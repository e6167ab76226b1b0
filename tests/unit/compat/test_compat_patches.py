"""Functions of other packages are replaced once, however often their module is patched, and what others have made of them stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fusible.compat.finder import replace


def shouting(theirs: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: theirs(text) + "!"


def greet(name: str) -> str:
    """Greets."""
    return f"hello {name}"


def test_a_function_that_was_replaced_before_is_replaced_itself() -> None:
    module = SimpleNamespace(greet=greet)
    for _ in range(3):
        replace(module, "greet", shouting)
    assert module.greet("you") == "hello you!" and module.greet.__doc__ == greet.__doc__


def test_a_wrapper_that_somebody_put_around_ours_stays() -> None:
    """``functools.wraps`` gives it all attributes of ours."""
    module: Any = SimpleNamespace(greet=greet)
    replace(module, "greet", shouting)
    ours = module.greet
    module.greet = functools.wraps(ours)(lambda name: ours(name).upper())
    replace(module, "greet", shouting)
    assert module.greet("you") == "HELLO YOU!!"


def test_a_decorated_function_keeps_its_decorator() -> None:
    module: Any = SimpleNamespace(greet=functools.wraps(greet)(lambda name: greet(name).upper()))
    for _ in range(2):
        replace(module, "greet", shouting)
    assert module.greet("you") == "HELLO YOU!"
