"""The records of the table, a module per category. Every module here is found by name and enters its records when it is imported.

A record is a function that yields samples: arguments and expected outputs, in float64 or exact. The outputs are computed from the definition, never
by calling tex. To add a record, decorate such a function with ``@record("name")`` in the module of its category, or in a new module.
"""

from __future__ import annotations
