"""The logger: which messages are shown, from where, how often, and what they cost where they are not."""

from __future__ import annotations

import re

import pytest

from fusible import lazy
from fusible.errors import ArgumentError
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.logger import CHANNELS, LEVELS, Logger


@pytest.fixture
def log() -> Logger:
    return Logger()


def _shown(log: Logger, module: str = "") -> set[str]:
    return {name for name in (*LEVELS, *CHANNELS) if log.shows(name, module)}


def test_a_level_shows_what_is_more_severe_and_no_channel(log: Logger) -> None:
    for i, level in enumerate(LEVELS):
        log.verbosity = level
        assert _shown(log) == set(LEVELS[i:])
        assert log.verbosity == level


def test_channels_are_shown_where_they_are_named(log: Logger) -> None:
    log.verbosity = {"error", "trace"}
    assert _shown(log) == {"error", "trace"}
    log.verbosity = "ir"
    assert _shown(log) == {"trace", "flat_ir", "mlir"}
    log.verbosity = ["IR", "timing"]
    assert _shown(log) == {"trace", "flat_ir", "mlir", "timing"}


def test_the_longest_name_of_a_module_counts(log: Logger) -> None:
    log.verbosity = {"": "error", "engine": {"timing", "warning"}, "evaluation/compiler": "ir"}
    assert _shown(log, "fusible.lazy.frontend.tensor") == {"error"}
    assert _shown(log, "fusible.lazy.engine.pjrt") == {"warning", "error", "timing"}
    assert _shown(log, "fusible.lazy.evaluation.compiler") == {"trace", "flat_ir", "mlir"}
    assert _shown(log, "fusible.lazy.engines") == {"error"}
    assert log.times
    log.verbosity = {"flat_ir.passes": "info"}
    assert _shown(log, "elsewhere") == set() and not log.times


def test_a_name_that_is_none_is_refused_and_changes_nothing(log: Logger) -> None:
    log.verbosity = "info"
    for wrong in ("loud", {"info", "stablehlo"}, {"engine": "loud"}, 3):
        with pytest.raises(ArgumentError, match="logger.verbosity: expected some of verbose, .*, got"):
            log.verbosity = wrong  # type: ignore[assignment]
    assert _shown(log) == {"info", "warning", "error"}
    with pytest.raises(ArgumentError, match='the mode of a message: expected "always" or "once"'):
        log.info("text", mode="twice")


def test_another_verbosity_holds_inside_its_context_alone(log: Logger) -> None:
    log.verbosity = "error"
    with pytest.raises(KeyError), log.use_verbosity({"verbose", "timing"}) as same:
        assert same is log and log.times and log.shows("verbose")
        raise KeyError
    assert log.verbosity == "error" and not log.times


def test_messages_are_built_only_where_they_are_shown(log: Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.verbosity = "warning"

    def explode() -> str:
        raise AssertionError

    log.info(explode)
    log.trace(explode)
    log.warning(lambda: "built")
    log.error("given")
    assert capsys.readouterr().err == "[warning] built\n[error] given\n"


def test_once_is_once_per_text(log: Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.verbosity = "info"
    for text in ("a", "b", "a"):
        log.info(text, mode="once")
        log.warning(lambda: "c", mode="once")
        log.info("d")
    lines = capsys.readouterr().err.split()
    assert [lines.count(text) for text in "abcd"] == [1, 1, 1, 3]


def test_the_default_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(Logger()) == {"warning", "error"}
    monkeypatch.setenv("FUSIBLE_LAZY_VERBOSITY", "error, timing")
    assert _shown(Logger()) == {"error", "timing"}
    assert Logger().times


def test_each_ir_of_an_evaluation_has_its_channel_and_banner(capsys: pytest.CaptureFixture[str]) -> None:
    CACHE.clear()
    with lazy.logger.use_verbosity({"trace"}):
        (lazy.full((3, 3), 2.5).tanh() * 2.0).eval()
    shown = capsys.readouterr().err
    assert shown.startswith("==== Trace IR ====\nt0 = fill(") and "Flat IR" not in shown and "StableHLO" not in shown
    CACHE.clear()
    with lazy.logger.use_verbosity("ir"):
        (lazy.full((3, 3), 2.5).tanh() * 2.0).eval()
        (lazy.full((3, 3), 2.5).tanh() * 2.0).eval()
    shown = capsys.readouterr().err
    assert re.findall("==== .* ====", shown) == [f"==== {name} ====" for name in ("Trace IR", "Flat IR", "Flat IR passes", "StableHLO IR")]
    assert "constant-folding: " in shown and "common-subexpression: " in shown


def test_timing_says_what_took_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    CACHE.clear()
    with lazy.logger.use_verbosity("timing"):
        x = lazy.Tensor([1.0, 2.0])
        (x * 3.0).eval()
        (x * 3.0).eval()
    lines = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"\[timing\] .+ took \d+\.\d{3} ms", line) for line in lines)
    assert [line.split(" took ")[0][9:] for line in lines] == ["lowering", "building StableHLO", "compilation by pjrt", "execution", "execution"]


def test_nothing_is_said_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    (lazy.full((3, 1), 0.25).tanh() * 7.0).eval()
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
