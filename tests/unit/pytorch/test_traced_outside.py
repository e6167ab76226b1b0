"""A module that follows a recipe of its own outside of every ``autocast``, inside a graph of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusible
from fusible.pytorch.engine.autocast import autocast
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.tracing import TracedRun


class Own(fusible.Linear):
    own = autocast(recipe=fusible.Float8CurrentScaling())

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return TracedRun(self, 0, [self], self.own).in_chain(x, (), ChainCall())


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_what_is_in_force_outside_of_every_autocast_is_the_modules_own() -> None:
    module, x = Own(32, 16), torch.randn(4, 32)
    plain = fusible.Linear(32, 16)
    plain.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
        current = plain(x)
    with fusible.autocast(recipe=fusible.NVFP4BlockScaling()):
        blocks = plain(x)
        assert torch.equal(compiled(x), blocks)
    assert torch.equal(compiled(x), current)
    with fusible.autocast(enabled=False):
        assert torch.equal(compiled(x), plain(x))
    assert len({tuple(y.flatten().tolist()) for y in (current, blocks, plain(x))}) == 3
