"""The calls of tex that pipelines make are what the declarations say: what a failed call is held against would blame a good argument otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fusible
from fusible import GELU, GroupedQuerySelfAttention, LayerNorm, Linear, MixtureOfExperts, Residual, RMSNorm, Sequential, SReLU, SwiGLU, tex
from fusible.tex.calls.examination import examine
from fusible.tex.interface.declare import DECLARATIONS, Declaration

RECIPES = {
    "high precision": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
WIDTH = 128
MODELS: dict[str, Callable[[], Sequential]] = {
    "gelu": lambda: Sequential(LayerNorm(WIDTH), Linear(WIDTH, 256), GELU(), Linear(256, WIDTH)),
    "gated": lambda: Sequential(Residual(RMSNorm(WIDTH), Linear(WIDTH, 512), SwiGLU(), Linear(256, WIDTH)), SReLU()),
    "attention": lambda: Sequential(
        Residual(LayerNorm(WIDTH), Linear(WIDTH, 256), GroupedQuerySelfAttention(WIDTH, heads=4, groups=2), Linear(WIDTH, WIDTH))
    ),
    "experts": lambda: Sequential(Residual(RMSNorm(WIDTH), MixtureOfExperts(WIDTH, 256, experts=4, top_k=2))),
}


@contextmanager
def examined() -> Iterator[list[str]]:
    """What the declarations object to in the calls that are made."""
    objections: list[str] = []

    def examining(function: Callable[..., Any], declaration: Declaration) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            wrong = examine(declaration, bound.arguments)
            objections.extend([] if wrong is None else [f"{declaration.name}: {wrong}"])
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, declaration in DECLARATIONS.items():
            space, short = (tex.prim, name.removeprefix("prim_")) if name.startswith("prim_") else (tex, name)
            if hasattr(space, short):
                patch.setattr(space, short, examining(getattr(space, short), declaration))
        yield objections


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_they_are_as_declared(model: str, recipe: str, frozen: bool) -> None:
    torch.manual_seed(0)
    made = MODELS[model]().bfloat16()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not (frozen and name.endswith("weight")))
    x = torch.randn(2, 64, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with examined() as objections, fusible.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        made(x).float().square().sum().backward()
        with torch.no_grad():
            made(x)
    assert not objections
