"""Fusible operations of NVIDIA's package and ours, drawn by a seed: one alone, or some in a row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from te_public import Side

__all__ = ["OPERATIONS", "Drawn", "drawn_operation", "drawn_row", "results_of"]

Rng = random.Random
ROWS, WIDTH = 64, 128
_BOTH = (False, True)


@dataclass
class Drawn:
    """An operation by its name and arguments: ``columns`` that it gives of ``WIDTH`` or those that it is given; ``extras``: how many tensors it takes
    besides, and of what shape; ``products`` on the way through it."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    columns: int | None = None
    extras: tuple[Callable[[int, int], torch.Tensor], ...] = ()
    outputs: int = 0
    products: int = 0
    rounds: int = 1


def _like(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns)


def _scales(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows) + 0.5


def _splits(rows: int, columns: int) -> torch.Tensor:
    return torch.tensor([rows // 2, 0, rows // 2])


def _norm(rng: Rng, name: str, width: int) -> Drawn:
    return Drawn(name, (width,), {"eps": rng.choice((1e-5, 1e-3)), "zero_centered_gamma": rng.choice(_BOTH)})


def _cached(rng: Rng) -> dict[str, Any]:
    return {"cache_quantized_input": rng.choice((False, False, True))}


def _gated(name: str) -> Callable[[Rng, int], Drawn]:
    return lambda rng, width: Drawn(name, (), _cached(rng), width // 2)


def _plain(name: str) -> Callable[[Rng, int], Drawn]:
    return lambda rng, width: Drawn(name, (), _cached(rng))


def _interleaved(name: str, **options: tuple[Any, ...]) -> Callable[[Rng, int], Drawn]:
    def draw(rng: Rng, width: int) -> Drawn:
        given = {key: rng.choice(values) for key, values in options.items() if rng.random() < 0.6}
        return Drawn(name, (), {**given, **_cached(rng), "glu_interleave_size": rng.choice((None, 16, 32))}, width // 2)

    return draw


def _scaled(name: str, *, gated: bool, **options: tuple[Any, ...]) -> Callable[[Rng, int], Drawn]:
    def draw(rng: Rng, width: int) -> Drawn:
        given = {key: rng.choice(values) for key, values in options.items() if rng.random() < 0.6}
        return Drawn(name, (), given, width // 2 if gated else None, (_scales,), rounds=2)

    return draw


def _grouped(rng: Rng, width: int) -> Drawn:
    return Drawn("GroupedLinear", (3, width, 64), {"bias": rng.choice(_BOTH)}, 64, (_splits,), products=1)


OPERATIONS: dict[str, Callable[[Rng, int], Drawn]] = {
    "AddExtraInput": lambda rng, width: Drawn("AddExtraInput", (), {"in_place": rng.choice(_BOTH)}, extras=(_like,)),
    "AllGather": lambda rng, width: Drawn("AllGather"),
    "AllReduce": lambda rng, width: Drawn("AllReduce"),
    "BasicLinear": lambda rng, width: Drawn("BasicLinear", (width, 192), {}, 192, products=1),
    "Bias": lambda rng, width: Drawn("Bias", (width,)),
    "ClampedSwiGLU": _interleaved("ClampedSwiGLU", limit=(1.0, 7.0), alpha=(1.0, 1.702), glu_linear_offset=(0.0, 1.0)),
    "ConstantScale": lambda rng, width: Drawn("ConstantScale", (rng.choice((0.5, -1.25, 3.0)),)),
    "Dropout": lambda rng, width: Drawn("Dropout", (0.0,)),
    "GEGLU": _gated("GEGLU"),
    "GELU": _plain("GELU"),
    "GLU": _gated("GLU"),
    "GroupedLinear": _grouped,
    "Identity": lambda rng, width: Drawn("Identity"),
    "L2Normalization": lambda rng, width: Drawn("L2Normalization", (), {"eps": rng.choice((1e-6, 1e-2))}),
    "LayerNorm": lambda rng, width: _norm(rng, "LayerNorm", width),
    "Linear": lambda rng, width: Drawn("Linear", (width, 192), {"bias": rng.choice(_BOTH)}, 192, products=1),
    "MakeExtraOutput": lambda rng, width: Drawn("MakeExtraOutput", outputs=1),
    "QGEGLU": _gated("QGEGLU"),
    "QGELU": _plain("QGELU"),
    "Quantize": lambda rng, width: Drawn("Quantize", (), {"forward": rng.choice(_BOTH), "backward": rng.choice(_BOTH)}, products=1),
    "RMSNorm": lambda rng, width: _norm(rng, "RMSNorm", width),
    "ReGLU": _gated("ReGLU"),
    "ReLU": _plain("ReLU"),
    "ReduceScatter": lambda rng, width: Drawn("ReduceScatter"),
    "Reshape": lambda rng, width: Drawn("Reshape", ((-1, 2, width),)),
    "SReGLU": _gated("SReGLU"),
    "SReLU": _plain("SReLU"),
    "ScaledClampedQGeGLU": _scaled("ScaledClampedQGeGLU", gated=True, limit=(1.0, 7.0), glu_interleave_size=(None, 32)),
    "ScaledSReLU": _scaled("ScaledSReLU", gated=False),
    "ScaledSiTUGLU": _scaled("ScaledSiTUGLU", gated=True, beta1=(2.0, 4.0), beta2=(10.0, 25.0), glu_interleave_size=(None, 32)),
    "ScaledSwiGLU": _scaled("ScaledSwiGLU", gated=True, glu_interleave_size=(None, 16, 32)),
    "ScaledTanhSReLU": lambda rng, width: Drawn("ScaledTanhSReLU", (), {"tanh_clamp_scale": rng.choice((0.5, 2.0))}, extras=(_scales,), rounds=2),
    "SiLU": _plain("SiLU"),
    "SiTUGLU": _interleaved("SiTUGLU", beta1=(2.0, 4.0), beta2=(10.0, 25.0)),
    "SwiGLU": _interleaved("SwiGLU"),
}
"""By the public name of each operation, how it is drawn for so many columns."""

_IN_ROWS = [name for name in OPERATIONS if name not in ("GroupedLinear", "Reshape", "AllGather", "AllReduce", "ReduceScatter")]
_PRODUCTS = ("BasicLinear", "Linear", "Quantize")
_ANY_WIDTH = ("BasicLinear", "Bias", "ConstantScale", "Linear", "MakeExtraOutput", "RMSNorm", "SReLU")


def drawn_operation(name: str, seed: int) -> list[Drawn]:
    return [OPERATIONS[name](Rng(f"{name} {seed}"), WIDTH)]


def drawn_row(seed: int) -> list[Drawn]:
    """Some operations, one after another, with a product among them. No product's output is quantized for the next: the package refuses that but
    under delayed scaling."""
    rng = Rng(f"row {seed}")
    width, row, produced = WIDTH, list[Drawn](), False
    for name in [rng.choice(_IN_ROWS) for _ in range(rng.randint(2, 6))] + ["Linear"]:
        if width % 128 and name not in _ANY_WIDTH:
            continue
        if produced and name in _PRODUCTS:
            row.append(OPERATIONS["SiLU"](rng, width))
        drawn = OPERATIONS[name](rng, width)
        produced = name in _PRODUCTS or (produced and name == "Bias")
        width = drawn.columns or width
        row.append(drawn)
    return row


def _made(te: Side, row: list[Drawn], dtype: torch.dtype) -> Any:
    made = []
    for drawn in row:
        takes = drawn.name in ("BasicLinear", "Bias", "GroupedLinear", "LayerNorm", "Linear", "RMSNorm")
        made.append(getattr(te.ops, drawn.name)(*drawn.arguments, **drawn.options, **({"dtype": dtype} if takes else {})))
    return te.ops.Sequential(*made)


def results_of(te: Side, row: list[Drawn], context: Callable[[], Any], dtype: torch.dtype, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The outputs and gradients of a row of operations with the weights ``state``, which is filled where it is empty."""
    module = _made(te, row, dtype)
    if not state:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))
        state.update(module.state_dict())
    module.load_state_dict(state, strict=not any(drawn.name == "Linear" and not drawn.options["bias"] for drawn in row))
    yield "names", sorted(module.state_dict())
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(ROWS, row[0].arguments[0] if row[0].name == "Bias" else WIDTH).to(dtype).requires_grad_()
        width, extras = WIDTH, list[torch.Tensor]()
        for drawn in row:
            for make in drawn.extras:
                extra = make(ROWS, width)
                extras.append(extra.to(dtype).requires_grad_() if extra.is_floating_point() else extra)
            width = drawn.columns or width
        module.zero_grad()
        with context():
            outputs = module(x, *extras)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(3)
        plain = [y.dequantize() if hasattr(y, "dequantize") and type(y) is not torch.Tensor else y for y in outputs]
        total = sum((y.float() * torch.randn(y.shape, generator=generator)).sum() for y in plain)
        total.backward()  # type: ignore[union-attr]
    yield from ((f"output {place}", y.detach()) for place, y in enumerate(plain))
    yield "input's gradient", x.grad
    yield from ((f"extra {place}'s gradient", extra.grad) for place, extra in enumerate(extras) if extra.grad is not None)
    yield from ((name, parameter.grad) for name, parameter in module.state_dict(keep_vars=True).items() if parameter.grad is not None)
