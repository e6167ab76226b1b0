"""The conformance suite of tex: a table of calls with their expected outputs, and the code that runs it on any backend.

``fusible check-backend NAME`` prints the outcome, ``check_backend`` returns it. ``coverage_of`` tells which of the calls a backend serves, and
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
