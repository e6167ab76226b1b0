"""Every module and every operation, called rightly with what was drawn at random, gives what float64 says, forward and backward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from module_chains import DRAWS
from module_draws import NOT_IN_FP64, DoubleDraw, Draw, Right
from module_formulas import PLAIN
from rounding_noise import Noise, spread
from subjects import RECIPES, classes_of
from torch import Tensor

from fusible import pytorch
from fusible.pytorch import autocast, ops
from fusible.quantized import DelayedScaling, QuantizedTensor
from fusible.tex.protocol import accumulator

TIMES = 3
"""How often each module is called: the third call is replayed."""
SAMPLES = 8
FACTOR, WHOLE = 12.0, 2.0
"""How far an element may be from float64, and how far all of them: beside the root mean square of what noise does to it in ``SAMPLES``. As these are
few, a fifth of the mean square over all elements that are not exact counts for each of them."""
WAYS = (*RECIPES, "fp64")
"""The recipes, and none in fp64."""
SUBJECTS = [(room, name) for room, draws in DRAWS.items() for name in sorted(draws)]
QUANTIZING = {"BasicLinear", "GroupedLinear", "Linear", "MixtureOfExperts", "Quantize", "Residual", "Sequential"}
"""Those that compute otherwise under a recipe; others have to be the same."""


def drawn(name: str, recipe: str) -> int:
    """How many modules of a class are drawn in the long run."""
    if recipe == "fp64" and name in NOT_IN_FP64:
        return 0
    return 40 if recipe == "none" or name in QUANTIZING else 8


CALLS = TIMES * sum(drawn(name, recipe) for _, name in SUBJECTS for recipe in WAYS)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(("room", "own"), [(pytorch, "modules"), (ops, "operations")])
def test_every_public_class_is_drawn(room: Any, own: str) -> None:
    assert classes_of(room) == set(DRAWS[own])


def _leaves(right: Right, draw: Draw, mode: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and parameters, some of which want gradients."""
    inputs = {name: value if name in right.constants else value.detach() for name, value in right.inputs().items()}
    parameters: dict[str, Tensor] = dict(right.module.named_parameters())
    for name, leaf in (*inputs.items(), *parameters.items()):
        leaf.grad = None
        if name not in right.constants:
            leaf.requires_grad_(mode == "training" and draw.of(True, True, True, False))
        if hasattr(leaf, "main_grad") or _accumulates(right, name):
            leaf.main_grad = torch.zeros_like(leaf, dtype=accumulator(leaf.dtype))  # type: ignore[attr-defined]
    return inputs, parameters


def _accumulates(right: Right, name: str) -> bool:
    owner = right.module.get_submodule(name.rpartition(".")[0])
    return name.rpartition(".")[2] in getattr(owner, "accumulating_parameters", ())


def _call(right: Right, draw: Draw, inputs: dict[str, Tensor], mode: str) -> list[Tensor]:
    context = {"training": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]()
    off = draw.recipe is None and draw.of(True, False)
    recipe = RECIPES["current"] if off else draw.recipe
    with context, autocast(draw.recipe is not None, recipe), autocast(enabled=False) if off else nullcontext():
        result = right.module(*inputs.values(), **right.given)
    return list(result) if isinstance(result, tuple) else [result]


def _backward(right: Right, outputs: Sequence[Tensor], draw: Draw) -> list[Tensor | None]:
    """The gradients that are handed to a backward, which is run: of layouts of their own, of one output none."""
    if not any(output.requires_grad for output in outputs):
        return [None] * len(outputs)
    dys: list[Tensor | None] = [draw.values(*output.shape, dtype=output.dtype) for output in outputs]
    if isinstance(draw.recipe, DelayedScaling):  # whose scales are those of what came before: of other values it would saturate
        dys = right.gradients = right.gradients or dys
    if len(dys) > 1 and draw.of(True, False, False):
        dys[draw.of(0, 1)] = None
    given = [(output, dy) for output, dy in zip(outputs, dys, strict=True) if dy is not None]
    torch.autograd.backward([output for output, _ in given], [dy for _, dy in given])
    return dys


def _formula(right: Right, inputs: dict[str, Tensor], parameters: dict[str, Tensor], dys: Sequence[Tensor | None], wanted: Sequence[str]) -> Any:
    def compute(noise: Noise) -> list[Tensor]:
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in (*inputs.items(), *parameters.items()) if leaf.is_floating_point()}
        values = {name: noise.leaf(leaf, torch.float32 if name in parameters and hasattr(parameters[name], "main_grad") else _dtype(name))
                  for name, leaf in leaves.items()}  # fmt: skip
        result = right.formula(noise, {**inputs, **{name: values[name] for name in inputs if name in values}}, {n: values[n] for n in parameters})
        outputs = result if isinstance(result, tuple) else (result,)
        given = [(output, dy.detach().double()) for output, dy in zip(outputs, dys, strict=True) if dy is not None]
        asked = [leaves[name] for name in wanted]
        grads = torch.autograd.grad([o for o, _ in given], asked, [dy for _, dy in given], allow_unused=True) if given and asked else ()
        return [*(o.detach() for o in outputs), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(asked, grads, strict=bool(grads)))]

    def _dtype(name: str) -> torch.dtype:
        return (inputs | parameters)[name].dtype

    return compute


def _step(right: Right, draw: Draw, mode: str) -> int:
    """A call and its backward, held against float64; the number of tensors compared."""
    inputs, parameters = _leaves(right, draw, mode)
    before = {name: leaf.detach().clone() for name, leaf in (*inputs.items(), *parameters.items())}
    outputs = _call(right, draw, inputs, mode)
    dys = _backward(right, outputs, draw)
    right.seen[:] = [output.detach().double() for output in outputs]
    asked = [name for name, leaf in (*inputs.items(), *parameters.items()) if leaf.requires_grad and any(dy is not None for dy in dys)]
    found = {f"output {place}": output for place, output in enumerate(outputs)}
    for name, leaf in (*inputs.items(), *parameters.items()):
        assert torch.equal(leaf, before[name]), f"{name} was written to"
        main = getattr(leaf, "main_grad", None)
        grad = leaf.grad if main is None else main
        if name in asked:
            assert grad is not None, f"no gradient of {name}"
            found[f"gradient of {name}"] = grad
        else:
            assert leaf.grad is None, f"a gradient of {name}"
    for place, output in enumerate(outputs):
        assert output.dtype is draw.dtype, f"output {place} is of {output.dtype}"
    compute = _formula(right, inputs, parameters, dys, asked)
    double = draw.dtype is torch.float64  # in which noise of its own size would not be seen: it is as that of fp32, whose roundings are 2^29 times it
    noise = spread(compute, torch.float32 if double else draw.dtype, draw.recipe, SAMPLES)
    for (what, got), (wanted, rms) in zip(found.items(), noise, strict=True):
        assert got.dtype is torch.float64 or not double, f"{what} is of {got.dtype}"
        _compare(what, got, wanted, rms * 2.0**-29 if double else rms)
    return len(found)


def _compare(what: str, got: Tensor, wanted: Tensor, rms: Tensor) -> None:
    value = (got.dequantize() if isinstance(got, QuantizedTensor) else got).detach().double()
    assert value.shape == wanted.shape, f"{what}: {list(value.shape)} instead of {list(wanted.shape)}"
    error = (value - wanted).abs()
    square = rms.square()
    mixed = torch.where(square > 0, 0.8 * square + 0.2 * square.sum() / max((square > 0).sum().item(), 1), 0.0).sqrt()
    share = (error / (FACTOR * mixed + 1e-37)).nan_to_num(nan=torch.inf)
    assert not value.numel() or share.max() <= 1, f"{what}: an element is {share.max().item():.3g} of its bound apart"
    if value.numel() >= 64:
        whole = error.norm() / (WHOLE * rms.norm() + 1e-37)
        assert whole <= 1, f"{what}: the whole is {whole.item():.3g} of its bound apart"


def _right(room: str, name: str, recipe: str, seed: int) -> tuple[Right, Draw]:
    place = zlib.crc32(f"{room} {name} {recipe}".encode()) + seed
    draw = Draw(place, RECIPES[recipe]) if recipe in RECIPES else DoubleDraw(place)
    torch.manual_seed(seed)
    return DRAWS[room][name](draw), draw


def _run(room: str, name: str, recipe: str, seeds: range) -> int:
    compared = 0
    for seed in seeds:
        right, draw = _right(room, name, recipe, seed)
        if recipe == "delayed":
            inputs = right.inputs()
            right.inputs = lambda inputs=inputs: {key: value.clone() for key, value in inputs.items()}
        for time in range(TIMES):
            mode = draw.of("training", "training", "training", "no_grad", "inference_mode")
            try:
                compared += _step(right, draw, mode)
            except Exception as error:
                shapes = {key: (value.dtype, list(value.shape), value.stride()) for key, value in right.inputs().items()}
                where = f"{name} under {recipe}, draw {seed}, {mode} {time}: {right.module}, {shapes}, {right.given}"
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            with torch.no_grad():
                for parameter in right.module.parameters():
                    parameter.mul_(1.0 if recipe == "delayed" else draw.of(-1.0, 1.0, 0.5))
    return compared


@pytest.mark.parametrize("recipe", WAYS)
def test_a_sample_of_right_calls(recipe: str) -> None:
    subjects = [(room, name) for room, name in SUBJECTS if recipe in ("none", "fp64") or name in QUANTIZING]
    subjects = [(room, name) for room, name in subjects if drawn(name, recipe)]
    compared = sum(_run(room, name, recipe, range(1)) for room, name in subjects)
    assert compared > 3 * len(subjects)


@pytest.mark.slow
@pytest.mark.parametrize(("room", "name", "recipe"), [(room, name, recipe) for room, name in SUBJECTS for recipe in WAYS if drawn(name, recipe)])
def test_right_calls_at_length(room: str, name: str, recipe: str) -> None:
    assert _run(room, name, recipe, range(drawn(name, recipe))) > TIMES * drawn(name, recipe)


def _caught(room: str, name: str, how_often: int = 12) -> int:
    caught = 0
    for seed in range(how_often):
        try:
            _run(room, name, "none", range(seed, seed + 1))
        except AssertionError:
            caught += 1
    return caught


WRONG: dict[str, tuple[str, str, Callable[[Noise, Tensor], Tensor]]] = {
    "a constant in its fourth digit": ("GELU", "GELU", lambda n, x: x * torch.sigmoid(1.5957 * (x + 0.0448 * x**3))),
    "the exact GELU for the approximation": ("GELU", "GELU", lambda n, x: torch.nn.functional.gelu(x)),
    "a slope at zero": ("ReLU", "ReLU", lambda n, x: torch.nn.functional.leaky_relu(x, 1e-5)),
    "a gradient that stops": ("SiLU", "SiLU", lambda n, x: x * torch.sigmoid(x.detach())),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_formula_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not fail would hold nothing: of the draws many are of few values, or coarse."""
    name, formula, value = WRONG[wrong]
    monkeypatch.setitem(PLAIN, formula, value)
    assert _caught("modules", name) >= 2
