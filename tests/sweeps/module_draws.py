"""Right calls of modules and operations, drawn at random, with what must come of them: by the room and the name of each class."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rounding_noise import Noise
from torch import Tensor, nn

from fusible.quantized import Recipe

__all__ = ["DRAWS", "DTYPES", "DoubleDraw", "Draw", "NOT_IN_FP64", "Right", "draws"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """Random shapes, layouts and values, the same from the same seed. ``recipe``: what the call is under; then sizes are whole blocks of every
    format."""

    def __init__(self, seed: int, recipe: Recipe | None = None) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.recipe = recipe
        self.dtype: torch.dtype = self.of(*DTYPES)
        self.param_dtype: torch.dtype = self.of(self.dtype, self.dtype, torch.float32, *DTYPES)
        self.size = self.of(1.0, 1.0, 0.05, 3.0)

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def width(self) -> int:
        return self.of(32, 64, 96) if self.recipe is not None else self.of(1, 2, 3, 5, 8, 13, 16, 31, 32, 33)

    def leading(self, *, ranks: Sequence[int] = (0, 1, 1, 2, 2, 3)) -> tuple[int, ...]:
        """The dimensions of an input before the last one."""
        if self.recipe is not None:
            return self.of((32,), (64,), (2, 16), (4, 1, 8), (1, 32)) if len(ranks) > 2 else self.of((32,), (2, 16))
        shapes = {0: [()], 1: [(0,), (1,), (2,), (3,), (16,), (17,), (32,)], 2: [(1, 1), (2, 3), (3, 5), (2, 0), (0, 4)]}
        shapes[3] = [(2, 1, 3), (1, 2, 2), (2, 0, 2)]
        return self.of(*shapes[self.of(*ranks)])

    def values(self, *shape: int, dtype: torch.dtype | None = None, size: float | None = None) -> Tensor:
        """Values that lie in one piece, or at an offset, with gaps between columns, by columns, or one row for all."""
        dtype, size = dtype or self.dtype, self.size if size is None else size
        layout = self.of("whole", "whole", "whole", "offset", "gaps", "by columns", "one row") if shape else "whole"
        normal = lambda *shape: (torch.randn(shape, generator=self.generator) * size).to(dtype)  # noqa: E731
        if layout == "offset":
            return normal(math.prod(shape) + 3)[3:].view(shape)
        if layout == "gaps":
            return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        if layout == "by columns":
            return normal(*shape[::-1]).permute(*reversed(range(len(shape))))
        if layout == "one row" and len(shape) > 1:
            return normal(*[1] * (len(shape) - 1), shape[-1]).expand(shape)
        return normal(*shape)

    def filled(self, module: nn.Module) -> nn.Module:
        """The module with drawn values in its parameters: of a norm around 1, of a product such that it keeps the size."""
        with torch.no_grad():
            for parameter in module.parameters():
                drawn = torch.randn(parameter.shape, generator=self.generator)
                parameter.copy_(drawn / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 1 + 0.3 * drawn)
        return module


class DoubleDraw(Draw):
    """One in fp64 throughout, whatever a caller draws, of no recipe."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, torch.float64 if name in ("dtype", "param_dtype") else value)

    def values(self, *shape: int, dtype: torch.dtype | None = None, size: float | None = None) -> Tensor:
        return super().values(*shape, dtype=torch.float64, size=size)


@dataclass
class Right:
    """``inputs()``: x and the extra inputs by name, drawn anew; ``given``: the arguments by keyword that follow. ``formula(noise, inputs,
    parameters)`` is what comes of it; ``seen``: the outputs that did come, where a formula depends on what was drawn inside."""

    module: nn.Module
    inputs: Callable[[], dict[str, Tensor]]
    formula: Callable[[Noise, dict[str, Tensor], dict[str, Tensor]], Tensor | tuple[Tensor, ...]]
    given: dict[str, Any] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    """Inputs that are no values: sizes."""
    seen: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    """Those of every call, where they have to be the same."""


DRAWS: dict[str, dict[str, Callable[[Draw], Right]]] = {"modules": {}, "operations": {}}


NOT_IN_FP64 = {"MixtureOfExperts": "the router, and what moves rows to experts, take fp32, bf16 and fp16, as NVIDIA's functions do"}
"""Classes that refuse fp64, and why."""


def draws(room: str, *names: str) -> Callable[[Callable[..., Right]], Callable[..., Right]]:
    """Enter what draws calls of these classes, with the name before the draw where there are several."""

    def enter(drawn: Callable[..., Right]) -> Callable[..., Right]:
        for name in names:
            assert name not in DRAWS[room], name
            DRAWS[room][name] = drawn if len(names) == 1 else lambda draw, name=name: drawn(name, draw)
        return drawn

    return enter
