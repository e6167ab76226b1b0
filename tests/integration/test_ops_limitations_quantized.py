"""What a user of Transformer Engine's fusible operations runs into there: its quantization. A test is named after its entry of the table in
docs/ops.md."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ops_steps import RECIPES, WIDTH, batch, calls_of, every_recipe, linear, plan_of, same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import tex
from fusible.errors import NotServedError
from fusible.nvte import QuantizedType
from fusible.pytorch import ops
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
)

E4M3 = partial(Float8CurrentScalingQuantizer, tex.DType.kFloat8E4M3)


def by_role(role: QuantizerRole | None) -> Any:
    """What current scaling does, said by a factory."""
    if role is None or role.tensor_type == "output":
        return None
    e5m2 = role.tensor_type.startswith("grad")
    return Float8CurrentScalingQuantizer(tex.DType.kFloat8E5M2 if e5m2 else tex.DType.kFloat8E4M3)


def test_11_a_custom_recipe_with_bias_and_activation() -> None:
    model = ops.Sequential(linear(), ops.GELU(), linear(), ops.SwiGLU())
    assert same(step(model, batch(), fusible.CustomRecipe(by_role)), step(model, batch(), fusible.Float8CurrentScaling()))


FORMATS = (E4M3, partial(MXFP8Quantizer, E4M3().dtype), partial(Float8BlockQuantizer, E4M3().dtype))


@pytest.mark.parametrize("formats", list(itertools.permutations(FORMATS)))
def test_11_a_format_of_its_own_for_each_role(formats: tuple[Callable[[], Any], ...]) -> None:
    chosen = dict(zip(("input", "weight", "grad_output"), formats, strict=True))
    model = ops.Sequential(ops.LayerNorm(WIDTH), linear(bias=False), ops.GELU(), linear(bias=False))
    recipe = fusible.CustomRecipe(lambda role: chosen[role.tensor_type]() if role is not None and role.tensor_type in chosen else None)
    for got, wanted in zip(step(model, batch(), recipe), step(model, batch(), None), strict=True):
        # On the longest way, to the first weight's gradient, seven operands are each off by at most 2^-4 of their values.
        assert (got - wanted).norm() <= 7 * 2**-4 * wanted.norm() and not torch.equal(got, wanted)


class Halves(Quantizer):
    """A quantizer class that tex does not know."""

    custom = True  # pyright: ignore[reportAssignmentType]


def forward_only(quantizer: Callable[[], Any]) -> Callable[..., Any]:
    return lambda role: quantizer() if role is not None and role.tensor_type in ("input", "weight") else None


def test_11_an_identity_quantizer_quantizes_nothing() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH), linear(), ops.GELU(), linear())
    assert same(step(model, batch(), fusible.CustomRecipe(forward_only(IdentityQuantizer))), step(model, batch(), None))


def test_11_a_hybrid_quantizer_has_a_format_per_direction() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH), linear(), ops.GELU(), linear())
    recipe = fusible.CustomRecipe(forward_only(lambda: HybridQuantizer(rowwise_quantizer=E4M3(), columnwise_quantizer=MXFP8Quantizer(E4M3().dtype))))
    for got, wanted in zip(step(model, batch(), recipe), step(model, batch(), None), strict=True):
        # On the longest way, to the first weight's gradient, seven operands are each off by at most 2^-4 of their values.
        assert (got - wanted).norm() <= 7 * 2**-4 * wanted.norm()


def test_11_a_quantizer_class_of_ones_own_says_what_it_lacks() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH), linear(), ops.GELU(), linear())
    before = [value.clone() for value in model.state_dict().values()]
    custom = r"the custom quantizer Halves of cast of LayerNorm -> Linear -> GELU -> \.\.\."
    with pytest.raises(NotServedError, match=rf"^{custom}: expected a quantize_impl of its own, got none; override it\.$"):
        step(model, batch(), fusible.CustomRecipe(forward_only(Halves)))
    assert same(before, list(model.state_dict().values()))


def test_12_scale_and_sum_reach_a_custom_recipes_products() -> None:
    """A factor, an addend and a main_grad are part of the products: none is lost."""
    base = linear(bias=False, accumulate_into_main_grad=True)
    model = ops.Sequential(base, ops.ConstantScale(0.5), ops.AddExtraInput(in_place=True))
    found = []
    for recipe in (fusible.CustomRecipe(by_role), fusible.Float8CurrentScaling()):
        total = torch.full((WIDTH, WIDTH), 3.0)
        setattr(base.weight, "main_grad", total)  # noqa: B010
        found.append([*step(model, batch(), recipe, batch(1)), total])
    assert same(*found) and not torch.equal(found[0][-1], torch.full((WIDTH, WIDTH), 3.0))
    plain = step(ops.Sequential(base), batch(), fusible.CustomRecipe(by_role))[0]
    assert torch.allclose(found[0][0], 0.5 * plain + batch(1), rtol=2**-22, atol=2**-20)


def test_13_power_of_two_scales_are_honoured() -> None:
    for recipe, exact in ((fusible.Float8CurrentScaling(use_power_2_scales=True), True), (fusible.Float8CurrentScaling(), False)):
        type_ = plan_of(ops.Sequential(linear()), recipe).ops[0].x_dtype
        assert isinstance(type_, QuantizedType)
        inverse = type_.descriptor(batch())._scale_inv.item()
        assert (math.frexp(inverse)[0] == 0.5) is exact


def delayed_inputs(role: QuantizerRole | None) -> Any:
    return DelayedScalingRequest(amax_history_len=4) if role is not None and role.tensor_type == "input" else None


def test_14_a_custom_recipes_delayed_scaling_is_in_the_state_dict() -> None:
    model, recipe = ops.Sequential(linear()), fusible.CustomRecipe(delayed_inputs)
    step(model, batch(), recipe)
    state = model.state_dict()
    saved = {name: value for name, value in state.items() if "scaling_state" in name}
    assert saved and all(value.dtype is torch.uint8 and value.numpy().tobytes()[8:9] == b"{" for value in saved.values())  # safetensors, no pickle
    other = ops.Sequential(linear())
    other.load_state_dict(state)
    assert same(step(other, batch(1), recipe), step(model, batch(1), recipe))


@every_recipe
def test_15_a_weight_is_quantized_once_for_all_micro_batches(recipe: fusible.Recipe) -> None:
    model = ops.Sequential(linear(bias=False))
    counts = []
    for _ in range(5):
        with fusible.autocast(recipe=recipe), tex.record() as calls:
            model(batch())
        counts.append(calls_of("quantize", calls))
    # The weight, once; under delayed scaling by its first scale, which is 1, by the next, and when that one is seen to stay.
    assert [count - counts[-1] for count in counts] == ([1, 1, 1, 0, 0] if isinstance(recipe, fusible.DelayedScaling) else [1, 0, 0, 0, 0])


def test_15_recomputed_activations_see_the_scales_of_the_first_time() -> None:
    model, twin = (ops.Sequential(linear(), ops.GELU(), linear()) for _ in range(2))
    twin.load_state_dict(model.state_dict())

    def recomputed(x: Tensor) -> Any:
        return checkpoint(twin, x, use_reentrant=False)

    for seed in range(3):
        wrapped = nn.Module()
        wrapped.forward = recomputed  # type: ignore[method-assign]
        wrapped.inner = twin
        assert same(step(model, batch(seed), RECIPES[0]), step(wrapped, batch(seed), RECIPES[0]))


@every_recipe
def test_15_a_model_is_made_with_quantized_weights_and_trains(recipe: fusible.Recipe) -> None:
    torch.manual_seed(1)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model, same_shape = (ops.Sequential(linear(), ops.GELU(), linear()) for _ in range(2))
        ours = fusible.Linear(WIDTH, WIDTH)
    weight: Any = model[0].weight
    assert isinstance(weight, QuantizedTensor) and isinstance(ours.weight, QuantizedTensor) and not isinstance(model[0].bias, QuantizedTensor)
    assert weight.get_high_precision_init_val().shape == (WIDTH, WIDTH)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(12):
        with fusible.autocast(recipe=recipe):
            loss = (model(batch()) - 0.5 * batch(1)).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    same_shape.load_state_dict(model.state_dict())
    with fusible.autocast(recipe=recipe), torch.no_grad():
        assert isinstance(same_shape[0].weight, QuantizedTensor) and torch.equal(same_shape(batch()), model(batch()))


def test_17_two_threads_follow_two_recipes() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH), linear(), ops.GELU(), linear())
    chosen = [*RECIPES[1:4], None] * 2
    with torch.no_grad():
        wanted = []
        for recipe in chosen:
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                wanted.append(model(batch()))
    wrong: list[str] = []

    def work(recipe: fusible.Recipe | None, expected: Tensor) -> None:
        with torch.no_grad(), fusible.autocast(enabled=recipe is not None, recipe=recipe):
            wrong.extend(repr(recipe) for _ in range(20) if not torch.equal(model(batch()), expected))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(chosen, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("p", [0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_18_dropout_drops_with_its_probability_and_keeps_the_mean(p: float) -> None:
    """Of a million draws the number of those kept lies within five standard deviations; dtypes and sizes draw alike."""
    count, model = 10**6, ops.Sequential(ops.Dropout(p))
    torch.manual_seed(2)
    y = model(torch.ones(1000, count // 1000))
    kept = int((y != 0).sum())
    assert abs(kept - count * (1 - p)) < 5 * math.sqrt(count * p * (1 - p))
    assert set(y.unique().tolist()) == {0.0, (1 / (1 - torch.tensor(p, dtype=torch.float64))).float().item()}
    for dtype, rows in ((torch.bfloat16, 1000), (torch.float16, 1000), (torch.float32, 7)):
        torch.manual_seed(2)
        assert torch.equal(model(torch.ones(rows, count // 1000, dtype=dtype)) != 0, y[:rows] != 0)


@pytest.mark.parametrize("ways", [{"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}])
def test_19_every_format_is_dequantized_on_the_cpu_from_either_copy(ways: dict[str, bool]) -> None:
    x = batch()
    for quantizer in (MXFP8Quantizer(tex.DType.kFloat8E4M3), fusible.quantized.NVFP4Quantizer()):
        quantizer.set_usage(**ways)
        back = quantizer(x).dequantize()
        # A value is off by at most half a step of its block's scale: of E2M1, whose steps are at most a third of its largest value.
        assert back.device.type == "cpu" and (back - x).abs().max() <= x.abs().max() / 6 * 1.0625


_BARE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pydantic", "transformer_engine") or name == "fusible.cpp_extensions._native":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch, fusible
from fusible.pytorch import ops
model = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.GELU())
for recipe in (fusible.DelayedScaling(), fusible.NVFP4BlockScaling()):
    with fusible.autocast(recipe=recipe):
        model(torch.randn(32, 64)).sum().backward()
from fusible import cpp_extensions
print(cpp_extensions.available, "pydantic" in sys.modules, model[1].weight.grad.isfinite().all().item())
"""


def test_20_import_and_training_need_neither_pydantic_nor_a_compiled_extension() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _BARE], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr[-2000:]
