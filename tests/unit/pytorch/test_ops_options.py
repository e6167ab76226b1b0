"""Options and parameters of operations that are set after the first call: they take effect, and the scaling state stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops

DELAYED = fusible.DelayedScaling(amax_history_len=4)

OPTIONS: dict[str, tuple[Callable[[Any], ops.BasicOperation], str, Any, Any]] = {
    "ConstantScale": (lambda value: ops.ConstantScale(value), "scale", 2.0, 5.0),
    "Dropout": (lambda value: ops.Dropout(value), "dropout_probability", 0.0, 0.5),
    "L2Normalization": (lambda value: ops.L2Normalization(eps=value), "eps", 1e-6, 1.0),
    "LayerNorm": (lambda value: ops.LayerNorm(64, eps=value), "eps", 1e-5, 1.0),
    "RMSNorm": (lambda value: ops.RMSNorm(64, eps=value), "eps", 1e-5, 1.0),
    "SwiGLU": (lambda value: ops.SwiGLU(glu_interleave_size=value), "glu_interleave_size", None, 16),
    "SiTUGLU": (lambda value: ops.SiTUGLU(beta1=value), "beta1", 4.0, 1.0),
    "ClampedSwiGLU": (lambda value: ops.ClampedSwiGLU(limit=value), "limit", 7.0, 0.5),
    "GELU": (lambda value: ops.GELU(cache_quantized_input=value), "cache_quantized_input", False, True),
}


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (32, 64)), generator=torch.Generator().manual_seed(3))


def step(model: nn.Module, recipe: fusible.Recipe | None = None, seed: int = 0) -> list[Tensor]:
    """The output and the gradients of the input and the parameters; the same random draws in each."""
    x = batch().requires_grad_()
    torch.manual_seed(seed)
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("around", [lambda op: op, ops.Sequential, fusible.Sequential, lambda op: ops.Sequential(ops.Identity(), op)])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_set_after_a_call_takes_effect(name: str, around: Callable[[nn.Module], nn.Module]) -> None:
    make, option, first, second = OPTIONS[name]
    op = make(first)
    model = around(op)
    before = step(model)
    setattr(op, option, second)
    after = step(model)
    assert not alike(before, after)
    assert alike(after, step(around(make(second))))
    setattr(op, option, first)
    assert alike(step(model), before)


def test_a_fuser_made_before_takes_the_option_too() -> None:
    op = ops.ConstantScale(2.0)
    fuser = ops.OperationFuser([op])
    assert torch.equal(fuser(batch()), 2 * batch())
    op.scale = 4.0
    assert torch.equal(fuser(batch()), 4 * batch())


def test_an_option_leaves_the_scaling_state_as_it_is() -> None:
    def model() -> ops.Sequential:
        torch.manual_seed(1)
        return ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))

    changed, saved = model(), model()
    for _ in range(3):
        step(changed, DELAYED)
    changed[0].eps = 0.5
    state = changed.state_dict()  # between the assignment and a call
    saved[0].eps = 0.5
    saved.load_state_dict(state)
    for parameter in changed.parameters():
        with torch.no_grad():
            parameter += 0  # an unchanged weight would keep the scale that it was first quantized by
    assert "scaling_state.0" in state and alike(step(changed, DELAYED), step(saved, DELAYED))
    fresh = model()
    fresh[0].eps = 0.5
    fresh.load_state_dict({name: value for name, value in state.items() if not name.startswith("scaling_state")})
    assert not alike(step(changed, DELAYED), step(fresh, DELAYED))


def test_a_state_that_is_saved_after_an_option_was_set_is_that_of_the_latest_call() -> None:
    """Whether or not one was saved between the assignment and the next calls."""
    states = []
    for saved_between in (False, True):
        torch.manual_seed(1)
        model = ops.Sequential(ops.ConstantScale(2.0), ops.Linear(64, 64))
        step(model, DELAYED)
        model[0].scale = 3.0
        if saved_between:
            model.state_dict()
        for _ in range(2):
            step(model, DELAYED)
        states.append(model.state_dict()["scaling_state.0"])
    assert torch.equal(*states)


def test_what_an_operation_does_not_read_changes_no_plan() -> None:
    op = ops.ConstantScale(2.0)
    model = ops.Sequential(op)
    model(batch())
    entry = op.bound_op
    op.label, op.scale = "scaled", 2.0
    op.train()
    assert op.bound_op is entry
    model(batch())
    (fuser,) = model._arranged()
    assert fuser.pipeline.plans_built == 1


@pytest.mark.parametrize("wrong", [1.5, -0.1])
def test_a_value_that_an_operation_cannot_have_is_not_set(wrong: float) -> None:
    op = ops.Dropout(0.25)
    before = step(op)
    with pytest.raises(ArgumentError, match=r"expected a probability"):
        op.dropout_probability = wrong
    assert op.dropout_probability == 0.25 and alike(step(op), before)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ops.BasicLinear(64, 64), "in_features"),
        (lambda: ops.Linear(64, 64), "out_features"),
        (lambda: ops.Bias(64), "size"),
        (lambda: ops.GroupedLinear(2, 64, 64), "num_groups"),
    ],
)
def test_what_parameters_were_made_by_cannot_be_set(make: Callable[[], Any], name: str, called: bool) -> None:
    op = make()
    if called:
        op(batch(), *([torch.tensor([16, 16])] if isinstance(op, ops.GroupedLinear) else []))
    value = getattr(op, name)
    setattr(op, name, value)
    message = rf"^{name} of {type(op).__name__}: expected {value}, by which it was made, got 128; make another operation\.$"
    with pytest.raises(ArgumentError, match=message):
        setattr(op, name, 128)
    assert getattr(op, name) == value


def test_accumulation_into_main_grad_can_be_switched_on() -> None:
    op, x, sizes = ops.GroupedLinear(2, 64, 64, bias=False), batch(), torch.tensor([16, 16])
    op(x, sizes).sum().backward()
    op.accumulate_into_main_grad = True
    for weight in op.parameters():
        weight.main_grad, weight.grad = torch.zeros(64, 64), None  # pyright: ignore[reportAttributeAccessIssue]
    op(x, sizes).sum().backward()
    sums = [weight.main_grad for weight in op.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(weight.grad is None for weight in op.parameters()) and alike(sums, _grads(op, x, sizes))


def _grads(op: ops.GroupedLinear, x: Tensor, sizes: Tensor) -> list[Tensor]:
    plain = ops.GroupedLinear(2, 64, 64, bias=False)
    plain.load_state_dict(op.state_dict())
    return list(torch.autograd.grad(plain(x, sizes).sum(), list(plain.parameters())))


def test_a_compiled_call_is_compiled_anew() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    op = ops.Dropout(0.0)
    compiled = torch.compile(ops.Sequential(op), fullgraph=True, backend=backend)
    assert torch.equal(compiled(batch()), batch()) and torch.equal(compiled(batch()), batch())
    op.dropout_probability = 0.5
    assert not torch.equal(compiled(batch()), batch()) and not torch.equal(compiled(batch()), batch())
    # The new program draws the seed where what recomputes it will find it again.
    assert ["pipeline_seed" in str(graph.graph) for graph in graphs] == [False, True]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("recipe", [None, DELAYED])
def test_a_linears_parameters_can_be_assigned(recipe: fusible.Recipe | None, alone: bool) -> None:
    linear, other = ops.Linear(64, 64), ops.Linear(64, 64)
    assert other.bias is not None
    nn.init.normal_(other.bias)
    keys = {"basic_ops.0.weight", "basic_ops.1.bias"}
    model = linear if alone else ops.Sequential(linear)
    step(model, recipe)
    linear.weight, linear.bias = nn.Parameter(other.weight.detach().clone()), other.bias
    assert linear.basic_ops[0].weight is linear.weight and linear.bias is other.bias
    assert {name for name in linear.state_dict() if not {"scaling_state", "_extra_state"} & set(name.split("."))} == keys
    fresh = ops.Linear(64, 64)
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(model(batch()), fresh(batch()))
    y, *_, dw, db = step(model)
    assert alike([dw, db], step(fresh)[-2:]) and y.shape == (32, 64)


def test_a_linears_parameters_come_and_go_as_its_parts_do() -> None:
    linear, bare = ops.Linear(64, 64), ops.Linear(64, 64, bias=False)
    weight = nn.Parameter(torch.zeros(64, 64))
    linear.register_parameter("weight", weight)
    assert linear.weight is weight and dict(linear.named_parameters()).keys() == {"basic_ops.0.weight", "basic_ops.1.bias"}
    bare.bias = None
    bare.register_parameter("bias", None)
    with pytest.raises(ArgumentError, match=r"^a Linear that was made without: expected no bias, got one; make it with bias=True\.$"):
        bare.bias = nn.Parameter(torch.zeros(64))
    with pytest.raises(TypeError):
        setattr(linear, "weight", torch.zeros(64, 64))  # noqa: B010 - as in any module of torch
    linear(batch())
    for action in (lambda: setattr(linear, "bias", None), lambda: delattr(linear, "bias"), lambda: delattr(linear, "weight")):
        with pytest.raises(ArgumentError, match=r"^(bias|weight) of Linear: expected a parameter, got none; "):
            action()
    assert torch.equal(linear(batch()), torch.zeros(32, 64))


def test_a_parameter_of_another_size_is_taken_and_none_is_refused() -> None:
    op = ops.BasicLinear(64, 64)
    model = ops.Sequential(op)
    model(batch())
    op.weight = nn.Parameter(torch.eye(64)[:16])
    assert torch.equal(model(batch()), batch()[:, :16])
    for action in (lambda: setattr(op, "weight", None), lambda: delattr(op, "weight")):
        with pytest.raises(ArgumentError, match=r"^weight of BasicLinear: expected a parameter, got none; "):
            action()
    assert torch.equal(model(batch()), batch()[:, :16]) and list(op.state_dict()) == ["weight", "_extra_state"]


def test_operations_are_looked_at_once_after_a_change_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at each call: a change costs the calls that follow nothing."""
    op, other = ops.ConstantScale(2.0), ops.ConstantScale(3.0)
    fuser = ops.OperationFuser([op])
    looks: list[ops.BasicOperation] = []
    current = ops.ConstantScale.current
    monkeypatch.setattr(ops.ConstantScale, "current", lambda self, bound: looks.append(self) or current(self, bound))
    for change in (lambda: setattr(op, "scale", 5.0), lambda: setattr(other, "scale", 7.0), lambda: setattr(op, "scale", 2.0)):
        fuser(batch())
        other(batch())
        looks.clear()
        change()
        for _ in range(3):
            assert torch.equal(fuser(batch()), op.scale * batch())
        assert looks == [op]


def test_a_change_of_an_option_makes_plans_anew_for_the_pipelines_that_have_it() -> None:
    op, other = ops.ConstantScale(2.0), ops.ConstantScale(3.0)
    fuser = ops.OperationFuser([op])
    fuser(batch())
    pipeline = fuser.pipeline
    other.scale = 7.0
    fuser(batch())
    assert fuser.pipeline is pipeline
    op.scale = 5.0
    fuser(batch())
    assert fuser.pipeline is not pipeline
