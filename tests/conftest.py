"""Settings of every test run: no test waits for a property to be found again, and none depends on how loaded the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fusible", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("fusible")
