"""What is said of a call that is refused: which argument is wrong, and of which modules, by the names that their caller knows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError, FusibleError
from fusible.pytorch import ops
from fusible.pytorch.ops import BasicOperation, FusedOperation

WIDTH = 8
X = torch.ones(4, WIDTH)


def sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: of a layout in beta
        return X.to_sparse(layout=layout)


FLOATS = "fp32, fp16, bf16 or fp64"
BROKEN: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "nothing": (lambda: None, "a torch.Tensor", "NoneType", "convert it"),
    "a list": (lambda: [1.0], "a torch.Tensor", "list", "convert it"),
    "coordinates": (lambda: sparse(torch.sparse_coo), "a dense tensor", "one of layout sparse_coo", "pass x.to_dense()"),
    "compressed rows": (lambda: sparse(torch.sparse_csr), "a dense tensor", "one of layout sparse_csr", "pass x.to_dense()"),
    "bits": (lambda: X > 0, FLOATS, "bool", "cast it"),
    "complex numbers": (lambda: X.to(torch.complex64), FLOATS, "complex64", "cast it"),
    "short integers": (lambda: X.to(torch.int16), FLOATS, "int16", "cast it"),
}
"""How to make a wrong tensor: what is expected instead, what came, what to do."""

CALLED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a module": (lambda: fusible.Linear(WIDTH, WIDTH), "x of Linear"),
    "modules": (lambda: fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.GELU()), "x of Linear -> GELU"),
    "an operation": (lambda: ops.Linear(WIDTH, WIDTH), "input of Linear"),
    "a basic operation": (lambda: ops.GELU(), "input of GELU"),
    "operations": (lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU()), "input of Linear -> GELU"),
    "more than are named": (lambda: ops.Sequential(*(ops.GELU() for _ in range(4))), "input of GELU -> GELU -> GELU -> ..."),
    "modules among operations": (
        lambda: ops.Sequential(fusible.Linear(WIDTH, WIDTH), ops.GELU(), fusible.LayerNorm(WIDTH)), "input of Linear -> GELU -> LayerNorm"
    ),
}  # fmt: skip
"""What is called, and what its input is then called."""


def refused(call: Callable[[], Any], *, grad: bool = True) -> str:
    with pytest.raises(FusibleError) as raised, torch.set_grad_enabled(grad):
        call()
    return str(raised.value)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("broken", BROKEN)
def test_an_input_that_is_wrong_is_named_with_the_modules_that_were_called(called: str, broken: str, grad: bool) -> None:
    (make, subject), (value, wanted, got, do) = CALLED[called], BROKEN[broken]
    assert refused(lambda: make()(value()), grad=grad) == f"{subject}: expected {wanted}, got {got}; {do}."


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("broken", BROKEN)
def test_an_extra_input_that_is_wrong_is_named_by_its_place(broken: str, place: int, grad: bool) -> None:
    """Beside floats it may have integers: they may be sizes."""
    value, wanted, got, do = BROKEN[broken]
    extra = [X, X]
    extra[place] = value()
    model = ops.Sequential(ops.AddExtraInput(), ops.GELU(), ops.AddExtraInput())
    wanted = "fp64, fp32, fp16, bf16, int32 or int64" if wanted == FLOATS else wanted
    sentence = f"extra input {place} of AddExtraInput -> GELU -> AddExtraInput: expected {wanted}, got {got}; {do}."
    assert refused(lambda: model(X, *extra), grad=grad) == sentence


def test_an_input_without_dimensions_and_tensors_without_data_are_named() -> None:
    for called in ("an operation", "operations", "modules among operations"):
        make, subject = CALLED[called]
        assert refused(lambda make=make: make()(torch.tensor(1.0))) == (
            f"{subject}: expected at least one dimension, got a number; pass rows of columns."
        )
    model = ops.Sequential(ops.AddExtraInput(), ops.AddExtraInput())
    for place in range(2):
        extra = [X, X]
        extra[place] = X.to("meta")
        sentence = f"extra input {place} of AddExtraInput -> AddExtraInput: expected a tensor with data, got one on meta; "
        assert refused(lambda extra=extra: model(X, *extra)).startswith(sentence)


@pytest.mark.parametrize("called", [name for name in CALLED if name not in ("a basic operation", "more than are named")])
def test_a_width_that_an_op_cannot_take_is_told_with_the_modules(called: str) -> None:
    """The sentence is of an op, which the caller may not know: MMT is a part of Linear."""
    make, subject = CALLED[called]
    wanted = f"the input of MMT(8 -> 8) of {subject.partition(' of ')[2]}: expected 8 columns, got 7; "
    assert refused(lambda: make()(X[:, :7])).startswith(wanted)


def test_a_call_with_another_number_of_extra_inputs_or_words_names_the_modules() -> None:
    fuser = ops.OperationFuser([fusible.Linear(WIDTH, WIDTH), ops.AddExtraInput()])
    assert refused(lambda: fuser(X)).startswith("a call of Linear -> AddExtraInput: expected 1 extra inputs, got 0; ")
    for place, name in enumerate(("Linear", "Linear", "AddExtraInput")):  # the first has two ops
        kwargs: list[dict[str, Any]] = [{}, {}, {}]
        kwargs[place] = {"scale": 2.0, "offset": 1.0}
        got = refused(lambda kwargs=kwargs: fuser(X, X, basic_op_kwargs=kwargs))
        assert got == f"{name}.op_forward: expected no keyword arguments, got scale, offset; leave them out."


class Fails(BasicOperation):
    """An operation whose forward refuses what it is called with."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject

    def op_forward(self, ctx: Any, input_: Any, **_: Any) -> Any:
        raise ArgumentError(f"{self.subject}: expected something, got another thing; give that.")


class Together(FusedOperation):
    """An operation in the place of its parts."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        (part,) = self.basic_operations()
        return part.op_forward(basic_op_ctxs[0], input_), [()]


WHERE: dict[str, tuple[Callable[[BasicOperation], nn.Module], tuple[str, ...]]] = {
    "alone": (lambda part: part, ("Fails",)),
    "among others": (lambda part: ops.Sequential(ops.GELU(), part), ("GELU", "Fails")),
    "in a fused operation": (lambda part: ops.Sequential(Together([part]), ops.GELU()), ("Together", "GELU", "Fails")),
    "beside a module": (lambda part: ops.Sequential(fusible.Linear(WIDTH, WIDTH), part), ("Linear", "Fails")),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("extra", [False, True])
def test_an_error_that_says_where_to_look_is_left_as_it_is(where: str, extra: bool) -> None:
    """That is: by the name of a module that was called, or of a part of it, or of an argument of the call; to any other the modules are added."""
    around, names = WHERE[where]
    title = " -> ".join(name for name in names if name != "Fails" or where != "in a fused operation")
    for name in (*names, "seq_lens", "cache", "KVCache", "Softmax", "an operand", "extra", "input_0"):
        model = around(Fails(f"the {name} of it"))
        if extra:
            model, title_ = ops.Sequential(ops.AddExtraInput(), model), f"AddExtraInput -> {title}"
        else:
            title_ = title
        added = "" if name in names or name in ("seq_lens", "cache", "KVCache") else f" of {title_}"
        for grad in (True, False):
            said = refused(lambda model=model: model(X, *[X] * extra), grad=grad)
            assert said == f"the {name} of it{added}: expected something, got another thing; give that."


class Watched(BasicOperation):
    """Notes what is done with it."""

    num_extra_inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        self.done.append("prepared")

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        self.done.append("run")
        return input_, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **_: Any) -> Any:
        return grad_output, [()], [(grad_output,)]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("place", ["input", "extra input"])
@pytest.mark.parametrize("broken", [name for name in BROKEN if name not in ("bits", "complex numbers", "short integers")])
def test_a_tensor_that_is_none_or_not_dense_is_refused_before_anything_is_run(broken: str, place: str, grad: bool) -> None:
    watched = Watched()
    model = ops.Sequential(ops.Dropout(0.5), watched)
    wrong, random = BROKEN[broken][0](), torch.get_rng_state()
    refused(lambda: model(wrong, X) if place == "input" else model(X, wrong), grad=grad)
    assert not watched.done and torch.equal(torch.get_rng_state(), random)
    model(X, X)
    assert watched.done == ["prepared", "run"]
