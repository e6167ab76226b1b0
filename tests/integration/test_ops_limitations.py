"""What a user of Transformer Engine's fusible operations runs into there: its fusion engine. A test is named after its entry of the table in
docs/ops.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_steps import RECIPES, WIDTH, batch, calls_of, every_recipe, linear, plan_of, same, step
from torch import Tensor, nn

import fusible
from fusible import tex
from fusible.errors import ArgumentError
from fusible.nvte import QuantizedType
from fusible.pytorch import ops


@every_recipe
def test_01_two_linears_in_a_row(recipe: fusible.Recipe) -> None:
    """The result is that of two pipelines of one Linear each: the first product's output is rounded to the input's dtype in between."""
    first, second = linear(), linear()
    if isinstance(recipe, fusible.NVFP4BlockScaling):  # whose random bits would be drawn in another order
        recipe = fusible.NVFP4BlockScaling(disable_stochastic_rounding=True)
    together = step(ops.Sequential(first, second), batch(), recipe)
    apart = step(nn.Sequential(ops.Sequential(first), ops.Sequential(second)), batch(), recipe)
    assert same(together, apart)


@every_recipe
def test_02_a_hint_crosses_what_leaves_the_rows_as_they_are(recipe: fusible.Recipe) -> None:
    """The norm writes what the Linear asks for, and nothing is quantized twice: the results are those without anything between."""
    norm, last = ops.LayerNorm(WIDTH), linear()
    wanted = step(ops.Sequential(norm, last), batch(), recipe)
    asleep = ops.Dropout(0.5).eval()
    several = [asleep, ops.Reshape((-1, WIDTH)), ops.Identity()]
    for between in ([ops.Identity()], [ops.ConstantScale(1.0)], [ops.Reshape((2, -1, WIDTH))], [ops.Dropout(0.0)], several):
        model = ops.Sequential(norm, *between, last)
        assert all(isinstance(op.y_dtype, QuantizedType) for op in plan_of(model, recipe).ops[: len(between) + 1])
        got = step(model, batch(), recipe)
        assert same(got, wanted) and got[0].dim() == (3 if getattr(between[0], "_shape", ()) == (2, -1, WIDTH) else 2)


@every_recipe
def test_02_a_hint_crosses_a_power_of_two(recipe: fusible.Recipe) -> None:
    """The product is that of the same norm with both parameters multiplied."""
    norm, scaled, last = ops.LayerNorm(WIDTH), ops.LayerNorm(WIDTH), linear()
    with torch.no_grad():
        scaled.weight.mul_(0.25)
    model = ops.Sequential(norm, ops.ConstantScale(0.25), last)
    assert all(isinstance(op.y_dtype, QuantizedType) for op in plan_of(model, recipe).ops[:2])
    # Before a second step a delayed scale is 1, of either tensor: then the outputs differ, and the histories of their gradients.
    if isinstance(recipe, fusible.DelayedScaling):
        recipe = fusible.DelayedScaling(amax_history_len=1)
    steps = 3 if isinstance(recipe, fusible.DelayedScaling) else 1
    got, wanted = ([step(each, batch(), recipe) for _ in range(steps)][-1] for each in (model, ops.Sequential(scaled, last)))
    assert same(got[:2], wanted[:2])


def test_02_a_hint_ends_where_the_values_are_wanted_unquantized_or_change() -> None:
    for between in (ops.MakeExtraOutput(), ops.ConstantScale(3.0), ops.Dropout(0.5), ops.Reshape((-1, WIDTH // 2))):
        width = WIDTH // 2 if isinstance(between, ops.Reshape) else WIDTH
        model = ops.Sequential(ops.LayerNorm(WIDTH), between, ops.Linear(width, WIDTH))
        plan = plan_of(model, fusible.MXFP8BlockScaling())
        assert not isinstance(plan.ops[0].y_dtype, QuantizedType) and isinstance(plan.ops[2].x_dtype, QuantizedType)
    norm_after = ops.Sequential(ops.MakeExtraOutput(), ops.LayerNorm(WIDTH), linear())
    assert isinstance(plan_of(norm_after, fusible.MXFP8BlockScaling()).ops[1].y_dtype, QuantizedType)


def test_03_nested_sequentials_join_and_take_extra_inputs() -> None:
    norm, first, second = ops.LayerNorm(WIDTH), linear(), linear()
    take = ops.AddExtraInput()
    nested = ops.Sequential(norm, ops.Sequential(first, ops.Sequential(take), ops.GELU()), second)
    flat = ops.Sequential(norm, first, take, ops.GELU(), second)
    assert len(nested._arranged()) == 1
    assert same(step(nested, batch(), RECIPES[1], batch(1)), step(flat, batch(), RECIPES[1], batch(1)))


class Doubled(ops.FusedOperation):
    """A Linear whose forward counts its calls, and gives the double."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs: list[Any], input_: Tensor, **passed: Any) -> Any:
        type(self).calls += 1
        (op,), (ctx,) = self.basic_ops, basic_op_ctxs
        y = op.op_forward(ctx, input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)  # pyright: ignore[reportCallIssue]
        return 2 * y, [()]


def test_04_a_fused_operation_that_the_user_placed_is_called() -> None:
    basic = ops.BasicLinear(WIDTH, WIDTH)
    model = ops.Sequential(ops.LayerNorm(WIDTH), Doubled([basic]))
    before = Doubled.calls
    assert torch.equal(model(batch()), 2 * ops.Sequential(model[0], basic)(batch())) and Doubled.calls == before + 1
    assert torch.equal(Doubled([basic])(batch()), 2 * basic(batch()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_05_linear_and_gelu_are_one_call(dtype: torch.dtype) -> None:
    model = ops.Sequential(linear(dtype=dtype), ops.GELU())
    with fusible.autocast(recipe=RECIPES[1]), tex.record() as calls:
        model(batch().to(dtype))
    assert calls_of("generic_gemm", calls) == 1 and calls_of("gelu", calls) == 0


@pytest.mark.parametrize("activation", ["GELU", "ErfGELU", "QGELU", "ReLU", "SReLU", "SiLU"])
def test_05_an_activations_backward_sums_the_bias_gradient(activation: str) -> None:
    model = ops.Sequential(linear(), getattr(ops, activation)())
    with tex.record() as calls:
        step(model, batch(), RECIPES[2])
    gradient = "erf_dgelu" if activation == "ErfGELU" else f"d{activation.lower()}"
    assert calls_of(f"dbias_{gradient}", calls) == 1 and calls_of(gradient, calls) == 0


@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm])
def test_05_a_norms_backward_adds_the_extra_gradient(norm: type[Any]) -> None:
    model = ops.Sequential(ops.MakeExtraOutput(), norm(WIDTH), linear())
    assert f"make_extra_{norm.__name__.lower()}_bwd_fused" in model.explain(recipe=RECIPES[0])


def test_06_options_of_a_recipe_change_after_the_first_call() -> None:
    model = ops.Sequential(linear())
    for one, other in (
        (fusible.Float8CurrentScaling(), fusible.Float8CurrentScaling(use_power_2_scales=True)),
        (fusible.DelayedScaling(), fusible.DelayedScaling(fp8_format=fusible.quantized.Format.E4M3)),
        (fusible.NVFP4BlockScaling(), fusible.NVFP4BlockScaling(disable_2d_quantization=True)),
    ):
        fresh = ops.Sequential(model[0])
        step(model, batch(), one)
        changed = [type_ for op in plan_of(model, other).ops for type_ in vars(op).values() if isinstance(type_, QuantizedType)]
        assert changed == [type_ for op in plan_of(fresh, other).ops for type_ in vars(op).values() if isinstance(type_, QuantizedType)]
        assert changed != [type_ for op in plan_of(model, one).ops for type_ in vars(op).values() if isinstance(type_, QuantizedType)]


def test_06_options_of_an_operation_change_after_the_first_call() -> None:
    norm = ops.LayerNorm(WIDTH)
    model = ops.Sequential(norm, linear())
    before = step(model, batch(), RECIPES[1])
    norm.eps = 1.0
    after = step(model, batch(), RECIPES[1])
    assert same(after, step(ops.Sequential(*model), batch(), RECIPES[1])) and not same(after, before)
    with pytest.raises(ArgumentError, match="in_features .*: expected .*by which it was made"):
        model[1].in_features = 1


def test_06_a_fusion_is_there_for_a_scope_and_by_priority() -> None:
    asked: list[str] = []

    def watcher(name: str) -> Any:
        def fusion(given: list[Any], *, recipe: Any) -> list[Any]:
            asked.append(name)
            return given

        return fusion

    model = ops.Sequential(linear())
    model(batch())
    low, high = watcher("low"), watcher("high")
    with ops.register_forward_fusion(low), ops.register_forward_fusion(high, priority=1):
        model(batch())
    model(batch())
    assert asked == ["high", "low"]
    ops.register_backward_fusion(low)
    ops.unregister_fusion(low)
    model(batch())
    assert asked == ["high", "low"]


def test_07_a_model_made_on_the_meta_device_trains() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH, device="meta"), linear(device="meta"), ops.GELU(), linear(device="meta"))
    for recipe in (RECIPES[2], RECIPES[0]):
        got = step(model, batch(), recipe)
        assert len(got) == 2 + 6 and all(value.isfinite().all() and value.device.type == "cpu" for value in got)
    assert all(not parameter.is_meta for parameter in model.parameters()) and model[1].weight is model[1].basic_ops[0].weight


def test_07_a_replaced_parameter_or_module_is_used() -> None:
    model = ops.Sequential(linear(), ops.GELU())
    model(batch())
    other = linear()
    model[0].basic_ops[0].weight, model[0].basic_ops[1].bias = other.basic_ops[0].weight, other.basic_ops[1].bias
    wanted = ops.Sequential(other, ops.GELU())(batch())
    assert torch.equal(model(batch()), wanted)
    model[0] = linear()
    assert not torch.equal(model(batch()), wanted)


def test_07_a_linears_own_names_can_be_assigned() -> None:
    model, other = ops.Sequential(linear(), ops.GELU()), linear()
    model(batch())
    model[0].weight, model[0].bias = other.weight, other.bias
    assert torch.equal(model(batch()), ops.Sequential(other, ops.GELU())(batch()))
    assert [name for name, _ in model[0].named_parameters()] == ["basic_ops.0.weight", "basic_ops.1.bias"]


@every_recipe
def test_08_no_dgrad_for_the_first_layer(recipe: fusible.Recipe) -> None:
    model = ops.Sequential(linear(), ops.GELU(), linear())
    for x, products in ((batch(), 5), (batch().requires_grad_(), 6)):
        with fusible.autocast(recipe=recipe), tex.record() as calls:
            model(x).sum().backward()
        assert calls_of("generic_gemm", calls) == products


def test_09_hooks_fire_on_an_operation_inside() -> None:
    model, seen = ops.Sequential(linear(), ops.GELU(), linear()), []
    wanted = step(model, batch(), RECIPES[1])
    handles = [
        model[1].register_forward_hook(lambda module, args, y: seen.append("forward")),
        model[1].register_full_backward_hook(lambda module, dx, dy: seen.append("backward")),
    ]
    got = step(model, batch(), RECIPES[1])
    assert seen == ["forward", "backward"] and len(model._arranged()) == 3 and torch.equal(got[0], wanted[0])
    for handle in handles:
        handle.remove()
    assert same(step(model, batch(), RECIPES[1]), wanted) and len(seen) == 2


def test_10_an_operation_called_alone_keeps_its_plan_and_its_channels() -> None:
    op = ops.MakeExtraOutput()
    for _ in range(3):
        op(batch())
    assert op._fuser().pipeline.plans_built == 1
    add = ops.AddExtraInput()
    op.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    assert torch.equal(ops.Sequential(op, add)(batch()), batch() + batch())
    op.set_extra_output_channel(0, None)
    assert len(op(batch())) == 2


def test_10_one_module_at_two_places() -> None:
    twice = linear()
    got = step(ops.Sequential(twice, ops.GELU(), twice), batch(), None)
    reference = batch().requires_grad_()
    y = twice(nn.functional.gelu(twice(reference), approximate="tanh"))
    y.square().sum().backward()
    wanted = [y, reference.grad, *(parameter.grad for parameter in twice.parameters())]
    # Sums of 64 products of magnitude below 64, in another order.
    assert all(torch.allclose(a, b, rtol=64 * 2**-23, atol=64 * 64 * 2**-23) for a, b in zip(got, wanted, strict=True))


def test_the_page_names_tests_that_exist_and_blocks_of_under_forty_lines() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "ops.md").read_text()
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("test_ops_limitations*.py"))
    named = set(re.findall(r"`(test_\d\w+)`", page))
    assert len(named) > 20 and not [name for name in named if f"def {name}(" not in written]
    assert not [name for name in re.findall(r"def (test_\d\w+)", written) if name not in named and "a_hint_ends" not in name]
    section = page[page.index("## 2.") : page.index("## 3.")]
    assert all(block.count("\n") < 40 for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL))
