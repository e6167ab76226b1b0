"""What the suite checks of every call: each property fails on a kernel without it, and says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.conformance.memory import Snapshot, relaid, shared
from fusible.conformance.special import PLANTINGS, planting
from fusible.conformance.suite import Verdict, check_record
from fusible.conformance.table import Disagreement, load, random
from fusible.tex.backends.template import reads
from fusible.tex.interface.declare import Request
from fusible.tex.selection.registry import registry

REFERENCE: Any = registry.find("torch")


def said(function: str, wrong: Callable[..., Any]) -> str:
    """What the suite says of a function so served."""

    def call(name: str, **arguments: Any) -> Any:
        return wrong(getattr(REFERENCE, name), **arguments)

    record = load()[function]
    (row, *_) = check_record(call, record, record.dtypes[0])
    assert row.verdict == Verdict.DISAGREES
    return row.detail


def writes_to_its_input(true: Any, *, a: Any, **rest: Any) -> Any:
    result = true(a=a, **rest)
    a.zero_()
    return result


def writes_beside_its_output(true: Any, *, out: Any, **rest: Any) -> Any:
    result = true(out=out, **rest)
    if out is not None and out.storage_offset():
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()
    return result


def leaves_the_output_alone(true: Any, *, ln_out: Any, **rest: Any) -> Any:
    return true(ln_out=None, **rest)


def returns_a_copy_of_the_output(true: Any, *, ln_out: Any, **rest: Any) -> Any:
    result = true(ln_out=ln_out, **rest)
    return [result[0].clone(), *result[1:]]


def reads_past_gaps(true: Any, *, a: Any, **rest: Any) -> Any:
    return true(a=a if a.is_contiguous() else torch.as_strided(a, a.shape, torch.empty(a.shape).stride()), **rest)


def makes_its_result_anywhere(true: Any, **arguments: Any) -> Any:
    made = true(**arguments)
    return torch.empty(made.shape, dtype=made.dtype).copy_(made)


def makes_numbers_of_any_dtype(true: Any, *, a: Any, **rest: Any) -> Any:
    return true(a=a, **rest) + torch.zeros(a.shape, device=a.device)


@pytest.mark.parametrize(
    ("function", "wrong", "words"),
    [
        ("prim_add", writes_to_its_input, "the call wrote the argument a"),
        ("fp8_transpose", writes_beside_its_output, "beside the elements of the argument out"),
        ("rmsnorm_fwd", leaves_the_output_alone, "into ln_out: output ln_out is"),
        ("rmsnorm_fwd", returns_a_copy_of_the_output, "result.0 is not the argument ln_out that was given to be written"),
        ("prim_add", reads_past_gaps, "of arguments with gaps between their elements"),
        ("prim_add", makes_its_result_anywhere, "lies there while torch's defaults are meta and float64"),
        ("prim_add", makes_numbers_of_any_dtype, "is of torch.float64 and not of torch.float32 while torch's defaults"),
    ],
)
def test_a_kernel_without_a_property_is_told_so(function: str, wrong: Any, words: str) -> None:
    assert words in said(function, wrong)


def test_one_buffer_for_all_results_is_told() -> None:
    buffers: dict[Any, torch.Tensor] = {}

    def wrong(true: Any, **arguments: Any) -> Any:
        made = true(**arguments)
        return buffers.setdefault(made.shape, torch.empty_like(made)).copy_(made) if made.numel() else made

    assert "two calls gave the same memory as result" in said("relu", wrong)


def test_a_second_call_that_is_wrong_is_told() -> None:
    seen: set[Any] = set()

    def wrong(true: Any, **arguments: Any) -> Any:
        made, again = true(**arguments), arguments["input"].shape in seen
        seen.add(arguments["input"].shape)
        return made * 2 if again else made

    assert "of a second call, output 0" in said("gelu", wrong)


def test_values_planted_are_where_they_belong() -> None:
    for kind, turn in PLANTINGS:
        with planting(kind, turn) as chosen:
            drawn = [random(torch.Generator(), (3, 5), torch.float32) for _ in range(6)]
        assert chosen.drawn == 6
        for i, x in enumerate(drawn):
            odd = {"nan": x.isnan(), "inf": x.isinf(), "finite": (x == 0) | (x.abs() > 1e5) | (x.abs() < 1e-38)}[kind]
            assert odd.flatten().nonzero().flatten().tolist() == ([0, 7, 14] if i % 3 == turn else [])
    assert random(torch.Generator(), (9,), torch.float32).isfinite().all()


def test_other_memory_has_the_same_values() -> None:
    x, y = torch.arange(12.0).view(3, 4).t(), [torch.arange(5), torch.tensor(2.0)]
    given = relaid({"x": x, "y": y, "z": x}, strided={"x", "y"}, shifted={"z"})
    assert torch.equal(given["x"], x) and torch.equal(given["y"][0], y[0]) and given["y"][1] == 2
    assert given["x"].stride() == (6, 2) and given["x"].storage_offset() and given["y"][0].stride() == (2,)
    snapshot = Snapshot(given)
    given["x"].add_(1)
    snapshot.check({"x", "z"})
    with pytest.raises(Disagreement, match="the call wrote the argument x"):
        snapshot.check(set())
    assert shared([x], {"x": x[1:], "y": y}) == {("0", "x")}


def test_the_templates_answer_serves_every_function() -> None:
    kinds = (("dz", ("cpu", torch.float32)), ("x", ("cpu", torch.float32)))
    assert reads(Request("rmsnorm_bwd", kinds)) is None
    assert reads(Request("rmsnorm_bwd", (("dz", ("cpu", torch.float16)),))) == f"reads float32, and dz is {('cpu', torch.float16)}"
    assert tex.TEXBackendBase().supports(Request("rmsnorm_bwd", kinds)) == "not implemented by it"
