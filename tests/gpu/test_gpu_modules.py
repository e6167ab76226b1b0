"""Every module and operation on a GPU, under every recipe, beside the same on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_cases import DEVICE, apart, forward, only, steps, with_gpu_group
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "sweeps"))
from subjects import MODULES, OPERATIONS, RECIPES, Subject

EPSILON = {"none": 2.0**-8, "delayed": 2.0**-3, "current": 2.0**-3, "mxfp8": 2.0**-3, "block": 2.0**-3, "nvfp4": 2.0**-1}
"""Of the coarsest format that a recipe rounds to, bf16 where it is none: what a rounding that falls to the other side changes."""

SUBJECTS = [pytest.param(subject, id=f"{i}-{subject.name}") for i, subject in enumerate((*MODULES, *OPERATIONS))]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with with_gpu_group(DEVICE):
        yield


@pytest.mark.parametrize("backend", [None, "torch"], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_gpu_computes_what_the_cpu_does(subject: Subject, recipe: str, backend: str | None) -> None:
    """By whichever backend is first, and by the reference alone: NVIDIA's library and FlagGems serve a part of the functions."""
    torch.manual_seed(1)
    module = subject.make()
    if any(isinstance(m, nn.Module) and "Dropout" in type(m).__name__ for m in module.modules()):
        module.eval()
    with only("torch"):
        wanted = steps(subject.call, module, subject.arguments, RECIPES[recipe], torch.device("cpu"))
    with only(backend):
        got = steps(subject.call, module, subject.arguments, RECIPES[recipe], DEVICE)
    assert apart(got, wanted) <= EPSILON[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_inference_mode_changes_no_number(subject: Subject, recipe: str) -> None:
    """What is made in that mode has no version, and may not be saved for a backward pass."""
    torch.manual_seed(1)
    module = subject.make().eval()
    with torch.no_grad():
        wanted = forward(subject.call, module, subject.arguments, RECIPES[recipe])
    with torch.inference_mode():
        got = forward(subject.call, module, subject.arguments, RECIPES[recipe])
    assert apart(got, wanted) <= EPSILON[recipe]
