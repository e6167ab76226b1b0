"""Any number of rows and columns under recipes whose blocks are whole: exactly what the same tensors with zeros behind them give, cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusible import (
    GELU,
    CustomRecipe,
    Float8BlockScaling,
    KVCache,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Residual,
    RMSNorm,
    Sequential,
    SwiGLU,
    autocast,
)
from fusible.errors import ShapeError
from fusible.pytorch import ops
from fusible.quantized import Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer, QuantizerRole
from fusible.tex import DType

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()


def hybrid(rows: Callable[[], Any], columns: Callable[[], Any]) -> CustomRecipe:
    """Each operand in one format where it is read along its rows, and in another along its columns."""

    def factory(role: QuantizerRole) -> HybridQuantizer | None:
        asked = role.tensor_type in ("input", "weight", "grad_output")
        return HybridQuantizer(rowwise_quantizer=rows(), columnwise_quantizer=columns()) if asked else None

    return CustomRecipe(qfactory=factory)


def in_mxfp8() -> MXFP8Quantizer:
    return MXFP8Quantizer(DType.kFloat8E4M3)


def in_current() -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3)


RECIPES = [
    pytest.param(MXFP8, 32, id="mxfp8"),
    pytest.param(MXFP8BlockScaling(enable_2d_quantization=True), 32, id="mxfp8 tiles"),
    pytest.param(hybrid(in_mxfp8, NVFP4Quantizer), 32, id="mxfp8 by rows, nvfp4 by columns"),
    pytest.param(hybrid(NVFP4Quantizer, in_current), 16, id="nvfp4 by rows, one scale by columns"),
    pytest.param(hybrid(in_current, in_mxfp8), 32, id="one scale by rows, mxfp8 by columns"),
    pytest.param(NVFP4, 16, id="nvfp4"),
    pytest.param(NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", disable_stochastic_rounding=True), 16, id="nvfp4 4over6"),
    pytest.param(NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True, disable_2d_quantization=True), 16, id="nvfp4 rows"),
]
# Without a bias that would make something of rows of zeros: behind rows that are computed, each quantization here has zeros again.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Sequential(Linear(64, 96)),
    "a norm before": lambda: Sequential(LayerNorm(64), Linear(64, 96)),
    "GELU between": lambda: Sequential(Linear(64, 128, bias=False), GELU(), Linear(128, 64)),
    "a gate between": lambda: Sequential(RMSNorm(64), Linear(64, 128, bias=False), SwiGLU(), Linear(64, 64, bias=False)),
    "one after another": lambda: Sequential(Linear(64, 128, bias=False), Linear(128, 64, bias=False)),
    "ops": lambda: ops.Sequential(ops.Linear(64, 128, bias=False), ops.ReLU(), ops.Linear(128, 64)),
}


def given(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    model: nn.Module, x: Tensor, recipe: Recipe | None, changed: Callable[[Tensor], Tensor] = lambda x: x, rows: int | None = None
) -> list[Tensor]:
    """y, dx and the gradients of the parameters; of ``changed(x)``, and of the first ``rows`` of its output."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)  # stochastic rounding
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = model(changed(leaf))[:rows]
    y.backward(given(*y.shape, dtype=y.dtype, seed=4))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), leaf.grad, *grads]  # type: ignore[list-item]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (13, torch.bfloat16), (33, torch.float32)], ids=str)
@pytest.mark.parametrize(("recipe", "block"), RECIPES)
def test_rows_that_are_no_whole_blocks_are_padded(recipe: Recipe, block: int, rows: int, dtype: torch.dtype) -> None:
    """Forward, dgrad and wgrad, twice over, so that passes are replayed; and inference."""
    x = given(rows, 64, dtype=dtype)
    for make in MODELS.values():
        torch.manual_seed(1)
        model = make().to(dtype)
        wanted = run(model, x, recipe, lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % block)), rows)
        for _ in range(2):
            assert equal(run(model, x, recipe), wanted)
        with torch.no_grad(), autocast(recipe=recipe):
            assert torch.equal(model(x), wanted[0])


class Widened(nn.Module):
    """The layers of a model with zeros behind the columns and rows of each weight, called on x with zeros behind its columns and its rows."""

    def __init__(self, layers: list[Any], block: int, between: nn.Module) -> None:
        super().__init__()
        self.block, self.between, self.layers = block, between, layers

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            weight, bias = layer.weight, layer.bias
            whole = Linear(weight.shape[1] + -weight.shape[1] % self.block, weight.shape[0] + -weight.shape[0] % self.block)
            rows = x.shape[0]
            x = F.pad(x, (0, -x.shape[1] % self.block, 0, -rows % self.block))
            wide = F.pad(weight, (0, -weight.shape[1] % self.block, 0, -weight.shape[0] % self.block))
            y = torch.func.functional_call(whole, {"weight": wide, "bias": F.pad(bias, (0, -bias.shape[0] % self.block))}, (x,))
            x = y[:rows, : weight.shape[0]]
            x = self.between(x) if i + 1 < len(self.layers) else x
        return x


@pytest.mark.parametrize("between", [GELU, nn.Tanh])
@pytest.mark.parametrize(("recipe", "block"), RECIPES[:5])
def test_widths_that_are_no_whole_blocks_are_padded(recipe: Recipe, block: int, between: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    first, second = Linear(40, 72), Linear(72, 10)
    model = Sequential(first, between(), second)
    for rows in (1, 13, 32):
        x = given(rows, 40)
        got = run(model, x, recipe)
        leaf = x.clone().requires_grad_()
        for parameter in model.parameters():
            parameter.grad = None
        with autocast(recipe=recipe):
            y = Widened([first, second], block, between())(leaf)
        y.backward(given(*y.shape, seed=4))
        wanted = [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize(
    ("recipe", "step"),
    # Half a step of E4M3 and of E2M1 for each of two operands; block scales of NVFP4 are rounded to E4M3 too.
    [(MXFP8, 2.0**-4), (NVFP4, 2.0**-2 + 2.0**-4), (Float8BlockScaling(), 2.0**-4)],
    ids=["mxfp8", "nvfp4", "block"],
)
@pytest.mark.parametrize("width", [8, 16, 40, 64])
@pytest.mark.parametrize("rows", [1, 13, 17])
def test_values_are_within_the_formats_bound_of_float64(rows: int, width: int, recipe: Recipe, step: float) -> None:
    torch.manual_seed(1)
    model, x = Linear(width, width + 2), given(rows, width)
    plain = nn.Linear(width, width + 2).double()
    plain.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for a, b in zip(run(model, x, recipe), run(plain, x.double(), None), strict=True):
        assert (a.double() - b).norm() <= 2 * step * b.norm()


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_prompts_and_single_tokens_with_a_cache(recipe: Recipe) -> None:
    torch.manual_seed(1)
    attention = MultiHeadedSelfAttention(32, 2, rope_base=10000.0)
    model = Sequential(
        Residual(LayerNorm(32), Linear(32, 96), attention, Linear(32, 32)), Residual(RMSNorm(32), Linear(32, 40), GELU(), Linear(40, 32))
    )
    x = given(2, 13, 32)
    with torch.no_grad(), autocast(recipe=recipe):
        whole = model(x)
        cache = KVCache(2, 13, dtype=torch.float32)
        parts = []
        for tokens in x.split([6, 1, 1, 1, 1, 1, 1, 1], dim=1):
            parts.append(model(tokens, cache=cache))
            cache.advance([tokens.shape[1]] * 2)
    # A tensor of NVFP4 has one amax, which is another for each part.
    bound = 0.02 if recipe is MXFP8 else 0.3
    assert (torch.cat(parts, 1) - whole).norm() <= bound * whole.norm()


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=["mxfp8", "nvfp4"])
def test_every_form_of_input_and_executor_agrees(recipe: Recipe) -> None:
    torch.manual_seed(1)
    model = ops.Sequential(ops.LayerNorm(24), ops.Linear(24, 40), ops.GELU(), ops.Linear(40, 24))
    x = given(3, 1, 5, 24)
    flat = run(model, x.reshape(15, 24), recipe)
    y, dx, *grads = run(model, x, recipe)
    assert equal([y.reshape(15, 24), dx.reshape(15, 24), *grads], flat)
    compiled = run(model.compile("xla"), x.reshape(15, 24), recipe)
    for a, b in zip(compiled, flat, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()  # an element may fall to the other side of a tie


def test_gradients_are_added_up_where_they_are_wanted() -> None:
    model, x = ops.Sequential(ops.Linear(40, 24, accumulate_into_main_grad=True)), given(13, 40)
    weight = model[0].weight
    weight.main_grad = torch.ones_like(weight)
    got = run(model, x, MXFP8)
    alone = ops.Sequential(ops.Linear(40, 24))
    alone.load_state_dict(model.state_dict())
    wanted = run(alone, x, MXFP8)
    torch.testing.assert_close(weight.main_grad, 1 + wanted[2])
    assert torch.equal(got[1], wanted[1])


def test_two_formats_in_one_product() -> None:
    def by_role(role: Any) -> Any:
        if role is None or role.module_type != "linear":
            return None
        gradient = role.tensor_type.startswith("grad")
        return Float8CurrentScalingQuantizer(DType.kFloat8E5M2) if gradient else MXFP8Quantizer(DType.kFloat8E4M3)

    torch.manual_seed(1)
    model, x = Sequential(Linear(64, 96), GELU(), Linear(96, 64)), given(13, 64)
    wanted = run(model, x, CustomRecipe(by_role), lambda x: F.pad(x, (0, 0, 0, 19)), 13)
    for a, b in zip(run(model, x, CustomRecipe(by_role)), wanted, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


class Doubled(ops.BasicOperation):
    """In plain torch; asks for its input in 8 bits, and hands on what it is asked for."""

    def num_quantizers(self, mode: str) -> int:
        return 1

    def op_forward(self, ctx: Any, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any) -> Any:
        assert input_.shape == (13, 64)
        return 2 * ops.maybe_dequantize(input_)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        assert grad_output.shape == (13, 64)
        return 2 * ops.maybe_dequantize(grad_output), ()


def test_code_of_others_sees_no_padding() -> None:
    torch.manual_seed(1)
    model, x = ops.Sequential(ops.LayerNorm(64), Doubled(), ops.Linear(64, 64)), given(13, 64)
    plain = nn.LayerNorm(64)
    wanted = 2 * plain(x) @ model[2].weight.T + model[2].bias
    assert (run(model, x, MXFP8)[0] - wanted).norm() <= 3 * 2.0**-4 * wanted.norm()


def test_a_result_in_8_bits_is_whole_blocks() -> None:
    model = ops.Sequential(ops.Linear(64, 64), ops.Quantize(forward=True))
    with autocast(recipe=MXFP8):
        assert model(given(32, 64)).shape == (32, 64)
        with pytest.raises(ShapeError, match=r"^a quantized output of Linear -> Quantize: expected whole blocks, got \[13, 64\]; .*\.$"):
            model(given(13, 64))
