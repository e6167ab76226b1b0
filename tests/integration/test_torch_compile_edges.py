"""``torch.compile`` of pipelines: extra tensors, what is refused while tracing, and what is noticed when it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_models import (
    DELAYED,
    WIDTH,
    block,
    compiled_by,
    fresh_compiler,  # noqa: F401
    operations,
    outside,
    same,
    states,
    tokens,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusible
from fusible import nvte
from fusible.errors import ArgumentError
from fusible.ops import Op
from fusible.pytorch import ops
from fusible.quantized import DelayedScaling

# from within inductor
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


class Sum(Op):
    """``y = x + side``."""

    def forward(self, x: nvte.Tensor, **sides: nvte.Tensor) -> Any:
        (side,) = sides.values()
        return nvte.add(x, side, self.y_dtype), {}

    def backward(self, ctx: Any, dy: nvte.Tensor) -> Any:
        return dy, [], dict.fromkeys(self.side_inputs, dy)


class AddExtra(ops.BasicOperation):
    num_extra_inputs = 1

    def make_op(self) -> Op:
        return Sum()


@pytest.mark.parametrize("asked", [True, False])
def test_extra_inputs_come_in_and_their_gradients_go_out(asked: bool) -> None:
    model = operations(AddExtra(), ops.Linear(WIDTH, 8), nn.Tanh(), ops.Linear(8, WIDTH), AddExtra())
    twin = copy.deepcopy(model)
    call, _ = compiled_by("aot_eager", twin)
    results = []
    for run in (model, call):
        inputs = [tokens(seed).requires_grad_(asked or seed == 0) for seed in range(3)]
        y = outside(DELAYED, run)(*inputs)
        y.float().square().sum().backward()
        assert all((x.grad is not None) is x.requires_grad for x in inputs)
        results.append([y, *(x.grad for x in inputs if x.grad is not None)])
    assert same(*results)
    assert same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])  # type: ignore[misc]


class Doubled(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return input_ * 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * 2, ()


def with_main_grad() -> nn.Module:
    model = fusible.Sequential(fusible.Linear(WIDTH, WIDTH, accumulate_into_main_grad=True))
    model[0].weight.main_grad = torch.zeros(WIDTH, WIDTH)
    return model


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (lambda: operations(Doubled()), nn.Module.__call__, "no compiler sees through operations in plain torch"),
        (with_main_grad, nn.Module.__call__, "expected gradients that autograd sums up"),
        (block, lambda model, x: model(x, cache=fusible.KVCache(1, 8)), "KVCache"),
        (operations, lambda model, x: model(x, op_kwargs={0: {"a": 1}}), "keyword arguments"),
        (block, lambda model, x: model(x[..., :5]), "expected 32 columns"),
        (block, lambda model, x: model(x.double()), ": expected fp64, "),
    ],
)
def test_what_cannot_be_compiled_is_said_when_it_is_traced(
    make: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor], message: str
) -> None:
    model = make()
    with pytest.raises(Exception, match=message):
        compiled_by("aot_eager", lambda x: call(model, x))[0](tokens(0))


class Prints(nn.Module):
    """One that breaks the graph by itself."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.tanh()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from within the compiler, which looks at what comes into a frame
@pytest.mark.parametrize("make", [Doubled, ops.MakeExtraOutput, Prints], ids=lambda make: make.__name__)
@pytest.mark.parametrize("container", [fusible.Sequential, ops.Sequential], ids=lambda container: container.__module__)
def test_the_graph_breaks_at_what_cannot_be_traced(container: Callable[..., nn.Module], make: Callable[[], nn.Module]) -> None:
    inner = container(ops.Linear(WIDTH, WIDTH), make(), ops.Linear(WIDTH, WIDTH))
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), inner])
    twin = copy.deepcopy(model)

    def call(of: Any, x: Tensor) -> Any:
        y = of[1](of[0](x).tanh())
        return tuple(each.sin() for each in (y if isinstance(y, tuple) else (y,)))

    counter = CompileCounterWithBackend("aot_eager")
    results = []
    for of, run in ((model, call), (twin, torch.compile(call, backend=counter))):
        for step in range(3):
            x = tokens(step).requires_grad_()
            outputs: Any = outside(DELAYED, run)(of, x)
            torch.cat(outputs).float().square().sum().backward()
            assert x.grad is not None
            found = [*(y.detach() for y in outputs), x.grad]
        results.append([*found, *(p.grad for p in of.parameters())])
    assert same(results[1], results[0]) and counter.frame_count >= 2
    assert same(list(states(twin).values()), list(states(model).values()))


def test_a_recipe_must_come_from_outside_of_the_compiled_function() -> None:
    model = block()

    def call(x: Tensor) -> Tensor:
        with fusible.autocast(recipe=DelayedScaling(amax_history_len=5)):
            return model(x)

    with pytest.raises(Exception, match=r"recipe=DelayedScaling\(amax_history_len=5\)"):
        compiled_by("aot_eager", call)[0](tokens(0))


def test_a_parameter_that_is_written_to_before_backward_is_noticed() -> None:
    model = fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.GELU(), fusible.Linear(WIDTH, WIDTH))
    y = compiled_by("aot_eager", model)[0](tokens(0, dtype=torch.float32))
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(ArgumentError, match="expected parameters as they were"):
        y.float().sum().backward()
