"""Models that ``fusible.convert`` has converted, inside ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from convert_families import BY_NAME, logits, losses

import fusible

DELAYED = fusible.DelayedScaling()
LLAMA = BY_NAME["llama"]
INPUTS = LLAMA.inputs()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_whole_model_is_one_graph_for_torch_compile() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    losses(model, INPUTS, 1)
    reference = logits(model, INPUTS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {**INPUTS, "use_cache": False}
    assert torch.allclose(logits(compiled, inputs), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_training_steps_through_torch_compile_are_those_without() -> None:
    reference = losses(fusible.convert(LLAMA.make(), DELAYED), INPUTS, 2)
    found = losses(torch.compile(fusible.convert(LLAMA.make(), DELAYED), backend="aot_eager"), INPUTS, 2)
    assert max(abs(a - b) for a, b in zip(found, reference, strict=True)) < 2e-3
