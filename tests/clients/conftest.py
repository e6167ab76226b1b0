"""The clients are installed by ``make test-clients``; without them their tests are not collected, but for the one of the page that they write.

A test that is marked ``client`` is a row of docs/clients.md: ``client(*packages, feature=..., command=..., recipes=(), works="yes")``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALLED = all(map(importlib.util.find_spec, ("accelerate", "lightning", "megatron", "nvdlfw_inspect", "transformers")))
collect_ignore = [] if INSTALLED else [path.name for path in HERE.glob("test_*.py") if path.name != "test_clients_page.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-page", action="store_true", help="write docs/clients.md by the results of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client: a row of docs/clients.md")
    if config.getoption("--clients-page", default=False) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Writer())


class Writer:
    """Sees what comes of each test, and writes the page at the end."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.failures: dict[str, str] = {}
        self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.rpartition("/")[2].partition("[")[0]
        self.ran.add(test)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures.setdefault(test, (crash.message.splitlines() or ["it fails"])[0] if crash else "it fails")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        page = importlib.import_module("client_page")
        rows = page.declared()
        page.PAGE.write_text(page.text(rows, self.failures))
        here = sum(line.test in self.ran for line in rows)
        self.said = f"docs/clients.md: {here} of {len(rows)} rows by the results of this run, the others as their tests declare them"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(self.said)
