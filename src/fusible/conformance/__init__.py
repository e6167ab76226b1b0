"""The suite that any backend of tex runs against: a table of calls with what must come of them, and what runs it.

``fusible check-backend NAME`` prints its outcome; ``check_backend`` gives it to a program.
"""

from __future__ import annotations

from fusible.conformance.suite import Agreement, Verdict, check_backend, without_cases
from fusible.conformance.table import Disagreement, Output, Record, Sample, load, record

__all__ = ["Agreement", "Disagreement", "Output", "Record", "Sample", "Verdict", "check_backend", "load", "record", "without_cases"]
