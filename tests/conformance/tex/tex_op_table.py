"""What tests of tex functions take from the table of the package."""

from __future__ import annotations

from fusible.conformance.table import FLOATS, TABLE, Output, Record, Sample, Sampler, check, close, load, random, record, strided

__all__ = ["FLOATS", "TABLE", "Output", "Record", "Sample", "Sampler", "check", "close", "load", "random", "record", "strided"]
