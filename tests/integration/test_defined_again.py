"""What a module registers and then defines anew, as when a cell of a notebook is run again: what was defined last is what computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fusible
from fusible import fusions, tex
from fusible.pytorch import ops

X = torch.ones(4, 8)


class Registered(NamedTuple):
    """A cell that registers what computes ``FACTOR`` times something, how that is called, and how it is taken back."""

    cell: str
    call: Callable[[dict[str, Any]], Tensor]
    undo: Callable[[dict[str, Any]], Any]


_ENGINE = """
from fusible import fusions, nvte
from fusible.ops import Context, GELU, SiLU

@fusions.register_fusion_{kind}
def gelu_silu_{kind}({parameters}):
    return {result}
"""


def _engine(kind: str, parameters: str, result: str, call: Callable[[dict[str, Any]], Tensor]) -> Registered:
    cell = _ENGINE.format(kind=kind, parameters=parameters, result=result)
    return Registered(cell, call, lambda cells: fusions.unregister_fusion(cells[f"gelu_silu_{kind}"]))


def _model(*_: Any) -> Tensor:
    return fusible.Sequential(fusible.GELU(), fusible.SiLU())(X.clone().requires_grad_())


def _gradient(*_: Any) -> Tensor:
    x = X.clone().requires_grad_()
    fusible.Sequential(fusible.GELU(), fusible.SiLU())(x).sum().backward()
    assert x.grad is not None
    return x.grad


def _inference(*_: Any) -> Tensor:
    with torch.no_grad():
        return fusible.Sequential(fusible.GELU(), fusible.SiLU())(X)


_PASS = "nvte.scale(x, FACTOR, x.type)"
_OPERATIONS = """
from fusible.pytorch import ops

class Both(ops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return FACTOR * input_, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return FACTOR * grad_output, [(), ()], [(), ()]

def pair(given, *, recipe):
    return [Both(given)] if [type(op) for op in given] == [ops.GELU, ops.SiLU] else given

ops.register_{kind}_fusion(pair)
"""


def _operations(kind: str, call: Callable[[dict[str, Any]], Tensor]) -> Registered:
    return Registered(_OPERATIONS.format(kind=kind), call, lambda cells: ops.unregister_fusion(cells["pair"]))


def _of_operations(*_: Any) -> Tensor:
    return ops.Sequential(ops.GELU(), ops.SiLU())(X)


def _gradient_of_operations(*_: Any) -> Tensor:
    x = X.clone().requires_grad_()
    ops.Sequential(ops.GELU(), ops.SiLU())(x).sum().backward()
    assert x.grad is not None
    return x.grad


_FUNCTION = """
from fusible import tex

@tex.declare("input")
def multiplied_anew(input):
    pass

@tex.implement(multiplied_anew, backend="torch")
def multiplied_by_torch(backend, input):
    return FACTOR * input
"""

REGISTERED = {
    "a forward fusion": _engine("forward", "a: GELU, b: SiLU, x: nvte.Tensor", f"{_PASS}, ({{}}, {{}})", _model),
    "a backward fusion": _engine("backward", "a: GELU, b: SiLU, a_ctx: Context, b_ctx: Context, x: nvte.Tensor", f"{_PASS}, ([], [])", _gradient),
    "an inference fusion": _engine("inference", "a: GELU, b: SiLU, x: nvte.Tensor", _PASS, _inference),
    "a forward fusion of operations": _operations("forward", _of_operations),
    "a backward fusion of operations": _operations("backward", _gradient_of_operations),
    "a joint fusion of operations": _operations("forward_backward", _of_operations),
    "a tex function": Registered(_FUNCTION, lambda cells: cells["multiplied_anew"](X), lambda cells: tex.undeclare(cells["multiplied_anew"])),
}


@pytest.fixture
def cells() -> Iterator[dict[str, Any]]:
    yield {"__name__": "notebook"}


@pytest.mark.parametrize("name", REGISTERED)
def test_what_was_defined_last_computes(name: str, cells: dict[str, Any]) -> None:
    one = REGISTERED[name]
    former = one.call(cells) if "multiplied_anew" not in one.cell else None
    try:
        for factor in (2.0, 3.0, 5.0):
            exec(f"FACTOR = {factor}\n{one.cell}", cells)
            assert torch.equal(one.call(cells), factor * X)
    finally:
        one.undo(cells)
    assert former is None or torch.equal(one.call(cells), former)  # nothing of what was defined before is left


def test_functions_that_a_function_makes_are_not_one_another() -> None:
    def made(factor: float) -> Callable[..., Any]:
        def pair(given: list[Any], *, recipe: Any) -> list[Any]:
            asked.append(factor)
            return given

        return pair

    asked: list[float] = []
    with ops.register_forward_fusion(made(2.0)), ops.register_forward_fusion(made(3.0)):
        _of_operations()
    assert asked == [2.0, 3.0]


def test_another_module_does_not_take_the_name() -> None:
    one, cells = REGISTERED["a tex function"], {"__name__": "notebook"}
    exec(f"FACTOR = 2.0\n{one.cell}", cells)
    try:
        with pytest.raises(fusible.errors.ArgumentError, match="a function declared to tex: expected a new name, got 'multiplied_anew'"):
            exec(f"FACTOR = 3.0\n{one.cell}", {"__name__": "elsewhere"})
        assert torch.equal(one.call(cells), 2.0 * X)
    finally:
        one.undo(cells)
