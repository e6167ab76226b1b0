"""The records of the table, a module per category. Every module here is found by name and enters its records when it is imported.

A record is a function that yields samples: arguments, and what must come of them, in float64 or exactly, worked out from the definition and not by
calling tex. To add one, decorate such a function with ``@record("name")`` in the module of its category, or in a new module.
"""

from __future__ import annotations
