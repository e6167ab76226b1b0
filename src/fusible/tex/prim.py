"""What NVIDIA's interface lacks and ``nvte`` needs, dispatched like the rest: ``tex.prim.add(a, b)``.

Every function here is functional: it writes to no argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.dispatch import dispatcher

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]:
        """The functions are made from their declarations below; type checkers see them as callables."""
        ...


_PREFIX = "prim_"

__all__ = sorted(name.removeprefix(_PREFIX) for name in DECLARATIONS if name.startswith(_PREFIX))

globals().update({name: dispatcher(DECLARATIONS[_PREFIX + name]) for name in __all__})
