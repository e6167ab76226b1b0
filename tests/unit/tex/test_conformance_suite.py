"""The suite that backends run against: it finds what is wrong, and knows every function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.cli import main
from fusible.conformance import Disagreement, Output, Verdict, check_backend, without_cases
from fusible.conformance.crossing import Crossing
from fusible.conformance.suite import check_record, of_own_making
from fusible.conformance.table import Sample, load, measure
from fusible.errors import ArgumentError, BackendError
from fusible.quantized import Quantizer
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.formats import format_of, is_quantized, scaling, scheme_of
from fusible.tex.selection.registry import registry


def test_every_function_has_a_record() -> None:
    assert not list(without_cases())


REFERENCE: Any = registry.find("torch")

OF_GROUPS = sorted(name for name in load() if name.startswith(("group_", "bgrad_group_", "te_general_grouped_gemm")))
GIVEN_GROUPS = {
    "group_dequantize",
    "group_requantize_inplace",
    *(f"te_general_grouped_gemm_for_{x}" for x in ("grouped_tensor", "discrete_in", "discrete_out")),
}


def formats(sample: Sample) -> set[str]:
    """The number formats of what a call is given: quantized tensors, grouped ones, and quantizers."""
    given = [x for value in sample.arguments.values() for x in (value if isinstance(value, list) else [value])]
    kinds = {scaling(x if isinstance(x, Quantizer) else x.quantizer) for x in given if isinstance(x, Quantizer) or is_grouped(x)}
    return kinds | {format_of(x).name for x in given if is_quantized(x)}


@pytest.mark.parametrize("function", OF_GROUPS)
def test_functions_of_groups_are_called_with_blocks_and_without(function: str) -> None:
    found = set().union(*map(formats, load()[function].samples(torch.bfloat16)))
    assert "mxfp8" in found and found & {"delayed", "float8"}, found


@pytest.mark.parametrize("function", OF_GROUPS)
def test_who_lays_groups_out_in_a_way_of_its_own_is_given_none_of_blocks(function: str) -> None:
    record = load()[function]
    every, own = record.samples(torch.bfloat16), of_own_making(record).samples(torch.bfloat16)
    blocks = [x.label for x in every if any(is_grouped(y) and scheme_of(y.quantizer).format.block_scaled for y in x.arguments.values())]
    assert [x.label for x in own] == [x.label for x in every if x.label not in blocks] and own
    assert bool(blocks) == (function in GIVEN_GROUPS)


@pytest.fixture
def careless() -> Iterator[type[tex.TEXBackendBase]]:
    """A backend with the mistakes that ports make."""

    class Careless(tex.TEXBackendBase):
        NAME, PRIORITY = "careless", -1

        def gelu(self, input, quantizer):
            return REFERENCE.gelu(input, quantizer) * 1.01

        def relu(self, input, quantizer):
            raise ZeroDivisionError("mine")

        def silu(self, input, quantizer):
            return REFERENCE.silu(input, quantizer)

        @tex.requires(lambda request: "reads nothing")
        def srelu(self, input, quantizer):
            return input

        def fp8_transpose(self, input, dtype, *, out):
            return input.movedim(-1, 0).contiguous()

        def compute_amax(self, input, amax):
            amax.add_(1)

        def rmsnorm_bwd(self, dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
            dx, dgamma = REFERENCE.rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
            return [dx.float(), dgamma]

    tex.register_backend(Careless)
    yield Careless
    registry.unregister_backend("careless")


def verdicts(function: str, **options: Any) -> set[str]:
    return {row.verdict for row in check_backend("careless", [function], **options)}


def test_each_mistake_gets_its_verdict(careless: type) -> None:
    rows = {row.function: row for row in check_backend("careless", dtypes=[torch.float32]) if "to" not in row.dtype}
    assert {name: row.verdict for name, row in rows.items()} == {
        "compute_amax": Verdict.DISAGREES,  # overwrites
        "fp8_transpose": Verdict.DISAGREES,  # leaves the given output alone
        "gelu": Verdict.DISAGREES,
        "relu": Verdict.FAILS,
        "rmsnorm_bwd": Verdict.AGREES,
        "silu": Verdict.AGREES,
        "srelu": Verdict.REFUSED,
    }
    assert "times its bound from float64" in rows["gelu"].detail and "[16, 64]" in rows["gelu"].detail
    assert rows["relu"].detail == "ZeroDivisionError: mine" and rows["srelu"].detail == "reads nothing"
    assert verdicts("rmsnorm_bwd", dtypes=[torch.bfloat16]) == {Verdict.DISAGREES}  # another dtype than x
    assert rows["silu"].samples and rows["silu"].float64 is not None and rows["silu"].float64 <= 1 and rows["silu"].reference == 0


def test_quantized_outputs_are_checked(careless: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: Any, input: Any, quantizer: Any) -> Any:
        y = REFERENCE.silu(input, quantizer)
        if quantizer is not None:
            y._data.add_(1)
        return y

    monkeypatch.setattr(careless, "silu", shifted)
    rows = {row.dtype: row.verdict for row in check_backend("careless", ["silu"], [torch.bfloat16])}
    assert rows == {"bfloat16": Verdict.AGREES, "bfloat16 to E4M3": Verdict.DISAGREES, "bfloat16 to E5M2": Verdict.DISAGREES}


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.AGREES), (1.5, Verdict.DISAGREES)])
def test_what_a_method_calls_in_turn_is_served_as_ever(careless: type, monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str) -> None:
    """So a method that has others quantize its result is checked with a quantizer too, as it serves such calls."""

    def composed(self: Any, input: Any, quantizer: Any) -> Any:
        y = REFERENCE.relu(input if isinstance(input, torch.Tensor) else tex.dequantize(input, tex.DType.kFloat32), None)
        return y if quantizer is None else tex.quantize(y * factor, quantizer)

    monkeypatch.setattr(careless, "relu", composed)
    rows = {row.dtype: row for row in check_backend("careless", ["relu"], [torch.bfloat16])}
    assert {name: row.verdict for name, row in rows.items()} == {"bfloat16": "agrees", "bfloat16 to E4M3": verdict, "bfloat16 to E5M2": verdict}
    assert all(row.samples for row in rows.values() if row.verdict == Verdict.AGREES)


def test_a_call_that_its_backend_hands_over_is_refused_by_it(careless: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(careless, "silu", lambda self, input, quantizer: tex.hand_over(self, "silu", input, quantizer))
    assert verdicts("silu") == {Verdict.REFUSED}


def test_the_command_says_so_and_exits_with_one(careless: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", "careless", "--only", "gelu,silu", "--dtype", "float32", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["agrees"] and {row["function"] for row in found["rows"] if row["verdict"] == "disagrees"} == {"gelu"}
    assert main(["check-backend", "careless", "--only", "silu", "--dtype", "float32"]) == 0
    assert "1 functions: 3 agrees" in capsys.readouterr().out
    assert main(["check-backend", "nobody"]) == 2 and main(["check-backend", "careless", "--dtype", "int8"]) == 2
    assert "Backend 'nobody' not found" in capsys.readouterr().err


def test_unknown_functions_and_backends_are_refused() -> None:
    with pytest.raises(ArgumentError, match="functions of the suite"):
        list(check_backend("torch", ["no_such"]))
    with pytest.raises(BackendError, match="not found"):
        list(check_backend("no_such"))


@pytest.mark.parametrize("backend", ["torch", "cpu", "xla"])
def test_the_backends_of_this_package_agree(backend: str) -> None:
    """One function of every kind of output; the whole table runs in the conformance tests and by the command."""
    if registry.reason_unavailable(registry.find(backend)) is not None:
        pytest.skip("not available here")
    functions = ["bgrad_quantize", "fused_attn_bwd", "multi_tensor_adam", "quantize"]
    functions = functions[1:3] if backend == "xla" else functions  # each sample is a program there
    rows = list(check_backend(backend, functions, [torch.bfloat16]))
    assert [row.function for row in rows] == functions
    assert all(row.verdict == Verdict.AGREES and row.samples for row in rows), rows


@pytest.mark.parametrize(
    ("reference", "got"),
    [
        (torch.zeros(2).double(), torch.zeros(3)),
        (torch.zeros(2).double(), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.tensor([torch.inf]).double(), torch.tensor([1.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (None, torch.zeros(1)),
        (torch.zeros(2).double(), None),
        ((1, 2), (1, 3)),
    ],
)
def test_what_cannot_agree_is_told(reference: Any, got: Any) -> None:
    with pytest.raises(Disagreement):
        measure(Output(None, reference), got, reference)


def test_a_nan_where_a_number_belongs_is_infinitely_wrong() -> None:
    assert measure(Output(None, None), torch.tensor([torch.nan, 0.0]), torch.zeros(2).double()) == torch.inf
    # Half a unit in the last place is the bound of a value rounded once; at 1 that is half an epsilon.
    off = torch.tensor([1 + torch.finfo(torch.bfloat16).eps]).to(torch.bfloat16)
    assert 1 < measure(Output(None, None, torch.bfloat16), off, torch.ones(1).double()) < 2.1


class Elsewhere(Crossing):
    """The CPU as if it were another device."""

    def stays(self, x: Any) -> bool:
        return isinstance(x, torch.device)

    def tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@pytest.mark.parametrize("function", ["grouped_swizzle_for_gemm", "multi_tensor_swizzle_scales_for_gemm_", "nvfp4_2d_partial_cast", "quantize"])
def test_what_a_call_replaces_in_its_arguments_comes_back(function: str) -> None:
    def call(function: str, **arguments: Any) -> Any:
        crossing = Elsewhere()
        return crossing.leave(getattr(REFERENCE, function)(**crossing.enter(arguments)))

    record = load()[function]
    assert all(row.verdict == Verdict.AGREES and row.samples for row in check_record(call, record, record.dtypes[0]))


def test_it_runs_on_another_device_than_the_samples_are_on() -> None:
    """The meta device computes nothing, so what comes back cannot be read: the calls got there."""
    rows = list(check_backend("torch", ["relu"], [torch.float32], device="meta"))
    assert rows[0].verdict == Verdict.FAILS


def test_grouped_tensors_go_to_another_side_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side is other tensors on the same device: what is written there is written back, and what is not stays."""

    class Elsewhere(Crossing):
        def stays(self, x: Any) -> bool:
            return isinstance(x, torch.device)

        def tensor(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    monkeypatch.setattr("fusible.conformance.suite.crossing_for", lambda *_: Elsewhere)
    functions = ["group_dequantize", "group_quantize", "group_requantize_inplace", "te_general_grouped_gemm_for_grouped_tensor"]
    rows = list(check_backend("torch", functions, [torch.bfloat16]))
    assert [row.function for row in rows] == functions and all(row.verdict == Verdict.AGREES for row in rows), rows


def test_a_view_of_a_part_of_its_storage_is_one_on_another_device() -> None:
    x = torch.zeros(3, 6, dtype=torch.bfloat16)[1:, :2]
    moved = Crossing("meta").enter(x)
    assert moved.device.type == "meta" and (moved.shape, moved.stride(), moved.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert moved.untyped_storage().nbytes() == x.untyped_storage().nbytes()
