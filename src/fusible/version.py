"""The version of the package, for rooms that the package itself names."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
