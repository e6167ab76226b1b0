"""What a fused operation, and a fusion function, return wrongly is refused in one sentence that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import GELU, Bias


class Pair(ops.FusedOperation):
    """Bias and GELU, which returns in ``forward`` and ``backward`` what the test says."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **given: Any) -> Any:
        return FORWARD[0](ops.maybe_dequantize(input_))

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **given: Any) -> Any:
        return BACKWARD[0](ops.maybe_dequantize(grad_output))


FORWARD: list[Callable[[torch.Tensor], Any]] = []
BACKWARD: list[Callable[[torch.Tensor], Any]] = []


def right_forward(x: torch.Tensor) -> Any:
    return x, [(), ()]


def right_backward(dy: torch.Tensor) -> Any:
    return dy, [[torch.zeros(8)], []], [(), ()]


def paired(ops: list[Any], *, recipe: Any) -> list[Any]:
    found: list[Any] = []
    for op in ops:
        both = found and isinstance(found[-1], Bias) and isinstance(op, GELU)
        found[-1:] = [Pair([found[-1], op])] if both else [*found[-1:], op]
    return found


def _call(forward: Callable[..., Any], backward: Callable[..., Any], *, frozen: bool = False) -> torch.Tensor:
    FORWARD[:], BACKWARD[:] = [forward], [backward]
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), torch.ones(2, 8, requires_grad=not frozen)
    model[0].basic_ops[0].weight.requires_grad_(not frozen)
    with ops.register_forward_backward_fusion(paired):
        model(x).sum().backward()
    return x


def test_what_is_right_is_taken() -> None:
    assert _call(right_forward, right_backward).grad is not None
    assert _call(right_forward, lambda dy: list(right_backward(dy))).grad is not None
    _call(right_forward, lambda dy: (None, [[torch.zeros(8)], []], [(), ()]), frozen=True)  # nobody wants dx


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda dy: (None, [[None], []], [(), ()]), "expected the gradient of the input, got None; return a tensor"),
        (lambda dy: None, r"expected \(gradient of the input, gradients of parameters, gradients of extra inputs\), got None; return them"),
        (lambda dy: dy, r"expected \(gradient of the input, .*\), got a tensor of torch.float32 \[2, 8\]"),
        (lambda dy: (dy, [[], []]), r"expected \(gradient of the input, .*\), got a tuple of 2"),
        (lambda dy: (dy, None, [(), ()]), "expected gradients of 2 basic operations, got None"),
        (lambda dy: (dy, [[torch.zeros(8)], None], [(), ()]), "expected gradients of 2 basic operations, got None for one of them"),
        (lambda dy: (dy, [[torch.zeros(8)]], [(), ()]), "expected gradients of 2 basic operations, got 1"),
    ],
)
def test_a_backward(returned: Callable[..., Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"what Pair.fuser_backward returns.*: {said}"):
        _call(right_forward, returned)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: (None, [(), ()]), "expected an output, got None; return a tensor"),
        (lambda x: None, r"expected \(output, extra outputs\), got None; return them"),
        (lambda x: x, r"expected \(output, extra outputs\), got a tensor of torch.float32 \[2, 8\]"),
    ],
)
def test_a_forward(returned: Callable[..., Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"what Pair.fuser_forward returns of .*: {said}"):
        _call(returned, right_backward)


@pytest.mark.parametrize("register", [ops.register_forward_fusion, ops.register_backward_fusion, ops.register_forward_backward_fusion])
@pytest.mark.parametrize(
    ("returned", "got"),
    [(None, "None"), (3, "3"), ([None], "one with None"), ("text", "one with 't'"), ([torch.nn.Identity()], "one with Identity")],
    ids=["None", "a number", "a list with None", "a text", "another's module"],
)
def test_a_fusion_function(register: Any, returned: Any, got: str) -> None:
    def strange(ops: list[Any], *, recipe: Any) -> Any:
        return returned

    with (
        register(strange),
        pytest.raises(ArgumentError, match=f"what the fusion .*strange returns of .*: expected a list of operations, got {got}; "),
    ):
        ops.Sequential(ops.Linear(8, 8), ops.GELU())(torch.ones(2, 8))


def test_a_fusion_function_may_be_a_generator() -> None:
    def same(ops: list[Any], *, recipe: Any) -> Any:
        yield from ops

    with ops.register_forward_fusion(same):
        assert ops.Sequential(ops.Linear(8, 8), ops.GELU())(torch.ones(2, 8)).shape == (2, 8)
