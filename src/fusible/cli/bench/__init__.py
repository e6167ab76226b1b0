"""``fusible bench``: Fusible beside plain torch on this machine. Every table is a module; ``options`` lists them, and imports no torch."""

from __future__ import annotations
