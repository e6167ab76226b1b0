"""``fusible bench`` at sizes that take no time: what it prints and writes. How fast anything is, is no matter here."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusible import cpp_extensions
from fusible.cli import main
from fusible.cli.bench import job, memory, models, peers, table, timing
from fusible.cli.bench.generation import FusibleDecoder
from fusible.cli.bench.machine import Bound, Limits
from fusible.cli.bench.options import TABLES, BenchOptions
from fusible.cli.bench.plain import DecoderShape, PlainDecoder
from fusible.cli.bench.table import Case, Row, Settings
from fusible.cli.bench.timing import side_by_side
from fusible.cli.commands.bench import COMMAND

REPORT = {"fusible": str, "machine": dict, "limits": dict, "options": dict, "note": str, "tables": dict}
MACHINE = {"cpu", "cores", "load", "memory_bytes", "threads", "native_threads", "level", "torch", "torch_level", "python", "system"}
ROW = {"what", "unit", "torch", "fusible", "ratio", "target", "met", "bound"}
LEAST_ROWS = {"casts": 7, "gemm": 7, "formats": 28, "matvec": 5, "producers": 10, "training": 5, "recipes": 10, "generation": 11}
LIMITS = Limits(gflops=100.0, gbytes=10.0)


FAST = [name for name in TABLES if name not in ("training", "peers")]
"""The memory of training is measured in other processes, which import torch anew; llama.cpp starts threads of its own, and ends a process that it
does not like."""


def figures(file: Path, tables: list[str]) -> dict[str, Any]:
    """What the command writes of some tables."""
    threads = torch.get_num_threads()
    assert main(["bench", "--quick", "--rounds", "1", "--threads", "1", "--only", ",".join(tables), "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    """The figures of the tables that take no time."""
    return figures(tmp_path_factory.mktemp("bench") / "figures.json", FAST)


def check_rows(table: dict[str, Any], name: str) -> None:
    """The table's fields are the documented ones, and no row is lacking."""
    assert set(table) == {"title", "beside", "rows", "notes"} and len(table["rows"]) >= LEAST_ROWS[name]
    assert len({row["what"] for row in table["rows"]}) == len(table["rows"])
    for row in table["rows"]:
        assert set(row) == ROW and row["unit"] in ("ms", "tokens/s", "MB")
        assert row["fusible"] >= 0 and row["torch"] >= 0 and (row["met"] is None) == (row["target"] is None)
        if row["bound"] is not None:
            assert set(row["bound"]) == {"by", "rate", "share"} and row["bound"]["by"] in ("products", "bandwidth", "overhead")
            assert row["bound"]["rate"] > 0 and (row["bound"]["share"] is None) == (row["bound"]["by"] == "overhead")


def test_the_report_has_the_promised_form(measured: dict[str, Any]) -> None:
    assert {name: type(value) for name, value in measured.items()} == REPORT
    assert set(measured["machine"]) == MACHINE and measured["machine"]["threads"] == 1
    assert measured["limits"]["gflops"] > 0 and measured["limits"]["gbytes"] > 0
    assert measured["options"] == {"rounds": 1, "quick": True} and "do not quote them" in measured["note"]
    assert list(measured["tables"]) == FAST


@pytest.mark.parametrize("name", FAST)
def test_the_rows_of_a_table_have_the_promised_form(measured: dict[str, Any], name: str) -> None:
    check_rows(measured["tables"][name], name)


@pytest.mark.slow
def test_training_has_steps_memory_and_what_was_left_out(tmp_path: Path) -> None:
    table = figures(tmp_path / "figures.json", ["training"])["tables"]["training"]
    check_rows(table, "training")
    assert any(row["unit"] == "MB" for row in table["rows"])
    assert any("torch.compile is left out" in note for note in table["notes"])


@pytest.mark.parametrize("contestant", ["torch", "delayed", "current"])
@pytest.mark.parametrize("model", models.MODELS)
def test_a_step_trains(model: str, contestant: str) -> None:
    step = models.make_step(model, contestant, quick=True)
    for _ in range(3):
        step()
    assert models.work_of(model, True) > 0 and models.describe_model(model, True)


def test_a_table_is_printed_with_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--rounds", "1", "--only", "matvec", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "1 threads" in printed and "At best here" in printed and f"matvec: {TABLES['matvec']}" in printed
    assert "[64, 64] x 16" in printed and ">= 2.50" in printed and "missed" not in printed and "casts" not in printed


def test_json_on_standard_output_is_all_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--rounds", "1", "--only", "matvec", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["tables"]) == ["matvec"] and "matvec" in captured.err


NAMES = "casts, gemm, formats, matvec, producers, training, recipes, generation or peers, comma-separated"
WRONG = {
    "--only casts,nosuch": f"--only: expected {NAMES}, got 'nosuch'; name one of these.\n",
    "--only ,": "--only: expected names, comma-separated, got ','; put a name on both sides of each comma.\n",
    "--rounds 0": "--rounds: expected at least 1, got 0; give a larger number.\n",
    "--threads 0": "--threads: expected at least 1, got 0; give a larger number.\n",
    "--level avx3": "--level: expected one of generic, avx2, avx512, avx512bf16, amx, got 'avx3'; name one of these.\n",
    "--json nosuch/file": "--json: expected a file that can be written, got nosuch/file; name another.\n",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_one_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", *words.split()]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", WRONG[words])


def test_help_lists_the_tables_and_loads_no_torch() -> None:
    call = "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    program = f"import sys\nfrom fusible.cli import main\n{call}"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(name in ended.stdout and summary in ended.stdout for name, summary in TABLES.items())


def test_each_table_comes_once_and_in_order(tmp_path: Path) -> None:
    given = {"rounds": 1, "quick": True, "threads": None, "json": str(tmp_path / "new.json"), "level": None}
    options = BenchOptions.from_command_line(type("Given", (), {**given, "only": "matvec, casts,matvec"})())  # pyright: ignore[reportArgumentType]
    assert options.tables == ("casts", "matvec") and 1 <= options.threads_used <= 2


def test_options_are_said_again_in_words(tmp_path: Path) -> None:
    for options in (
        BenchOptions(),
        BenchOptions(("casts", "matvec"), 3, True, 1, str(tmp_path / "new.json"), "avx2"),
        BenchOptions(("training",), json="-", level="generic"),
    ):
        parser = argparse.ArgumentParser()
        COMMAND.arguments(parser)
        name, *words = options.command_line()
        assert name == "bench" and BenchOptions.from_command_line(parser.parse_args(words)) == options


@pytest.mark.skipif(not cpp_extensions.available, reason="the native kernels are not built")
def test_a_level_is_measured_as_on_its_cpu_and_torch_is_held_to_it(tmp_path: Path) -> None:
    """In a process of its own, as torch asks the CPU once."""
    level = cpp_extensions.usable_levels()[0]
    file = tmp_path / "figures.json"
    assert main(["bench", "--quick", "--rounds", "1", "--threads", "1", "--only", "matvec", "--level", level, "--json", str(file)]) == 0
    machine = json.loads(file.read_text())["machine"]
    assert machine["level"] == level and machine["torch_level"] == ("DEFAULT" if level == "generic" else level.upper())


def test_a_level_that_the_cpu_lacks_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "native_kernels", lambda: {"levels_usable": ["generic", "avx2"]})
    assert main(["bench", "--quick", "--level", "amx"]) == 2
    message = "--level: expected one of generic, avx2, got amx; name one of this CPU's.\n"
    assert capsys.readouterr().err.endswith(message)


def test_what_bounds_a_call_follows_its_work() -> None:
    assert LIMITS.bound(1.0, 50e9, 1e9) == Bound("products", 50.0, 0.5)
    assert LIMITS.bound(1.0, 1e9, 4e9) == Bound("bandwidth", 4.0, 0.4)
    assert LIMITS.bound(0.25, 0.0, 1e9) == Bound("bandwidth", 4.0, 0.4)
    small = LIMITS.bound(1e-5, 0.0, 1e3)
    assert (small.by, small.share) == ("overhead", None) and small.rate == pytest.approx(9.9)


def test_a_ratio_is_a_speed_or_a_part_of_the_bytes() -> None:
    assert Row("", "ms", 6.0, 2.0, 3.0).ratio == 3.0 and Row("", "tokens/s", 2.0, 6.0).ratio == 3.0 and Row("", "MB", 2.0, 1.0).ratio == 0.5
    assert Row("", "ms", 6.0, 2.0, 3.0).met is True and Row("", "ms", 5.9, 2.0, 3.0).met is False and Row("", "ms", 6.0, 2.0).met is None
    assert Row("", "MB", 2.0, 1.0, 0.6).met is True and Row("", "MB", 2.0, 1.0, 0.4).met is False


def test_cases_that_share_a_call_share_its_time() -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda: calls.append(name)

    plain, first, second = note("torch"), note("first"), note("second")
    rows = Settings(3, True, 1, LIMITS).measure([Case("a", plain, first), Case("b", plain, second)])
    assert rows[0].torch == rows[1].torch and set(calls) == {"torch", "first", "second"}


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    times = side_by_side({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, seconds=0.0)
    assert calls[-4:] == ["a", "b", "a", "b"] and set(times) == {"a", "b"} and all(seconds > 0 for seconds in times.values())


def test_a_long_call_has_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    monkeypatch.setattr(timing, "_SECONDS_IN_ALL", 0.0)
    side_by_side(functions, rounds=9, seconds=1e-9)
    assert calls[12:] == ["a", "b"] * 3
    monkeypatch.undo()
    calls.clear()
    side_by_side(functions, rounds=9, seconds=1e-9)
    assert calls[12:] == ["a", "b"] * 9


def test_what_has_become_slow_is_left_out_of_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_LONG", 0.0)

    def cases(size: int) -> list[Case]:
        return [Case(f"{size}, {kind or 'any'}", int, int, kind=kind) for kind in ("NN", "")]

    measured = Settings(1, True, 1, LIMITS).measure_growing((1, 2, 3), cases)
    assert [row.what for row in measured.rows] == ["1, NN", "1, any", "2, any", "3, any"]
    assert measured.notes == ["Larger sizes than 1, NN are left out, for torch takes seconds."]


@pytest.mark.parametrize(("fp32", "dtype"), [(1.0, torch.float32), (3.0, torch.bfloat16), (20.0, torch.bfloat16)])
def test_torch_trains_in_float32_where_that_is_several_times_as_fast(monkeypatch: pytest.MonkeyPatch, fp32: float, dtype: torch.dtype) -> None:
    monkeypatch.setattr(models, "side_by_side", lambda calls, **_: {"bf16": 10.0, "fp32": fp32})
    assert models.plain_dtype.__wrapped__() is dtype


def test_without_llama_cpp_its_table_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda name: False)
    measured = peers.peers(Settings(1, True, 1, LIMITS))
    assert measured.rows == [] and "pip install 'fusible[peers]'" in measured.notes[0]


SHAPE = DecoderShape(layers=3, hidden=64, heads=4, groups=2, inner=96, vocabulary=50)


def test_both_decoders_compute_the_same() -> None:
    """Every one of about eight roundings to bf16 (2^-9) a block adds in square, in either; FP8 adds weights rounded by up to 2^-4 of their values."""
    prompts = torch.randint(SHAPE.vocabulary, (3, 7))
    theirs, ours, held = PlainDecoder(SHAPE), FusibleDecoder(SHAPE, quantized=False), FusibleDecoder(SHAPE)
    with torch.inference_mode():
        for decoder in (theirs, ours, held):
            decoder.start(3, 12)
        for tokens in (prompts, *torch.randint(SHAPE.vocabulary, (4, 3, 1))):
            wanted, got, rounded = (decoder.step(tokens).float() for decoder in (theirs, ours, held))
            assert (got - wanted).norm() < 2**-9 * math.sqrt(2 * 8 * 2 * SHAPE.layers) * wanted.norm()
            assert 2**-9 * wanted.norm() < (rounded - wanted).norm() < 2**-4 * math.sqrt(4 * SHAPE.layers) * wanted.norm()
    sizes = [sum(weight.numel() for weight in decoder.weights) for decoder in (theirs, held)]
    assert sizes[0] == sizes[1] and theirs.nbytes - held.nbytes == pytest.approx(sizes[0], rel=0.01)
    assert theirs.nbytes == ours.nbytes


def test_both_gpts_compute_the_same() -> None:
    options = models._gpt_options(True)
    plain, ours = models.PlainGPT(options), models.ByteGPT(options, "fp32")
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs)
    text = torch.randint(256, (2, options.seq_len))
    plain.cos, plain.sin = (table.float() for table in (plain.cos, plain.sin))
    torch.testing.assert_close(ours(text), plain(text), rtol=0.02, atol=0.02)  # the plain model's rotations are rounded to bf16


@pytest.mark.slow
def test_memory_that_cannot_be_measured_has_a_reason() -> None:
    reason = memory.peak_memory("mlp", "nosuch", 0, True)
    assert isinstance(reason, str) and reason
