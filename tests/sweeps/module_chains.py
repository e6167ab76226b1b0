"""Right calls of containers, drawn at random: chains of modules and operations, some of which are run as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import module_formulas as formulas
import torch
from module_calls import norm_formula, rowwise
from module_draws import DRAWS, Draw, Right, draws
from rounding_noise import Noise
from torch import Tensor, nn

import fusible
from fusible.pytorch import ops

__all__ = ["DRAWS"]

Formula = Callable[[Noise, Tensor, dict[str, Tensor]], Tensor]
Link = tuple[nn.Module, int, Formula]
"""A module, the width of what it gives, and what that is."""


def _of(p: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The parameters of the module of a name."""
    return {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}


def _parameter(p: dict[str, Tensor], name: str) -> Tensor | None:
    return next((value for key, value in p.items() if key.rpartition(".")[2] == name), None)


def _linear(draw: Draw, room: Any, width: int, out: int) -> Link:
    options: dict[str, Any] = {"bias": draw.of(True, False), "param_dtype" if room is fusible else "dtype": draw.param_dtype}
    made = draw.filled(room.Linear(width, out, **options))
    return made, out, lambda n, x, p: formulas.linear(n, x, _parameter(p, "weight"), _parameter(p, "bias"))  # type: ignore[arg-type]


def _link(draw: Draw, room: Any, width: int, depth: int) -> Link:
    kinds = ["linear", "linear", "plain", "norm", *(["gate"] if width % 2 == 0 and draw.recipe is None else []), *(["residual"] if depth else [])]
    kind = draw.of(*kinds, *(["scale", "bias"] if room is ops else []))
    if kind == "linear":
        return _linear(draw, room, width, draw.width())
    if kind == "plain":
        name = draw.of("GELU", "QGELU", "SiLU", "ReLU" if draw.recipe is None else "SiLU")  # noise in 8 bits turns signs, which a sample may not show
        return getattr(room, name)(), width, lambda n, x, p: n.terms(formulas.PLAIN[name](n, n.terms(x)))
    if kind == "gate":
        return room.SwiGLU(), width // 2, lambda n, x, p: formulas.gated(n, x, formulas.GATES["SwiGLU"])
    if kind == "norm":
        name, zero = draw.of("LayerNorm", "RMSNorm"), draw.of(True, False)
        options: dict[str, Any] = {"eps": 1e-2, "zero_centered_gamma": zero, "param_dtype" if room is fusible else "dtype": draw.param_dtype}
        return draw.filled(getattr(room, name)(width, **options)), width, norm_formula(name, 1e-2, zero)
    if kind == "scale":
        return ops.ConstantScale(-0.3), width, lambda n, x, p: n.terms(-0.3 * x)
    if kind == "bias":
        return draw.filled(ops.Bias(width, dtype=draw.param_dtype)), width, lambda n, x, p: formulas.shifted(n, x, p["bias"])
    return _residual(draw, room, width, depth - 1)


def _links(draw: Draw, room: Any, width: int, depth: int) -> tuple[list[nn.Module], int, Formula]:
    modules, steps = [], []
    for _ in range(draw.of(1, 2, 3, 4)):
        module, width, step = _link(draw, room, width, depth)
        modules.append(module)
        steps.append(step)

    def formula(n: Noise, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        for place, step in enumerate(steps):
            x = n.stored(step(n, x, _of(p, str(place))))
        return x

    return modules, width, formula


def _residual(draw: Draw, room: Any, width: int, depth: int) -> Link:
    """Of operations by a channel: what leaves before the body is added after it."""
    modules, out, body = _links(draw, room, width, depth)
    if out != width:
        link = _linear(draw, room, out, width)
        inner, last, place = body, link[2], str(len(modules))
        modules.append(link[0])
        body = lambda n, x, p: n.stored(last(n, inner(n, x, p), _of(p, place)))  # noqa: E731
    if room is fusible:
        return fusible.Residual(*modules), width, lambda n, x, p: n.terms(x) + body(n, x, p)
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "skip", output_to_caller=False)
    end.set_extra_input_channel(0, "skip")
    made = ops.Sequential(begin, *modules, end)
    return made, width, lambda n, x, p: n.terms(x) + body(n, x, {_moved(key): value for key, value in p.items()})


def _moved(name: str) -> str:
    place, _, rest = name.partition(".")
    return f"{int(place) - 1}.{rest}"


def _chain(draw: Draw, room: Any, container: Any) -> Right:
    draw.size, draw.dtype = 1.0, draw.of(torch.float32, torch.bfloat16)
    width = draw.width()
    if container is fusible.Residual:
        module, _, formula = _residual(draw, room, width, 1)
    else:
        modules, _, formula = _links(draw, room, width, 2)
        module = container(*modules)
    return rowwise(draw, module, width, formula)


@draws("modules", "Sequential", "Residual")
def _(name: str, draw: Draw) -> Right:
    return _chain(draw, fusible, getattr(fusible, name))


@draws("operations", "Sequential")
def _(draw: Draw) -> Right:
    return _chain(draw, ops, ops.Sequential)
