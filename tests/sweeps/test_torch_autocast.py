"""Every module and every operation computes in the precision of the ``torch.autocast`` around it, as if its input had come so."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from module_chains import DRAWS
from module_draws import Draw, Right

import fusible
from fusible.errors import ShapeError
from fusible.pytorch import ops

SUBJECTS = [(room, name) for room, draws in DRAWS.items() for name in sorted(draws)]

pytestmark = pytest.mark.usefixtures("alone")


def _called(right: Right, inputs: dict[str, torch.Tensor], context: Any) -> dict[str, torch.Tensor]:
    """The outputs and all gradients of a call within ``context``; its backward is called within it too."""
    leaves = [value.detach().requires_grad_(name not in right.constants) for name, value in inputs.items()]
    right.module.zero_grad()
    torch.manual_seed(5)
    with context:
        result = right.module(*leaves, **right.given)
        outputs = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward([y for y in outputs if y.requires_grad], [torch.ones_like(y) for y in outputs if y.requires_grad])
    found = {f"output {place}": y.detach() for place, y in enumerate(outputs)}
    found |= {name: leaf.grad for name, leaf in zip(inputs, leaves, strict=True) if leaf.grad is not None}
    return found | {f"parameter {name}": p.grad for name, p in right.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("room", "name"), SUBJECTS)
def test_it_computes_in_the_precision_of_torch_autocast(room: str, name: str) -> None:
    for number in range(3):
        draw = Draw(zlib.crc32(f"{room} {name} {number}".encode()))
        draw.dtype = draw.param_dtype = torch.float32
        right = DRAWS[room][name](draw)
        inputs = right.inputs()
        first = next(iter(inputs))
        found = _called(right, inputs, torch.autocast("cpu", dtype=torch.bfloat16))
        wanted = _called(right, {**inputs, first: inputs[first].to(torch.bfloat16)}, nullcontext())
        assert found.keys() == wanted.keys()
        assert found["output 0"].dtype == torch.bfloat16
        for place, value in wanted.items():
            assert found[place].dtype == (inputs[first].dtype if place == first else value.dtype), place
            assert torch.equal(found[place].to(value.dtype), value), place


class _Product(ops.BasicOperation):
    """A user's own, in torch, that needs its operands in one precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4) * 3)

    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        ctx.save_for_backward(input_)
        return torch.nn.functional.linear(input_, self.weight)

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * 3, [grad_output.float().T @ x.float()]


def test_an_operation_of_the_users_own_sees_torch_autocast() -> None:
    model = ops.Sequential(ops.Linear(4, 4), _Product(), ops.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.ones(2, 4))
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype == torch.bfloat16 and all(parameter.grad is not None for parameter in model.parameters())


def test_a_compiled_module_computes_in_the_precision_of_torch_autocast() -> None:
    model = fusible.Linear(16, 8)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(compiled, model(x)) and compiled.dtype == torch.bfloat16


def test_a_failure_leaves_torch_autocast_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ShapeError):
            fusible.Linear(4, 4)(torch.ones(2, 5))
        assert torch.is_autocast_enabled("cpu")
