"""``torch.autograd.gradcheck``: every module and operation in fp64, with drawn options, against differences of what it computes."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from module_chains import DRAWS
from module_draws import NOT_IN_FP64, DoubleDraw
from torch.func import functional_call

SUBJECTS = [(room, name) for room, draws in DRAWS.items() for name in sorted(draws) if name not in NOT_IN_FP64]
SMALL = 96
"""Numbers of which each is changed by itself; of more, random directions are followed (``fast_mode``)."""

pytestmark = pytest.mark.usefixtures("alone")


def check(room: str, name: str, seed: int) -> int:
    """How many tensors were differentiated by."""
    torch.manual_seed(seed)
    draw = DoubleDraw(zlib.crc32(f"gradcheck {room} {name}".encode()) + seed)
    right = DRAWS[room][name](draw)
    given = {key: value.detach().clone() for key, value in right.inputs().items()}
    values = {key: value for key, value in given.items() if key not in right.constants and value.is_floating_point()}
    parameters = dict(right.module.named_parameters())
    leaves = [leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for leaf in (*values.values(), *parameters.values())]

    def call(*changed: torch.Tensor) -> Any:
        torch.manual_seed(seed)  # of what is dropped
        inputs = {**given, **dict(zip(values, changed, strict=False))}
        held = dict(zip(parameters, changed[len(values) :], strict=True))
        return functional_call(right.module, held, tuple(inputs.values()), right.given)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=sum(leaf.numel() for leaf in leaves) > SMALL)
    return len(leaves)


@pytest.mark.parametrize(("room", "name"), SUBJECTS)
def test_gradients_are_those_of_differences(room: str, name: str) -> None:
    assert sum(check(room, name, seed) for seed in range(3)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("room", "name"), SUBJECTS)
def test_gradients_at_length(room: str, name: str) -> None:
    assert sum(check(room, name, seed) for seed in range(3, 20)) >= 17
