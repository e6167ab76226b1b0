"""Draws of right calls of nvte: arguments at random, and what is wanted of a result."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusible import nvte
from fusible.nvte import DType, QuantizedType, Tensor, Type

__all__ = ["DRAWN_CALLS", "Draw", "DrawnCall", "Wanted", "half_unit", "share"]

FLOATS = (DType.Float32, DType.BFloat16, DType.Float16)
FP8 = (QuantizedType(DType.Float8E4M3, "current"), QuantizedType(DType.Float8E5M2, "current"))
LARGEST = {DType.Float8E4M3: 448.0, DType.Float8E5M2: 57344.0}
EPS = {DType.Float8E4M3: 2.0**-3, DType.Float8E5M2: 2.0**-2}
SMALLEST = {DType.Float8E4M3: 2.0**-9, DType.Float8E5M2: 2.0**-16}


@dataclass(frozen=True)
class Wanted:
    """A value in float64 that is rounded once, after fp32 sums of ``length`` terms, whose absolute values add up to ``magnitude``. One that is
    ``exact`` comes bit by bit. ``rounded``: types in which a value was rounded on the way. ``slack``: what else it may be wrong by."""

    value: torch.Tensor
    length: int = 1
    magnitude: torch.Tensor | None = None
    exact: bool = False
    type: Type | None = None
    rounded: tuple[Type, ...] = ()
    slack: torch.Tensor | float = 0.0


@dataclass(frozen=True)
class DrawnCall:
    """A call: the arguments by name, those that have none after the others, and what must come of it (None: anything)."""

    arguments: dict[str, Any]
    wanted: Sequence[Wanted | None] | Callable[[Any], None]
    more: tuple[Any, ...] = field(default=())


class Draw:
    """Random shapes, layouts and values, the same from the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def rows(self) -> int:
        return self.of(0, 1, 1, 2, 3, 5, 7, 8, 16, 17, 31, 32)

    def columns(self) -> int:
        return self.of(1, 2, 3, 5, 8, 13, 16, 31, 32, 33)

    def type(self) -> DType:
        return self.of(*FLOATS)

    def out(self) -> Type:
        """A type to compute into."""
        return self.of(*FLOATS, *FP8)

    def values(self, *shape: int, type: DType | None = None) -> torch.Tensor:
        """Values whose memory lies in one piece, or within another tensor at an offset, with gaps between columns, or by columns."""
        dtype = nvte.te_to_torch_dtype(self.type() if type is None else type)
        layout = self.of("whole", "whole", "offset", "gaps", "by columns") if shape else "whole"
        if layout == "whole":
            return torch.randn(shape, generator=self.generator).to(dtype)
        if layout == "offset":
            return torch.randn(math.prod(shape) + 3, generator=self.generator).to(dtype)[3:].view(shape)
        if layout == "gaps":
            return torch.randn((*shape[:-1], 2 * shape[-1] + 1), generator=self.generator).to(dtype)[..., 1::2]
        return torch.randn(shape[::-1], generator=self.generator).to(dtype).permute(*reversed(range(len(shape))))

    def tensor(self, *shape: int, type: DType | None = None) -> Tensor:
        return nvte.make_nvte_tensor(self.values(*shape, type=type))


def f64(x: Tensor) -> torch.Tensor:
    """The values of a tensor."""
    if x.type.__class__ is QuantizedType or x.type in LARGEST:
        return nvte.dequantize(x, DType.Float32).data.double()
    return x.data.detach().double()


def share(got: Tensor, wanted: Wanted, type: Type | None) -> float:
    """The largest error as a share of its bound: half a unit in the last place of every type that the value was rounded to, and what sums lose."""
    value, found = wanted.value, f64(got)
    assert found.shape == value.shape, f"{list(found.shape)} instead of {list(value.shape)}"
    if type is not None:
        assert nvte.element(got.type) == nvte.element(type), f"{got.type} instead of {type}"
    if wanted.exact:
        return 0.0 if torch.equal(found, value) else math.inf
    magnitude = value.abs() if wanted.magnitude is None else wanted.magnitude
    bound = (wanted.length + 32) * 2.0**-23 * magnitude + wanted.slack + 1e-40
    for rounding in (got.type, *wanted.rounded):
        bound = bound + half_unit(nvte.element(rounding), value)
    return ((found - value).abs() / bound).max().item() if value.numel() else 0.0


def half_unit(dtype: DType, value: torch.Tensor) -> torch.Tensor:
    if dtype in LARGEST:
        amax = value.abs().max() if value.numel() else 0.0
        return 1.01 * (EPS[dtype] / 2 * value.abs() + SMALLEST[dtype] / 2 * amax / LARGEST[dtype])
    info = torch.finfo(nvte.te_to_torch_dtype(dtype))
    return 0.51 * (info.eps * value.abs() + info.smallest_normal * info.eps)


DRAWN_CALLS: dict[str, Callable[[Draw], DrawnCall]] = {}
"""By the name of a function what draws a call of it."""


def draws(function: str) -> Callable[[Callable[[Draw], DrawnCall]], Callable[[Draw], DrawnCall]]:
    def enter(draw_call: Callable[[Draw], DrawnCall]) -> Callable[[Draw], DrawnCall]:
        assert function not in DRAWN_CALLS, function
        DRAWN_CALLS[function] = draw_call
        return draw_call

    return enter
