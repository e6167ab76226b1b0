"""The suite that any backend of tex runs against: a table of calls with what must come of them, and what runs it.

``fusible check-backend NAME`` prints its outcome; ``check_backend`` gives it to a program. ``coverage_of`` says what a backend serves of the table,
``compare_backend`` how its functions differ from those of NVIDIA's module.
"""

from __future__ import annotations

from fusible.conformance.coverage import Coverage, coverage_of, markdown
from fusible.conformance.inventory import Difference, Inventory, compare_backend, compare_module, read_inventory, versions
from fusible.conformance.suite import Agreement, Verdict, check_backend, without_cases
from fusible.conformance.table import Disagreement, Output, Record, Sample, load, record

__all__ = [
    "Agreement",
    "Coverage",
    "Difference",
    "Disagreement",
    "Inventory",
    "Output",
    "Record",
    "Sample",
    "Verdict",
    "check_backend",
    "compare_backend",
    "compare_module",
    "coverage_of",
    "load",
    "markdown",
    "read_inventory",
    "record",
    "versions",
    "without_cases",
]
