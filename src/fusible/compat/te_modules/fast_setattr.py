"""``fast_setattr``, which every module of NVIDIA's has."""

from __future__ import annotations

from typing import Any

__all__ = ["FastSetattr"]


class FastSetattr:
    """The part of a module that sets attributes past ``nn.Module.__setattr__``."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module."""
        vars(self)[name] = value
