"""What a backend says it serves, as rows and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.cli import main
from fusible.conformance import coverage_of, load, markdown
from fusible.errors import ArgumentError, BackendError
from fusible.tex.interface.declare import Request
from fusible.tex.selection.registry import registry


def gelu_refused(request: Request) -> str | None:
    kind: Any = request["input"]
    if request["quantizer"] is not None and request["quantizer"][0] != "current":  # type: ignore[index]
        return "quantizes by current scaling"
    return None if kind[1] is torch.float32 else "reads float32 | nothing else"


def product_refused(request: Request) -> str | None:
    return "transposes nothing" if request["transA"] or request["transB"] else None


@pytest.fixture
def partial() -> Iterator[None]:
    class Partial(tex.TEXBackendBase):
        NAME = "partial"
        DEVICES = frozenset({"cpu"})

        @tex.requires(gelu_refused)
        def gelu(self, input: Any, quantizer: Any) -> Any:
            raise AssertionError("nothing is called")

        @tex.requires(product_refused)
        def generic_gemm(self, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("nothing is called")

    tex.register_backend(Partial)
    yield
    registry.unregister_backend("partial")


@pytest.mark.usefixtures("partial")
def test_rows_say_what_is_served_what_not_and_by_whom_else() -> None:
    rows = {row.function: row for row in coverage_of("partial", ["gelu", "relu", "generic_gemm"], [torch.float32, torch.bfloat16])}
    gelu, relu, product = rows["gelu"], rows["relu"], rows["generic_gemm"]
    calls = len(load()["gelu"].samples(torch.float32))
    assert gelu.dtypes == {"float32": (calls, calls), "bfloat16": (0, calls)} and gelu.formats == ("current",) and gelu.served
    assert "partial" not in gelu.instead and set(gelu.instead) <= {"cpu", "torch"} and gelu.instead
    assert not relu.served and relu.why == "not implemented by it" and relu.dtypes == {} and relu.instead[-1] == "torch"
    served, asked = product.dtypes["float32"]
    plain = [s for s in load()["generic_gemm"].samples(torch.float32) if not (s.arguments["transA"] or s.arguments["transB"])]
    assert 0 < served == len(plain) < asked and product.why == "transposes nothing"


@pytest.mark.usefixtures("partial")
def test_the_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", "partial", "--matrix", "--only", "gelu,relu", "--dtype", "float32,bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| function | float32 | bfloat16 | float16 | quantizers | what it does not serve | served by |"
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- |"
    assert lines[2].startswith(r"| `gelu` | all | none |  | current | ")
    assert lines[3].startswith("| `relu` | none | none | none |  | not implemented by it | ") and lines[3].endswith("torch |")
    assert all(line.replace(r"\|", "").count("|") == 8 for line in lines[:4])
    assert lines[5].startswith("partial serves 1 of 2 functions.")
    assert main(["check-backend", "partial", "--matrix", "--only", "gelu", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["formats"] == ["current"]


def test_a_reason_with_a_bar_stays_in_its_cell() -> None:
    (row,) = coverage_of("torch", ["relu"], [torch.float32])
    shown = markdown("torch", [type(row)("relu", False, why="a | b")]).splitlines()[2]
    assert r"a \| b" in shown
    assert "| all | all | all | all |" in markdown("torch", list(coverage_of("torch", ["gelu"])))


def test_every_function_has_a_row_and_those_of_several_processes_are_not_asked() -> None:
    names = ["init_nvshmem_backend", "prim_all_reduce", "relu"]
    rows = {row.function: row for row in coverage_of("torch", names, [torch.float32])}
    assert list(rows) == names
    assert not rows["init_nvshmem_backend"].served and "NVSHMEM" in rows["init_nvshmem_backend"].why
    assert rows["prim_all_reduce"].served and "several processes" in rows["prim_all_reduce"].why


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ArgumentError, match="coverage_of: expected functions of tex, got gelo"):
        list(coverage_of("torch", ["gelo"]))
    if registry.reason_unavailable(registry.find("nvidia")) is not None:
        with pytest.raises(BackendError, match=r"coverage_of: expected a backend that can run here, got nvidia \("):
            list(coverage_of("nvidia"))
