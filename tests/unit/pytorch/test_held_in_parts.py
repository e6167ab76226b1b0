"""Modules that hold otherwise what their ops take as one parameter."""

from __future__ import annotations

import torch

import fusible
from fusible.pytorch.engine.shares import Share

WIDTH = 16


class InHalves(fusible.Linear):
    """A linear layer that holds its weight as two parameters."""

    def __init__(self, width: int, columns: int) -> None:
        super().__init__(width, columns)
        halves = self.weight.detach().chunk(2)
        del self._parameters["weight"]
        self.upper, self.lower = (torch.nn.Parameter(half.clone()) for half in halves)
        self.shares = {"weight": Share(("upper", "lower"), (None, None), (None, None))}


def test_a_layer_may_hold_what_its_op_takes_as_several_parameters() -> None:
    torch.manual_seed(1)
    plain = fusible.Linear(WIDTH, WIDTH)
    torch.manual_seed(1)
    halves = InHalves(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH)
    results = []
    for layer in (plain, halves):
        y = fusible.Sequential(layer, fusible.GELU())(x)
        y.square().sum().backward()
        results.append(y)
    assert torch.equal(*results) and plain.weight.grad is not None
    assert halves.upper.grad is not None and halves.lower.grad is not None
    assert torch.equal(plain.weight.grad, torch.cat([halves.upper.grad, halves.lower.grad])) and torch.equal(plain.bias.grad, halves.bias.grad)
