"""What ``compile`` knows of modules, which stand above it."""

from __future__ import annotations

__all__ = ["Parametrized"]


class Parametrized:
    """The base of what has parameters, and names them when a program is recorded that reads them."""

    def _name_parameters(self) -> None:
        """Give every parameter without a name that of the state dict: for printed programs, and for errors."""
        raise NotImplementedError
