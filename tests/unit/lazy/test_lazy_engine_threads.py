"""The threads that XLA starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fusible.knobs import with_variables
from fusible.machine import thread_names, usable_processors

_PROGRAM = """
import os
from fusible import lazy
from fusible.machine import thread_names
(lazy.ones((3,)) + 1).eval()
print(sum("XLAEigen" in name for name in thread_names()), os.environ.get("NPROC"))
"""


def _printed(**variables: str) -> list[str]:
    environment = with_variables(variables)
    if not variables:
        environment.pop("NPROC", None)
    return subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, env=environment).stdout.split()


@pytest.mark.skipif(thread_names() is None, reason="threads cannot be counted")
def test_xla_starts_a_thread_for_each_processor_but_the_callers_unless_it_is_told() -> None:
    assert _printed() == [str(max(1, usable_processors() - 1)), "None"]
    assert _printed(NPROC="3") == ["3", "3"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot hold threads to a processor")
def test_usable_processors_are_those_that_this_process_may_run_on() -> None:
    all_of_them = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(all_of_them)})
        assert usable_processors() == 1
    finally:
        os.sched_setaffinity(0, all_of_them)
    assert usable_processors() == len(all_of_them)
