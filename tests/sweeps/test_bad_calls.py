"""Every function of tex refuses a bad call in one sentence that names it and the argument, and leaves all arguments as they were; or it does what its
declaration says of such a value."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy

import pytest
import torch
from accepted import UNREAD, contradiction
from bad_calls import BadCall, bad_calls, clear, outcome, public

from fusible import tex
from fusible.conformance.table import Sample, load
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError
from fusible.tex.calls.examination import examine
from fusible.tex.interface.declare import DECLARATIONS

TABLE = load()
ACCEPTED = {
    "first sparse": "of a list its numbers are taken: the result is held against that of a dense tensor",
    "strided": "how a tensor lies in memory changes nothing: the result is held against the reference",
    "of ": "numbers of another type are read as numbers: the result is held against that of the right type",
    "flat": "leading dimensions are flattened, or it is flat",
    "one rank more": "leading dimensions are flattened",
    "longer": "any number of rows, and buffers that have more than is read",
    "shorter": "any number of rows",
    "wider": "any number of columns, and buffers that have more than is read",
    "empty": "nothing is computed of nothing",
    "0-d": "one number, where one is asked for",
    "None": "the default, or what is not asked for",
    "meta": "of tensors that are all on meta others on meta come",
    "a tensor": "where None was, a tensor may be; it may go unread",
    "-1": "a number among those that are legal",
    "99": "a number among those that are legal",
    "2.5": "a number for a number",
    "3": "a number for a number, or for a member of an enumeration",
    "empty list": "nothing to do",
    "longer list": "one more to do",
    "shorter list": "one less to do",
    "a list with None": "none of that one",
    "a list with -1": "a number among those that are legal",
    "a list with a number": "a number among those that are legal",
    "a list with a large number": "a number among those that are legal",
}
"""Why a kind of wrong value may be none, by its name or the beginning of that. Whatever kind is not here is refused by every function, and what is
accepted must not contradict its declaration (``accepted.contradiction``)."""
UNDECLARED = {("multi_tensor_compute_scale_inv_e8m0", "dummy"): "documented to be none"}


def _allowed(call: BadCall) -> bool:
    inner = call.what.removeprefix("first ")
    what = inner.removeprefix("first ")
    numbers = not ACCEPTED.keys().isdisjoint((call.what, inner, what)) or what.startswith("of ")
    return numbers or (call.function, call.argument) in UNREAD or (call.function, call.argument) in UNDECLARED


def _scored(calls: Iterable[BadCall]) -> tuple[Counter[str], list[str]]:
    """How many calls came to what, and those that are neither clear nor rightly accepted."""
    counts: Counter[str] = Counter()
    unclear = []
    for call in calls:
        arguments = deepcopy(call.arguments)
        found = outcome(call)
        wrong = found.text if found.kind != "accepted" else contradiction(call, public(call.function), found.result, arguments)
        if found.kind == "clear" or (found.kind == "accepted" and not wrong and _allowed(call)):
            counts[found.kind] += 1
        else:
            unclear.append(f"{call}: {found.kind}: {wrong[:200]}")
    return counts, unclear


def test_a_sample_of_bad_calls_is_refused_clearly() -> None:
    draw = random.Random(14)
    calls: list[BadCall] = []
    for record in TABLE.values():
        dtype = draw.choice(record.dtypes)
        place = draw.randrange(len(record.samples(dtype)))
        every = list(bad_calls(record, dtype, [place]))
        calls += draw.sample(every, min(8, len(every)))
    counts, unclear = _scored(calls)
    print(f"{len(calls)} bad calls of {len(TABLE)} functions: {dict(counts)}")
    assert not unclear, "\n".join(unclear)
    assert len(calls) > 1000 and counts["clear"] > 2 * counts["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("function", TABLE)
def test_every_bad_call_is_refused_clearly(function: str) -> None:
    record = TABLE[function]
    last = len(record.samples(record.dtypes[0])) - 1
    counts, unclear = _scored(call for dtype in record.dtypes for call in bad_calls(record, dtype, sorted({0, last // 2, last})))
    print(function, dict(counts))
    assert not unclear, "\n".join(unclear)


def test_every_good_call_is_what_its_declaration_says() -> None:
    """What a failed call is held against must hold of the calls that do not fail: a wrong declaration would blame a good argument."""
    for record in TABLE.values():
        for sample in record.samples(record.dtypes[0]):
            arguments = {name: value for name, value in sample.arguments.items() if name in DECLARATIONS[record.function].signature.parameters}
            wrong = examine(DECLARATIONS[record.function], arguments)
            assert wrong is None, f"{record.function} {sample.label}: {wrong}"


def _call(**arguments: object) -> BadCall:
    return BadCall("gelu", "input", "None", {"input": None, "quantizer": None, **arguments}, Sample("", {}, ()))


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (DTypeError("input of gelu: expected a tensor, got None; pass one."), ""),
        (NotServedError("gelu not implemented for gelu(input=None) by any backend"), ""),
        (AttributeError("'NoneType' object has no attribute 'contiguous'"), "a AttributeError"),
        (TypeError("gelu(): argument 'input' (position 1) must be Tensor, not str"), "a TypeError"),
        (DTypeError("the input: expected a tensor, got None; pass one."), "no function"),
        (DTypeError("x of gelu: expected a tensor, got None; pass one."), "no argument"),
        (DTypeError("quantizer of gelu: expected a quantizer, got 3; pass one."), "no argument"),
        (DTypeError("input of gelu: expected a tensor, got\nNone; pass one."), "several lines"),
    ],
)
def test_what_counts_as_clear(error: Exception, wrong: str) -> None:
    assert clear(error, _call()) == wrong


def test_the_methods_own_error_is_the_cause() -> None:
    with pytest.raises(ShapeError, match="tensors.0. of concatenate: expected the shape .*, got") as raised:
        tex.prim.concatenate([torch.ones(2, 3), torch.ones(2, 4)], 0)
    assert isinstance(raised.value.__cause__, RuntimeError) and raised.value.argument == "tensors"


def test_what_no_argument_explains_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = RuntimeError("the kernel is broken")

    def gelu(self: object, input: object, quantizer: object) -> None:
        raise broken

    backend = tex.registry.find("torch")
    monkeypatch.setattr(type(backend), "gelu", gelu)
    with tex.set_backend("torch"), pytest.raises(RuntimeError) as raised:
        tex.gelu(torch.randn(2, 2), None)
    assert raised.value is broken and raised.value.__cause__ is None
    with tex.set_backend("torch"), pytest.raises(DTypeError, match="input of gelu"):
        tex.gelu(torch.ones(2, 2).tolist(), None)


def test_a_declared_function_is_examined_like_those_of_the_package() -> None:
    @tex.declare("input")
    def halved(input: torch.Tensor, times: int) -> None:
        """Half of ``input``, some times."""

    tex.implement(halved, backend="torch")(lambda backend, input, times: input / 2**times)
    try:
        assert halved(torch.ones(2), 1).tolist() == [0.5, 0.5]
        with pytest.raises(DTypeError, match="times of halved: expected an integer, got None; pass an integer."):
            halved(torch.ones(2), None)
    finally:
        tex.undeclare(halved)


def test_whoever_writes_in_place_is_asked_before() -> None:
    g, p, m = torch.ones(3), torch.ones(3), torch.zeros(3)
    with pytest.raises(DTypeError, match="lr of multi_tensor_sgd: expected a finite number, got None"):
        tex.multi_tensor_sgd(2048, torch.zeros(1, dtype=torch.int32), [[g], [p], [m]], 0.0, 0.9, 0.0, None, False, True, False, 1.0)
    assert m.eq(0).all() and p.eq(1).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: tex.layernorm_bwd(x, x, torch.ones(4), torch.ones(3), torch.ones(8), 0, False), "rsigma of layernorm_bwd"),
        (
            lambda x: tex.generic_gemm(
                x, True, x.to("meta"), False, None, None, torch.float32, None, torch.float32, False, None, False, None, 0, False, True
            ),
            "B of generic_gemm",
        ),
        (lambda x: tex.prim.concatenate([x, "x"], 0), "tensors[1] of concatenate: expected "),
        (lambda x: tex.prim.empty([5, -3], torch.float32, x), "shape[1] of empty: expected "),
        (lambda x: tex.scaled_masked_softmax_forward(x.view(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), 1.0), "mask of scaled_masked_softmax_forward"),
    ],
    ids=["a shape", "a device", "an item", "a size", "a dtype"],
)
def test_the_sentence_says_where(call: object, sentence: str) -> None:
    with pytest.raises((ArgumentError, DTypeError, ShapeError)) as raised:
        call(torch.ones(4, 8))  # type: ignore[operator]
    assert sentence in str(raised.value), raised.value
