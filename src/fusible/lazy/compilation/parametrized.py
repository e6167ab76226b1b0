"""The interface of modules that ``compile`` uses. Modules are in a room above, which it does not import."""

from __future__ import annotations

__all__ = ["Parametrized"]


class Parametrized:
    """The base of objects with parameters. They name their parameters before a program that reads them is recorded."""

    def _name_parameters(self) -> None:
        """Give every parameter without a name its key in the state dict, for printed programs and for errors."""
        raise NotImplementedError
