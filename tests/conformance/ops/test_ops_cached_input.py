"""Activations that keep their input in 8 bits: forward is that of the others, backward the exact gradient at what was kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops_interchange import Case, Mode, cases, modes_of, prove
from ops_table import RECORD_OF
from ops_tolerance import assert_close
from test_ops_fp8 import own_scale, quantized

from fusible import fusions, nvte, ops
from fusible.nvte import DType, Tensor, make_nvte_tensor
from fusible.ops import MMT, Activation, Add

NAMES = "GELU ErfGELU QGELU ReLU SiLU SReLU GLU GeGLU ErfGeGLU QGeGLU ReGLU SReGLU SwiGLU SiTUGLU ClampedSwiGLU".split()
BLOCKS = {"glu_interleave_size": 3}
CHOICES = [*((name, {}) for name in NAMES), *((name, BLOCKS) for name in ("SwiGLU", "SiTUGLU", "ClampedSwiGLU"))]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def made(name: str, dtype: torch.dtype, **options: object) -> Activation:
    of = nvte.nvte_dtype(dtype)
    return getattr(ops, name)(**options, x_dtype=of, dy_dtype=of, y_dtype=of, dx_dtype=of)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("name", "options"), CHOICES, ids=str)
def test_backward_is_that_of_the_kept_input(name: str, options: dict[str, int], dtype: torch.dtype) -> None:
    """What was kept is, by ml_dtypes, x in E4M3 by its own scale; as a value of x's type it is the input of the gradient."""
    generator = torch.Generator().manual_seed(2)
    op, twin = made(name, dtype, cache_quantized_input=True, **options), made(name, dtype, **options)
    for shape in ((13, 12), (2, 3, 12), (0, 12)):
        x = make_nvte_tensor(torch.randn(*shape, generator=generator).to(dtype))
        y, ctx = op.forward(x)
        assert torch.equal(y.data, twin.forward(x)[0].data) and torch.equal(op.inference(x).data, y.data)
        assert set(ctx) == {"x"} and nvte.element(ctx["x"].type) is DType.Float8E4M3 and ctx["x"].data._data.element_size() == 1
        dy = make_nvte_tensor(torch.randn(*y.shape, generator=generator).to(dtype))
        dx, _ = op.backward(ctx, dy)
        if not x.data.numel():
            continue
        kept = quantized(x.data, own_scale(x.data, "E4M3", False), "E4M3")
        assert_close("what was kept", nvte.dequantize(ctx["x"], DType.Float32).data, kept, torch.float32)
        assert torch.equal(dx.data, twin.backward({"x": make_nvte_tensor(kept.to(dtype))}, dy)[0].data)


BACKWARD = [case for case in cases() if case.fusion.kind == "backward" and any(issubclass(type_, Activation) for type_ in case.types)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("case", "mode"), [pytest.param(case, mode, id=f"{case.name}-{mode.name}") for case in BACKWARD for mode in modes_of(case)])
def test_fused_backwards_read_what_was_kept(case: Case, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    for type_ in case.types:
        if issubclass(type_, Activation):
            monkeypatch.setitem(RECORD_OF, type_, replace(RECORD_OF[type_], make=lambda p, w, type_=type_: [type_(cache_quantized_input=True)]))
    assert prove(case, mode)


def test_fused_forwards_keep_8_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    fp32 = DType.Float32
    types = {"x_dtype": fp32, "dy_dtype": fp32, "y_dtype": fp32, "dx_dtype": fp32}

    def random(*shape: int) -> Tensor:
        return make_nvte_tensor(torch.randn(*shape, generator=generator))

    gelu = made("GELU", torch.float32, cache_quantized_input=True)
    mmt, add = MMT(random(8, 5), weight_dtype=fp32, **types), Add(random(8), bias_dtype=fp32, **types)
    x = random(3, 5)
    for fused, members in (
        (fusions.mmt_gelu_fwd_fused, (mmt, gelu)),
        (fusions.mmt_add_gelu_fwd_fused, (mmt, add, gelu)),
        (fusions.mmt_gelu_add_fwd_fused, (mmt, gelu, add)),
        (fusions.mmt_add_gelu_add_fwd_fused, (mmt, add, gelu, add)),
    ):
        y, contexts = fused(*members, x)
        plain, plain_contexts = fused(*(op.with_(cache_quantized_input=False) if op is gelu else op for op in members), x)
        place = members.index(gelu)
        kept = nvte.cast(plain_contexts[place]["x"], DType.Float8E4M3)
        assert torch.equal(y.data, plain.data) and torch.equal(contexts[place]["x"].data._data, kept.data._data)
