"""Modules in fp64: what is served, by whom, and what is refused (their values and gradients: ``tests/sweeps``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible import tex
from fusible.errors import DTypeError, NotServedError
from fusible.pytorch import ops


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "z_loss": 0.3, "reduction": "sum"}, {"reduction": "none"}]
)
def test_the_loss(options: dict[str, Any]) -> None:
    target = torch.tensor([3, -100, 0, 6, 2])
    assert torch.autograd.gradcheck(lambda x: fusible.CrossEntropyLoss(**options)(x, target), (_x(5, 7),))


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "rope": {"rope_base": 1e4},
    "window": {"window_size": (2, 0)},
    "window both ways": {"window_size": (1, 2), "causal": False},
    "cap": {"soft_cap": 0.7},
    "alibi": {"alibi": True},
    "own slopes": {"alibi": [0.3, 0.7]},
    "all": {"rope_base": 1e4, "window_size": (3, 0), "soft_cap": 0.7, "alibi": [0.3, 0.7]},
}


@pytest.mark.parametrize("lengths", [None, (4, 2), (6,)])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_each_option(name: str, lengths: tuple[int, ...] | None) -> None:
    module = fusible.DotProductAttention(2, 4, groups=1, **OPTIONS[name])
    if lengths is None:
        assert torch.autograd.gradcheck(module, (_x(2, 3, 16),))
    else:
        assert torch.autograd.gradcheck(lambda x: module(x, torch.tensor(lengths)), (_x(6, 16),))


def test_attention_of_a_cache_is_that_of_the_whole() -> None:
    module, cache = fusible.DotProductAttention(2, 4, rope_base=1e4), fusible.KVCache(1, 32, dtype=torch.float64)
    x = _x(1, 6, 24).detach()
    with torch.no_grad():
        found = []
        for part in x.split([3, 1, 2], 1):
            found.append(module(part, cache=cache))
            cache.advance([part.shape[1]])
        torch.testing.assert_close(torch.cat(found, 1), module(x), rtol=1e-14, atol=1e-14)


def test_an_operation_of_the_callers_own() -> None:
    class Sine(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            ctx.save_for_backward(input_)
            return input_.sin()

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * ctx.saved_tensors[0].cos(), []

    assert torch.autograd.gradcheck(ops.Sequential(ops.Linear(4, 5, dtype=torch.float64), Sine()), (_x(3, 4),))


def test_a_compiled_module() -> None:
    module = torch.compile(fusible.Sequential(fusible.LayerNorm(4), fusible.Linear(4, 5)).double(), fullgraph=True, backend="aot_eager")
    with torch._functorch.config.patch(donated_buffer=False):  # which a graph that goes backward several times, as a check's, cannot have
        assert torch.autograd.gradcheck(module, (_x(3, 4),))


def test_torch_autocast_leaves_fp64_as_it_is() -> None:
    module, x = fusible.Linear(4, 4).double(), _x(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), module(x)) and module(x).dtype is torch.float64
    torch.testing.assert_close(module(x), torch.nn.functional.linear(x, module.weight, module.bias), rtol=1e-14, atol=1e-14)


QUANTIZING = (fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling(), fusible.NVFP4BlockScaling())


@pytest.mark.parametrize("recipe", QUANTIZING, ids=lambda recipe: type(recipe).__name__)
def test_what_would_be_quantized_is_refused(recipe: Any) -> None:
    module, x = fusible.Linear(32, 32).double(), _x(32, 32)
    wanted = r"the input of MMT\(32 -> 32\) with operands in 8 bits of Linear: expected fp32, fp16 or bf16, got fp64; call it outside the autocast"
    with fusible.autocast(recipe=recipe):
        with pytest.raises(DTypeError, match=f"^{wanted}"):
            module(x)
        assert fusible.LayerNorm(32).double()(x).dtype is torch.float64  # nothing of it would be
    assert module(x).dtype is torch.float64


def test_weights_in_8_bits_are_refused() -> None:
    with fusible.quantized_model_init(recipe=fusible.Float8CurrentScaling()):
        module = fusible.Linear(32, 32)
    with pytest.raises(DTypeError, match="with operands in 8 bits of Linear: expected .*, got fp64"):
        module.double()(_x(32, 32))


def test_high_precision_is_that_of_the_input_or_refused() -> None:
    module, x = fusible.Linear(4, 4).double(), _x(3, 4)
    with fusible.autocast(recipe=fusible.HighPrecision()):
        assert torch.equal(module(x), module(x)) and module(x).dtype is torch.float64
    with fusible.autocast(recipe=fusible.HighPrecision("bfloat16")), pytest.raises(DTypeError, match=r"under HighPrecision\(lowest='bfloat16'\)"):
        module(x)


def test_other_dtypes_beside_it_are_refused() -> None:
    x = _x(3, 4)
    with pytest.raises(DTypeError, match=r"^the parameters of Linear: expected fp64, got float32; cast x, or call "):
        fusible.Linear(4, 4)(x)
    with pytest.raises(DTypeError, match=r"^the parameters of LayerNorm: expected no fp64 beside float32, that of x, got fp64; cast x"):
        fusible.LayerNorm(4).double()(x.float())


def test_compiled_programs_do_without() -> None:
    module = fusible.Sequential(fusible.Linear(4, 4)).double().compile(executor="xla")
    with pytest.raises(DTypeError, match=r"a compiled pass of Linear: expected .*, got float64; cast it, or use executor='eager'"):
        module(_x(3, 4))


def test_second_derivatives_stay_refused() -> None:
    with pytest.raises(NotServedError, match=r"expected create_graph=False"):
        torch.autograd.gradgradcheck(fusible.Linear(4, 4).double(), (_x(3, 4),))


def test_the_others_say_why_not() -> None:
    x = _x(3, 4).detach()
    for decision in (tex.explain("gelu", x, None), tex.explain("prim.add", x, x)):
        assert decision.backend == "torch"
        assert {"nvidia", "cpu", "xla"} <= dict(decision.others).keys()
    assert dict(tex.explain("gelu", x, None).others)["cpu"] == "reads float32, bfloat16 and float16, and input is torch.float64"


def test_nothing_is_quantized_from_fp64() -> None:
    x, quantizer = _x(4, 4).detach(), fusible.quantized.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3)
    with pytest.raises(NotServedError, match="torch: quantizes nothing beside float64, and input is float64 where quantizer is current"):
        tex.gelu(x, quantizer)
    with pytest.raises(NotServedError, match="torch: reads float64 beside float64 alone, and A is float64 where B is torch.float32"):
        tex.generic_gemm(x, True, x.float(), False, None, None, None, None, None, False, None, False, None, 0, False, True)
