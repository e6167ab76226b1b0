"""Each built-in fusion as it fires in ``ops.Sequential``: the same results as without it, and as the operations give one by one.

Where the arithmetic is the same the results are, bit for bit. Where it is not, the reason is one of three, named beside each entry:
*once* - a value is rounded once to the activations' type, at the end, and not after every operation, or it is summed in another order;
*sum* - a bias gradient is summed from what is not yet rounded, or in another order;
*steps* - a quantized gradient follows from such a value: by a step of its format where that lies near a tie.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from quantization_error import RECIPES
from torch import Tensor

from fusible import autocast, fusions
from fusible.pytorch import ops
from fusible.pytorch.ops import FusibleOperation
from fusible.quantized import Format, NVFP4BlockScaling, Recipe

W = 64
Make = Callable[[torch.dtype], list[FusibleOperation]]


@dataclass(frozen=True)
class Case:
    """``differs``: results that the fused passes give by other arithmetic, and why; those of ``fp32`` in fp32 too. All others are bit for bit the
    same."""

    name: str
    make: Make = field(repr=False)
    fires: frozenset[str]
    differs: Mapping[str, str] = field(default_factory=dict)
    fp32: frozenset[str] = frozenset()
    extras: int = 0
    width: int = W


def _linear(d: torch.dtype) -> FusibleOperation:
    return ops.Linear(W, W, dtype=d)


def _product(d: torch.dtype) -> FusibleOperation:
    return ops.BasicLinear(W, W, dtype=d)


def _bias(d: torch.dtype) -> FusibleOperation:
    return ops.Bias(W, dtype=d)


def _case(name: str, make: Make, *fires: str, differs: Mapping[str, str] | None = None, fp32: str = "", **rest: Any) -> Case:
    return Case(name, make, frozenset(f"{fusion}_fused" for fusion in fires), differs or {}, frozenset(fp32.split()), **rest)


_ONCE = {"y": "once"}
_EPILOGUE = {"y": "once", "dx": "once", "d0.weight": "once"}
"""An fp16 product with an epilogue may sum in another order than one without, so that backward has another z."""
_GELU_BACKWARD = {"dx": "steps", "d0.basic_ops.0.weight": "steps", "d0.basic_ops.1.bias": "sum"}
_LINEAR = ("mmt_add_fwd", "mmt_add_inf")
CASES = [
    _case("linear", lambda d: [_linear(d)], *_LINEAR, "mmt_add_bwd", differs=_ONCE),
    _case("two biases", lambda d: [_linear(d), _bias(d)], "mmt_add_add_fwd", "mmt_add_add_inf", "mmt_add_bwd", differs=_ONCE, fp32="y"),
    _case(
        "linear, extra", lambda d: [_linear(d), ops.AddExtraInput()], "mmt_add_residual_fwd", "mmt_add_residual_inf", "mmt_add_bwd",
        differs=_ONCE, fp32="y", extras=1,
    ),
    _case("product, extra", lambda d: [_product(d), ops.AddExtraInput()], "mmt_residual_fwd", "mmt_residual_inf", differs=_ONCE, extras=1),
    _case("product, GELU", lambda d: [_product(d), ops.GELU()], "mmt_gelu_fwd", "mmt_gelu_inf", differs=_EPILOGUE, fp32="y"),
    _case("product, GEGLU", lambda d: [_product(d), ops.GEGLU()], "mmt_geglu_bwd", width=W // 2),
    _case(
        "linear, GELU", lambda d: [_linear(d), ops.GELU()], "mmt_add_gelu_fwd", "mmt_add_gelu_inf", "mmt_add_gelu_bwd",
        differs={**_ONCE, **_GELU_BACKWARD}, fp32="y d0.basic_ops.1.bias",
    ),
    _case(
        "product, GELU, bias", lambda d: [_product(d), ops.GELU(), _bias(d)], "mmt_gelu_add_fwd", "mmt_gelu_add_inf", differs=_EPILOGUE, fp32="y"
    ),
    _case(
        "linear, GELU, bias", lambda d: [_linear(d), ops.GELU(), _bias(d)], "mmt_add_gelu_add_fwd", "mmt_add_gelu_add_inf", "mmt_add_gelu_bwd",
        differs={**_ONCE, **_GELU_BACKWARD}, fp32="y d0.basic_ops.1.bias",
    ),
    _case(
        "product, GELU, extra", lambda d: [_product(d), ops.GELU(), ops.AddExtraInput()], "mmt_gelu_residual_fwd", "mmt_gelu_residual_inf",
        differs=_EPILOGUE, fp32="y", extras=1,
    ),
    _case(
        "linear, GELU, extra", lambda d: [_linear(d), ops.GELU(), ops.AddExtraInput()],
        "mmt_add_gelu_residual_fwd", "mmt_add_gelu_residual_inf", "mmt_add_gelu_bwd",
        differs={**_ONCE, **_GELU_BACKWARD}, fp32="y d0.basic_ops.1.bias", extras=1,
    ),
    # A gradient that is quantized is scaled first, fused or not: then all is the same.
    _case(
        "product, factor", lambda d: [_product(d), ops.ConstantScale(0.3)], "mmt_scale_bwd",
        differs={"dx": "once", "d0.weight": "once"}, fp32="dx d0.weight",
    ),
    _case(
        "product, factor, extra", lambda d: [_product(d), ops.ConstantScale(0.3), ops.AddExtraInput()],
        "mmt_scale_extra_fwd", "mmt_scale_extra_inf", "mmt_scale_bwd",
        differs={"y": "once", "dx": "once", "d0.weight": "once"}, fp32="y dx d0.weight", extras=1,
    ),
    _case(
        "linear, factor, extra", lambda d: [_linear(d), ops.ConstantScale(0.3), ops.AddExtraInput()],
        "mmt_add_scale_extra_fwd", "mmt_add_scale_extra_inf", "mmt_add_bwd", differs=_ONCE, fp32="y", extras=1,
    ),
    *(
        _case(f"bias, {name}", lambda d, n=name: [_bias(d), getattr(ops, n)()], f"add_{of}_bwd", differs={"d0.bias": "sum"}, fp32="d0.bias")
        for name, of in {"GELU": "gelu", "ErfGELU": "erf_gelu", "QGELU": "qgelu", "ReLU": "relu", "SiLU": "silu", "SReLU": "srelu"}.items()
    ),
    # Between unquantized operands the two are one pass in name alone.
    _case("GELU, product", lambda d: [ops.GELU(), _product(d)], "gelu_mmt_bwd", differs={"dx": "once"}),
    _case(
        "bias, GELU, linear", lambda d: [_bias(d), ops.GELU(), _linear(d)], *_LINEAR, "add_gelu_mmt_add_bwd",
        differs={"y": "once", "dx": "once", "d0.bias": "sum"}, fp32="d0.bias",
    ),
    *(
        _case(f"extra output, {name}", lambda d, m=make: [ops.MakeExtraOutput(), m(d)], *fires, differs={"dx": "once", **more})
        for name, make, fires, more in (
            ("product", _product, ("make_extra_mmt_bwd",), {}),
            ("linear", _linear, (*_LINEAR, "make_extra_mmt_add_bwd"), _ONCE),
            ("RMSNorm", lambda d: ops.RMSNorm(W, dtype=d), ("make_extra_rmsnorm_bwd",), {}),
            ("LayerNorm", lambda d: ops.LayerNorm(W, dtype=d), ("make_extra_layernorm_bwd",), {}),
        )
    ),
]  # fmt: skip
_16 = RECIPES | {"nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True)}
MODES: dict[str, tuple[torch.dtype, Recipe | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    **{f"{name} bf16": (torch.bfloat16, recipe) for name, recipe in _16.items()},
    "current fp32": (torch.float32, RECIPES["current"]),
    "mxfp8 fp16": (torch.float16, RECIPES["mxfp8"]),
}


@contextmanager
def unfused() -> Iterator[None]:
    """Without any of the fusions."""
    known: list[tuple[Callable[..., Any], fusions.Fusion]] = []
    known += [(fusions.register_fusion_forward, fusion) for fusion in fusions.registered("forward")]
    known += [(fusions.register_fusion_backward, fusion) for fusion in fusions.registered("backward")]
    known += [(fusions.register_fusion_inference, fusion) for fusion in fusions.registered("inference")]
    for _, fusion in known:
        fusions.unregister_fusion(fusion.function)
    try:
        yield
    finally:
        for register, fusion in known:
            register(fusion.function, when=fusion.when)


def model_of(case: Case, dtype: torch.dtype) -> ops.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = ops.Sequential(*case.make(dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / (W**0.5 if parameter.dim() == 2 else 1))
    return model


def results(call: Callable[..., Any], case: Case, parameters: Mapping[str, Tensor], dtype: torch.dtype, recipe: Recipe | None) -> dict[str, Tensor]:
    """Of two steps (delayed scaling has scales in the second) the outputs of training and inference, and all gradients."""
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(32, W, generator=generator).to(dtype).requires_grad_() for _ in range(1 + case.extras)]
    gave = [torch.randn(32, width, generator=generator).to(dtype) for width in (case.width, W)]
    found: dict[str, Tensor] = {}
    for step in range(2):
        for leaf in (*leaves, *parameters.values()):
            leaf.grad = None
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = call(*leaves)
        outputs = y if isinstance(y, tuple) else (y,)
        torch.autograd.backward(outputs, gave[: len(outputs)])
        with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
            inferred = call(*leaves)
        named = {"y": outputs[0].detach(), "y inferred": inferred[0] if isinstance(inferred, tuple) else inferred}
        named |= {f"output {i}": output.detach() for i, output in enumerate(outputs[1:])} | {"dx": _grad(leaves[0])}
        named |= {f"dextra {i}": _grad(leaf) for i, leaf in enumerate(leaves[1:])} | {f"d{name}": _grad(p) for name, p in parameters.items()}
        found |= {f"{name} of step {step}": tensor for name, tensor in named.items()}
    return found


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def compare(case: Case, fused: Mapping[str, Tensor], other: Mapping[str, Tensor], dtype: torch.dtype, step: float | None) -> None:
    """``step``: of the format of quantized gradients, relative to a value; None where nothing is quantized."""
    assert fused.keys() == other.keys()
    moved = 3 * torch.finfo(dtype).eps + (W + 32 + 16) * torch.finfo(torch.float32).eps
    for what, a in fused.items():
        name, b = re.sub(" inferred| of step .", "", what), other[what]
        assert a.dtype is b.dtype and a.shape == b.shape
        why = case.differs.get(name)
        if why is None or (dtype is torch.float32 and name not in case.fp32):
            assert torch.equal(a, b), f"{case.name}: {what} is not the same"
        elif why == "steps" and step is not None:
            # A share of about moved / step of the elements differs, by a step each, and one of n may by chance.
            bound = moved + 2 * (moved * step) ** 0.5 + 2 * step / b.numel() ** 0.5
            assert (a - b).double().norm() <= bound * b.double().norm(), f"{case.name}: {what} differs by more than some steps"
        else:
            # At most three values of the dtype are rounded on the one way and not on the other, and sums have W or 32 terms.
            assert (a - b).abs().max() <= moved * b.abs().max().clamp(min=1), f"{case.name}: {what} differs by more than its roundings"


def step_of(recipe: Recipe | None) -> float | None:
    if recipe is None:
        return None
    return 0.5 if recipe.nvfp4() else 0.25 if recipe.fp8_format is Format.HYBRID else 0.125  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_passes_are_interchangeable(case: Case, mode: str) -> None:
    dtype, recipe = MODES[mode]
    model = model_of(case, dtype)
    twin = copy.deepcopy(model)
    assert _fired(model, recipe) == case.fires
    fused = results(model, case, dict(model.named_parameters()), dtype, recipe)
    with unfused():
        assert not _fired(twin, recipe)
        other = results(twin, case, dict(twin.named_parameters()), dtype, recipe)
    compare(case, fused, other, dtype, step_of(recipe))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operations_one_by_one_are_the_pipeline_without_fusions(case: Case, dtype: torch.dtype) -> None:
    """Bit for bit, as every edge between two operations has the activations' type in both."""
    model = model_of(case, dtype)
    twin = copy.deepcopy(model)

    def one_by_one(x: Tensor, *extras: Tensor) -> Any:
        left, outputs = list(extras), []
        for op in (basic for part in twin for basic in part.basic_operations()):  # type: ignore[operator]
            taken = [left.pop(0) for _ in range(op.num_extra_inputs)]
            result = op(x, *taken)
            x, *more = result if isinstance(result, tuple) else (result,)
            outputs += more
        return (x, *outputs) if outputs else x

    with unfused():
        wanted = results(model, case, dict(model.named_parameters()), dtype, None)
        found = results(one_by_one, case, dict(twin.named_parameters()), dtype, None)
    assert found.keys() == wanted.keys() and all(torch.equal(found[what], wanted[what]) for what in wanted)


def _fired(model: ops.Sequential, recipe: Recipe | None) -> set[str]:
    return set(re.findall(r"\b\w+_fused\b", model.explain(recipe=recipe).split("\n\nquantizers")[0]))


def test_every_built_in_fusion_fires_in_some_case() -> None:
    built_in = {fusion.name for kind in ("forward", "backward", "inference") for fusion in fusions.registered(kind) if fusion.ours}
    assert built_in == {name for case in CASES for name in case.fires}
