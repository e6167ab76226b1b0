"""Runs tests against changed sources: a process that has imported what takes time, and forks a child for each run.

A line of JSON comes in for each run, and one goes out. There are two kinds of server. A cold one imports nothing of fusible, and a child imports
the changed file in the place of the true one. A warm one has imported fusible and the tests, and a child gives the functions of the file their
changed code: far quicker, and of no use for what is run by imports alone. Neither runs a backward: autograd's threads would be missing in children.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import IO, Any

import hypothesis
import hypothesis.strategies  # noqa: F401
import ml_dtypes  # noqa: F401
import numpy  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor

_MEMORY = 8 << 30
"""Bytes of data that a child may have: a changed constant may ask for any number."""


_WAITING = 4
"""Seconds that a child may take for each that it may compute: the machine may be busy."""


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one file of fusible from another text."""

    def __init__(self, path: str, text: str) -> None:
        name = ".".join(Path(path).with_suffix("").parts[Path(path).parts.index("fusible") :])
        super().__init__(name, path)
        self._text = text

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


def _exchange(path: str, text: str) -> bool:
    """Give every function of a file that is imported the code that it has in ``text``; whether each takes it, and a child of a cold server is not
    needed. One that no longer calls ``super()`` is another kind of function."""
    codes = {code.co_qualname: code for code in _codes(compile(text, path, "exec", dont_inherit=True))}
    functions = [each for each in gc.get_objects() if type(each) is FunctionType and each.__code__.co_filename == path]
    pairs = [(each, codes[each.__code__.co_qualname]) for each in functions if "<" not in each.__code__.co_qualname]
    if any(each.__code__.co_freevars != code.co_freevars for each, code in pairs):
        return False
    for each, code in pairs:
        each.__code__ = code
    return bool(pairs)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


class _Lines:
    """The lines of the files that each test runs, and how long it takes."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = frozenset(files)
        self._now: set[tuple[str, int]] = set()
        self.tests: dict[str, Any] = {}

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._now, start = set(), time.perf_counter()
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines: dict[str, list[int]] = {}
            for file, line in sorted(self._now):
                lines.setdefault(file, []).append(line)
            self.tests[item.nodeid] = {"seconds": time.perf_counter() - start, "lines": lines, "passed": item.nodeid not in self._failed}

    _failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)


class _Chosen:
    """Runs the tests that are asked for, in their order, and notes the first that fails. One that is no longer collected is left out."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: i for i, test in enumerate(tests)}
        self.ran = 0
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"collecting {report.nodeid}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed = self.failed or report.nodeid


class _Warm:
    """Answers requests in the place of pytest's own loop over the tests: a child has them all collected, and runs those that it is asked for."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        _serve(self._requests, self._answers, partial(self._answer, session.config, items))
        return True

    def _answer(self, config: pytest.Config, items: dict[str, pytest.Item], request: dict[str, Any]) -> dict[str, Any]:
        if not _exchange(request["path"], request["text"]):
            return {"verdict": "cold"}
        tests = [test for stage in request["stages"] for test in stage if test in items]
        config.pluginmanager.register(noted := _Chosen(tests))
        for i, test in enumerate(tests):
            config.hook.pytest_runtest_protocol(item=items[test], nextitem=items[tests[i + 1]] if i + 1 < len(tests) else None)
            if noted.failed:
                return {"verdict": "caught", "by": noted.failed, "ran": noted.ran}
        return {"verdict": "survived" if noted.ran else "none ran", "by": None, "ran": noted.ran}


_OPTIONS = ["-n", "0", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


def _pytest(where: Sequence[str], plugin: Any, *options: str) -> int:
    return int(pytest.main([*_OPTIONS, *options, *where], plugins=[plugin] if plugin else []))


def _covered(request: dict[str, Any]) -> dict[str, Any]:
    importlib.import_module("fusible.pytorch")  # or the first test that imports a file would be the one that runs the lines of its imports
    plugin = _Lines(request["files"])
    code = _pytest(request["tests"], plugin, "--maxfail=1000")
    return {"tests": plugin.tests, "code": code}


def _judged(request: dict[str, Any]) -> dict[str, Any]:
    """The tests in stages, each longer than the one before: most wrong code is caught by the first few."""
    ran = 0
    for tests in request["stages"]:
        plugin = _Chosen(tests)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        code = _pytest(files, plugin)
        ran += plugin.ran
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"verdict": "caught", "by": plugin.failed or f"pytest ended with {code}", "ran": ran}
    return {"verdict": "survived" if ran else "none ran", "by": None, "ran": ran}


def _cold(request: dict[str, Any]) -> dict[str, Any]:
    if "files" in request:
        return _covered(request)
    sys.meta_path.insert(0, _Changed(request["path"], request["text"]))
    return _judged(request)


def _child(request: dict[str, Any], out: int, answer_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(request["limit"]), int(request["limit"])))
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    try:
        result = answer_of(request)
    except BaseException as error:
        result = {"verdict": "broken", "by": repr(error), "ran": 0}
    sys.stdout.flush()
    answer = json.dumps(result).encode()
    while answer:
        answer = answer[os.write(out, answer) :]


def _forked(request: dict[str, Any], answer_of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """What a child answers; one that crashes or takes too long has caught something."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            _child(request, write, answer_of)
        finally:
            os._exit(0)
    os.close(write)
    answer, end = b"", time.monotonic() + _WAITING * request["limit"]
    while (left := end - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        part = os.read(read, 1 << 20)
        if not part:
            break
        answer += part
    else:
        answer = json.dumps({"verdict": "caught", "by": "it did not end", "ran": 0}).encode()
    os.close(read)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
    return json.loads(answer) if answer else {"verdict": "caught", "by": "the process ended", "ran": 0}


def _serve(requests: IO[str], answers: IO[str], answer_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for line in requests:
        print(json.dumps(_forked(json.loads(line), answer_of)), file=answers, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # what writes to the standard output must not come between the answers
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if sys.argv[1:]:
        _pytest(sys.argv[1:], _Warm(requests, answers), "-s")
    else:
        assert "fusible" not in sys.modules
        _serve(requests, answers, _cold)


if __name__ == "__main__":
    main()
