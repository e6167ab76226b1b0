"""What ``transformer_engine_torch`` has, version by version, and how a backend or a module differs from it.

``fusible check-backend NAME --inventory`` prints the differences; ``compare_backend`` and ``compare_module`` give them to a program.
"""

from __future__ import annotations

from fusible.conformance.inventory.comparison import Difference, compare_backend, compare_module
from fusible.conformance.inventory.reading import Function, Inventory, NativeClass, Parameter, read_inventory, versions

__all__ = ["Difference", "Function", "Inventory", "NativeClass", "Parameter", "compare_backend", "compare_module", "read_inventory", "versions"]
