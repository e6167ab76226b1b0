"""Runs a test at every instruction set that this CPU has."""

from __future__ import annotations

import pytest

from fusible import cpp_extensions

LEVELS = cpp_extensions.usable_levels() if cpp_extensions.available else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if cpp_extensions.available:
        return
    for item in items:
        if "unit/cpp" in item.path.as_posix() and "absent" not in item.name:
            item.add_marker(pytest.mark.skip(reason=cpp_extensions.reason))


@pytest.fixture(params=LEVELS or ["generic"])
def level(request: pytest.FixtureRequest) -> str:
    cpp_extensions.set_level(request.param)
    return request.param
