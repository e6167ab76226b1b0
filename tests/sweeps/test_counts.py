"""How many calls the sweeps make: of tex, nvte, modules and operations at least 150,000 in the long run, all of them the same each time."""

from __future__ import annotations

import pytest
from nvte_functions import DRAWN_CALLS
from subjects import MODULES, OPERATIONS, RECIPES
from test_bad_module_calls import _calls as of_modules
from test_bad_nvte_calls import DRAWS
from test_bad_nvte_calls import _calls as of_nvte
from test_generated_modules import CALLS as MODULE_CALLS
from test_generated_nvte_calls import CALLS
from wrong_values import others

from fusible.conformance.table import load

pytestmark = pytest.mark.slow


def _of_tex() -> int:
    """The bad calls of ``test_bad_calls``: each argument of the first, a middle and the last sample in every dtype."""
    count = 0
    for record in load().values():
        for dtype in record.dtypes:
            samples = record.samples(dtype)
            last = len(record.samples(record.dtypes[0])) - 1
            places = sorted({0, last // 2, last})
            count += sum(1 for place in places for good in samples[place].arguments.values() for _ in others(good))
    return count


def test_how_many_calls_there_are() -> None:
    counts = {
        "bad calls of tex": _of_tex(),
        "bad calls of nvte": sum(1 for _ in of_nvte(DRAWN_CALLS, range(DRAWS))),
        "bad calls of modules and operations": len(of_modules([*MODULES, *OPERATIONS], RECIPES)),
        "right calls of nvte": CALLS * len(DRAWN_CALLS),
        "right calls of modules and operations": MODULE_CALLS,
        "right calls of tex": sum(len(record.samples(dtype)) for record in load().values() for dtype in record.dtypes),
    }
    print(counts, sum(counts.values()))
    assert counts["bad calls of tex"] > 90_000 and counts["bad calls of nvte"] > 20_000 and counts["right calls of nvte"] > 20_000
    assert counts["right calls of modules and operations"] > 15_000
    assert sum(counts.values()) > 150_000
