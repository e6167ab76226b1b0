"""The settings: what each does, what it refuses, where its default comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusible import lazy
from fusible.errors import ArgumentError, BackendError, CompileError, DTypeError
from fusible.lazy.config import Config
from fusible.lazy.evaluation.program_cache import CACHE, ProgramCache


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    for name in ("engine", "timing_cache_file_path", "enable_input_validation", "use_cache_in_eager_mode", "extra_error_information"):
        delattr(lazy.config, name)


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(Config()) == (
        "Config(engine='pjrt', timing_cache_file_path=None, enable_input_validation=True, use_cache_in_eager_mode=True, extra_error_information=())"
    )
    monkeypatch.setenv("FUSIBLE_LAZY_ENGINE", "IREE")
    monkeypatch.setenv("FUSIBLE_LAZY_CACHE_DIR", "somewhere")
    monkeypatch.setenv("FUSIBLE_LAZY_ERRORS", "flat_ir, diagnostic")
    config = Config()
    assert (config.engine, config.timing_cache_file_path, config.extra_error_information) == ("iree", "somewhere", ("flat_ir", "diagnostic"))
    config.engine = "pjrt"
    assert config.engine == "pjrt"
    del config.engine
    assert config.engine == "iree"


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("enable_input_validation", 1, DTypeError),
        ("use_cache_in_eager_mode", "no", DTypeError),
        ("timing_cache_file_path", 3, DTypeError),
        ("engine", None, DTypeError),
        ("extra_error_information", ["everything"], ArgumentError),
    ],
)
def test_a_value_that_is_none_of_a_setting_is_refused_where_it_is_assigned(name: str, value: Any, kind: type[Exception]) -> None:
    before = getattr(lazy.config, name)
    with pytest.raises(kind, match=rf"\nconfig\.{name}: expected .*, got .*; assign") as caught:
        setattr(lazy.config, name, value)
    assert str(caught.value).split("\n")[1].strip() == "setattr(lazy.config, name, value)"
    assert getattr(lazy.config, name) == before


def test_all_extra_information_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy.config, "_values", {})
    lazy.config.extra_error_information = ["all"]
    assert lazy.config.extra_error_information == ("flat_ir", "diagnostic")


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(AttributeError):
        lazy.config.enable_everything = True  # type: ignore[attr-defined]


def test_every_setting_is_documented() -> None:
    documented = {name: value.__doc__ for name, value in vars(Config).items() if type(value).__name__ == "_Setting"}
    assert len(documented) == 5 and all(documented.values())


def test_input_validation_may_be_left_to_the_engine() -> None:
    x = lazy.Tensor([1, 2])
    with pytest.raises(DTypeError, match="expected a dtype among"):
        lazy.exp(x)
    lazy.config.enable_input_validation = False
    recorded = lazy.exp(x)
    assert recorded.dtype is lazy.int32
    with pytest.raises(CompileError, match="exponential|exp"):
        recorded.eval()


def test_an_evaluation_may_go_without_the_cache() -> None:
    x = lazy.Tensor([1.0, 2.0])
    (x * 5.0).eval()
    size, compiled = len(CACHE), CACHE.compiled
    lazy.config.use_cache_in_eager_mode = False
    assert (x * 5.0).tolist() == [5, 10] and (x * 6.0).tolist() == [6, 12]
    assert (len(CACHE), CACHE.compiled) == (size, compiled)
    lazy.config.use_cache_in_eager_mode = True
    (x * 5.0).eval()
    assert CACHE.compiled == compiled


def test_an_engine_that_is_not_there_is_an_error_and_no_other_takes_its_place() -> None:
    lazy.config.engine = "tensorrt"
    with pytest.raises(BackendError, match=r"config.engine: expected one of pjrt, iree, got 'tensorrt' \(no engine of that name\)"):
        (lazy.ones((2,)) * 4.0).eval()


def _evaluate(scale: float) -> list[float]:
    CACHE.clear()
    return (lazy.Tensor([1.0, 2.0]) * scale).tolist()


def test_binaries_are_kept_in_the_directory_and_used_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy.config.timing_cache_file_path = tmp_path / "cache"
    assert _evaluate(3.0) == [3, 6]
    (file,) = (tmp_path / "cache").iterdir()
    written = file.stat().st_mtime_ns
    compiled: list[int] = []
    engine = type(lazy.engine.engines.ENGINES["pjrt"])
    original = engine.compile
    monkeypatch.setattr(engine, "compile", lambda self, *args: compiled.append(1) or original(self, *args))
    assert _evaluate(3.0) == [3, 6] and not compiled
    assert file.stat().st_mtime_ns == written
    assert _evaluate(4.0) == [4, 8] and len(compiled) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_binary_is_written_anew_with_a_warning(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    lazy.config.timing_cache_file_path = str(tmp_path)
    assert _evaluate(3.0) == [3, 6]
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-9], "changed": data[:50] + bytes([data[50] ^ 1]) + data[51:], "empty": b""}[damage])
    assert _evaluate(3.0) == [3, 6]
    assert f"[warning] {file} is damaged and is written anew" in capsys.readouterr().err
    assert _evaluate(3.0) == [3, 6]
    assert capsys.readouterr().err == ""


def test_programs_of_two_engines_are_kept_apart() -> None:
    cache, trace = ProgramCache(), lazy.Trace([lazy.ones((2,)).tanh()])
    first = cache.get(trace)
    lazy.engine.engines.ENGINES["second"] = lazy.engine.engines.ENGINES["pjrt"]
    try:
        lazy.config.engine = "second"
        assert cache.get(trace) is not first and len(cache) == 2
    finally:
        del lazy.engine.engines.ENGINES["second"]


def test_a_wrong_verbosity_is_refused_where_it_is_assigned() -> None:
    before = lazy.logger.verbosity
    with pytest.raises(ArgumentError, match="logger.verbosity: expected .*, got 'loud'") as caught:
        lazy.logger.verbosity = "loud"
    assert str(caught.value).split("\n")[1].strip() == 'lazy.logger.verbosity = "loud"'
    assert lazy.logger.verbosity == before


def test_binaries_of_two_levels_of_effort_are_kept_apart(tmp_path: Path) -> None:
    lazy.config.timing_cache_file_path = tmp_path
    for level in (0, 3):
        lazy.compile(lambda x: x * 1.375, level, args=[lazy.InputInfo((3,), lazy.float32)])
    assert len(list(tmp_path.iterdir())) == 2
