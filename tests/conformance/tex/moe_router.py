"""The router token by token in float64, which the package's suite has, by the names that the tests use."""

from __future__ import annotations

from fusible.conformance.cases.routing import SCORES, Router, bit_map, byte_map

__all__ = ["SCORES", "Router", "bit_map", "byte_map"]
