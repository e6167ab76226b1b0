"""What a researcher's op returns wrongly is refused where it returns it, in one sentence that names the op and the pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from scores import score
from torch import nn

import fusible
from fusible import nvte, ops
from fusible.compute_pipeline import run_ops, run_ops_backward
from fusible.errors import ArgumentError, FusibleError
from fusible.fusions import register_fusion_backward, register_fusion_forward, register_fusion_inference, unregister_fusion
from fusible.nvte import DType, Tensor


class Twice(ops.Op):
    """A right one, with a parameter."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias

    @property
    def args(self) -> list[Tensor]:
        return [self.bias]

    def forward(self, x: Tensor) -> Any:
        return nvte.add(nvte.scale(x, 2.0, self.y_dtype), self.bias, self.y_dtype), {"x": x}

    def backward(self, ctx: dict[str, Tensor], dy: Tensor) -> Any:
        return nvte.scale(dy, 2.0, self.dx_dtype), [nvte.dbias(dy, DType.Float32)]


def y_of(op: Any, x: Tensor) -> Tensor:
    return nvte.scale(x, 2.0, op.y_dtype)


def db_of(dy: Tensor) -> Tensor:
    return nvte.dbias(dy, DType.Float32)


FORWARD: dict[str, Callable[..., Any]] = {
    "None": lambda op, x: None,
    "y alone": y_of,
    "a tuple of one": lambda op, x: (y_of(op, x),),
    "side values that it does not declare": lambda op, x: (y_of(op, x), {}, {"a": x}),
    "four": lambda op, x: (y_of(op, x), {}, {}, {}),
    "a list": lambda op, x: [y_of(op, x), {}],
    "no context": lambda op, x: (y_of(op, x), None),
    "a list for a context": lambda op, x: (y_of(op, x), [x]),
    "a number in the context": lambda op, x: (y_of(op, x), {"a": 3}),
    "None in the context": lambda op, x: (y_of(op, x), {"a": None}),
    "a context by numbers": lambda op, x: (y_of(op, x), {3: x}),
    "a torch.Tensor in the context": lambda op, x: (y_of(op, x), {"a": x.data}),
    "a torch.Tensor": lambda op, x: (x.data * 2, {}),
    "a number": lambda op, x: (3, {}),
    "None as y": lambda op, x: (None, {}),
    "another type": lambda op, x: (nvte.cast(x, DType.Float16), {}),
    "8 bits": lambda op, x: (nvte.cast(x, nvte.QuantizedType(DType.Float8E4M3, "current")), {}),
    "a text": lambda op, x: "ab",
}
BACKWARD: dict[str, Callable[..., Any]] = {
    "None": lambda op, ctx, dy: None,
    "dx alone": lambda op, ctx, dy: dy,
    "gradients of sides that it does not declare": lambda op, ctx, dy: (dy, [db_of(dy)], {"a": dy}),
    "no list of gradients": lambda op, ctx, dy: (dy, None),
    "no gradient": lambda op, ctx, dy: (dy, []),
    "two gradients": lambda op, ctx, dy: (dy, [db_of(dy), db_of(dy)]),
    "a gradient of None": lambda op, ctx, dy: (dy, [None]),
    "a gradient for a list": lambda op, ctx, dy: (dy, db_of(dy)),
    "a torch.Tensor as gradient": lambda op, ctx, dy: (dy, [db_of(dy).data]),
    "a gradient of another shape": lambda op, ctx, dy: (dy, [dy]),
    "a torch.Tensor": lambda op, ctx, dy: (dy.data, [db_of(dy)]),
    "a number": lambda op, ctx, dy: (3, [db_of(dy)]),
    "None as dx": lambda op, ctx, dy: (None, [db_of(dy)]),
    "another type": lambda op, ctx, dy: (nvte.cast(dy, DType.Float16), [db_of(dy)]),
}
INFERENCE: dict[str, Callable[..., Any]] = {
    "None": lambda op, x: None,
    "a context too": lambda op, x: (y_of(op, x), {}),
    "a torch.Tensor": lambda op, x: x.data,
    "a number": lambda op, x: 3,
    "another type": lambda op, x: nvte.cast(x, DType.Float16),
}
KINDS = {"forward": FORWARD, "backward": BACKWARD, "inference": INFERENCE}
CASES = [(method, what, wrong) for method, cases in KINDS.items() for what, wrong in cases.items()]


def module(op: type[ops.Op]) -> nn.Module:
    class Mine(fusible.pytorch.BaseModule):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.bias = nn.Parameter(torch.ones(4))
            super().__init__(op(nvte.make_nvte_tensor(self.bias)))  # type: ignore[call-arg]

    return Mine()


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda mine: mine,
    "among others": lambda mine: fusible.Sequential(fusible.Linear(4, 4), mine, fusible.GELU()),
    "compiled": lambda mine: mine.compile("xla"),  # type: ignore[attr-defined, func-returns-value]
}


def _call(model: nn.Module, method: str) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    if method == "inference":
        with torch.no_grad():
            model(x)
    else:
        model(x).sum().backward()


@pytest.mark.parametrize("place", PLACES)
def test_the_right_op_is_taken(place: str) -> None:
    for method in ("forward", "inference"):
        for _ in range(3):
            _call(PLACES[place](module(Twice)), method)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("method", "what", "wrong"), CASES, ids=[f"{method}: {what}" for method, what, _ in CASES])
def test_what_an_op_returns_wrongly_is_refused(method: str, what: str, wrong: Callable[..., Any], place: str) -> None:
    bad = type("Bad", (Twice,), {method: wrong})
    model = PLACES[place](module(bad))
    with pytest.raises(FusibleError) as caught:
        _call(model, method)
    assert score(caught.value, {method}, lines=True) == score(caught.value, {"Bad"}, lines=True) == "clear", caught.value
    assert all(parameter.grad is None for parameter in model.parameters())


class Later(Twice):
    """One that keeps what its bias's gradient is made of, and says so."""

    delays_wgrad = True
    kept: ClassVar[list[Tensor]] = []

    def backward(self, ctx: dict[str, Tensor], dy: Tensor) -> Any:
        self.kept.append(dy)
        return nvte.scale(dy, 2.0, self.dx_dtype), [None]


@pytest.mark.parametrize("place", ["alone", "among others"])
def test_an_op_that_says_so_may_give_its_gradients_later(place: str) -> None:
    """It is called in every pass, however often the same call comes: what it keeps is not in what a replay would repeat."""
    Later.kept.clear()
    mine = module(Later)
    model = PLACES[place](mine)
    for _ in range(4):
        _call(model, "forward")
    assert len(Later.kept) == 4
    assert all((parameter.grad is None) == (parameter is mine.bias) for parameter in model.parameters())


def test_an_op_that_gives_its_gradients_later_is_called_where_others_are_compiled() -> None:
    Later.kept.clear()
    model = fusible.Sequential(fusible.Linear(4, 4), module(Later), fusible.GELU()).compile("xla")
    for _ in range(3):
        _call(model, "forward")
    assert len(Later.kept) == 3 and all(isinstance(kept.data, torch.Tensor) for kept in Later.kept)


@pytest.mark.parametrize("package", ["mine", "fusible.ops"])
def test_the_package_of_an_op_gives_it_no_leave_to_keep_gradients_back(package: str) -> None:
    bad = type("Bad", (Twice,), {"backward": BACKWARD["a gradient of None"], "__module__": package})
    with pytest.raises(ArgumentError, match="what backward of Bad returns: expected the gradient of bias, got None; return it"):
        _call(module(bad), "backward")


def test_what_a_fusion_returns_wrongly_is_refused() -> None:
    class Own(Twice):
        pass

    for wrong in (None, 3, (3, 4), (None, [{}, {}]), "two"):

        def fused(first, second, x):  # type: ignore[no-untyped-def]
            return RETURNED[0]

        RETURNED[:] = [wrong]
        fused.__annotations__ = {"first": Own, "second": ops.GELU, "x": Tensor}
        register_fusion_forward(fused)
        try:
            with pytest.raises(FusibleError, match="forward of Own"):
                _call(fusible.Sequential(module(Own), fusible.GELU()), "forward")
        finally:
            unregister_fusion(fused)


RETURNED: list[Any] = []


def forgetful(first, second, x):  # type: ignore[no-untyped-def]
    y, second_ctx = second.forward(first.forward(x)[0])
    return y, ({}, second_ctx)


def asking(first, second, first_ctx, second_ctx, dy):  # type: ignore[no-untyped-def]
    return dy, ([first_ctx["what nobody gave"]], [])


def sideless(first, second, x):  # type: ignore[no-untyped-def]
    return second.forward(first.forward(x)[0])


def sideless_inference(first, second, x):  # type: ignore[no-untyped-def]
    return second.inference(first.inference(x))


def sideless_backward(first, second, first_ctx, second_ctx, dy):  # type: ignore[no-untyped-def]
    return second.backward(second_ctx, first.backward(first_ctx, dy)[0])


CONTEXTS: dict[str, tuple[Callable[..., Any], str]] = {
    "a fusion that keeps nothing": (forgetful, "'x', got an empty one"),
    "a fusion that asks for something else": (asking, "'what nobody gave', got 'x'"),
    "an op that keeps nothing": (lambda op, x: (y_of(op, x), {}), "'x', got an empty one"),
    "an op that asks for something else": (lambda op, ctx, dy: (dy, [ctx["what nobody gave"]]), "'what nobody gave', got 'x'"),
}


class Reading(Twice):
    """One whose backward reads the context."""

    def backward(self, ctx: dict[str, Tensor], dy: Tensor) -> Any:
        return super().backward({"x": ctx["x"]}, dy)


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("case", CONTEXTS)
def test_what_a_context_lacks_is_said_with_the_op_that_it_is_of(case: str, executor: str) -> None:
    function, said = CONTEXTS[case]
    of_op = case.startswith("an op")
    own = type("Own", (Reading,), {"forward" if "keeps" in case else "backward": function} if of_op else {})
    if not of_op:
        names = ["first", "second", "x"] if function is forgetful else ["first", "second", "first_ctx", "second_ctx", "dy"]
        types = [own, ops.GELU] if function is forgetful else [own, ops.GELU, dict, dict]
        function.__annotations__ = dict(zip(names, [*types, Tensor], strict=True))
        (register_fusion_forward if function is forgetful else register_fusion_backward)(function)
    try:
        model = nn.Sequential(fusible.Sequential(module(own), fusible.GELU()).compile(executor))
        with pytest.raises(ArgumentError, match=f"expected {said}; return it in the context") as caught:
            _call(model, "forward")
    finally:
        unregister_fusion(function)
    assert "the context that backward of Own reads" in str(caught.value)


def test_an_op_that_lacks_a_pass_cannot_be_made() -> None:
    for method in ("forward", "backward"):
        lacking = type("Lacking", (ops.Op,), {method: lambda self, *given: None})
        with pytest.raises(TypeError, match="Lacking.* abstract method"):
            lacking()


def test_what_is_no_op_makes_no_module() -> None:
    for wrong in (3, "a", torch.ones(2), Twice):
        with pytest.raises((ArgumentError, TypeError), match="Op|op"):
            module(lambda bias, wrong=wrong: wrong)  # type: ignore[arg-type, return-value]


class Shifted(ops.AddExtra):
    """An op with a side input."""


class Branched(ops.MakeExtra):
    """An op with a side output."""


SIDELESS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "forward": (Shifted, register_fusion_forward, sideless),
    "inference": (Shifted, register_fusion_inference, sideless_inference),
    "backward": (Branched, register_fusion_backward, sideless_backward),
}
"""By pass: an op, of which a side value comes to that pass, and what does not take it: as a fusion of it and of GELU, and how that is registered."""


def _pass(kind: str, op: ops.Op) -> None:
    x = nvte.make_nvte_tensor(torch.ones(2, 4))
    sides: Any = [{"extra": nvte.make_nvte_tensor(torch.ones(2, 4))}, {}]
    members = [op, ops.GELU(x_dtype=None, dy_dtype=None, y_dtype=DType.Float32, dx_dtype=DType.Float32)]
    if kind == "backward":
        run_ops_backward(members, [{}, {"x": x}], x, sides, {})
    else:
        run_ops(members, x, sides, {}, inference=kind == "inference")


@pytest.mark.parametrize("kind", SIDELESS)
def test_a_pass_that_takes_no_side_value_is_refused_where_one_comes(kind: Any) -> None:
    cls, register, function = SIDELESS[kind]
    types: dict[str, Any] = {"first": cls, "second": ops.GELU, "first_ctx": dict, "second_ctx": dict, "x": Tensor, "dy": Tensor}
    function.__annotations__ = {name: types[name] for name in inspect.signature(function).parameters}
    register(function)
    try:
        with pytest.raises(ArgumentError, match=rf"^the fusion {function.__name__}, {kind} of {cls.__name__} \+ GELU: expected a keyword extra, or"):
            _pass(kind, cls("extra"))
    finally:
        unregister_fusion(function)
    _pass(kind, cls("extra"))
    alone = {"forward": lambda self, x: (x, {}), "inference": lambda self, x: x, "backward": lambda self, ctx, dy: (dy, [])}[kind]
    with pytest.raises(ArgumentError, match=rf"^{kind} of Own: expected a keyword extra, or \*\*sides, got <lambda>\(self, "):
        _pass(kind, type("Own", (cls,), {kind: alone})("extra"))
