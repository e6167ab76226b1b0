"""The table ``producers``: what runs between matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import tex
from fusible.cli.bench.fp8 import BF16, E5M2, cast, delayed
from fusible.cli.bench.table import Case, Measured, Settings
from fusible.tex import DType, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["producers"]

_EPS = 1e-5


def producers(settings: Settings) -> Measured:
    """Norms and activations to FP8 by delayed scaling, beside torch's function and its cast; causal attention; AdamW over 150 tensors.

    Torch calculates in the dtype of its input.
    """
    groups = (_norms(settings.quick), _activations(settings.quick), _attention(settings.quick), _adam(settings.quick))
    return settings.measure_apart(itertools.chain(*groups))


def _norms(quick: bool) -> Iterator[Case]:
    rows, cols = (32, 64) if quick else (4096, 1024)
    for dtype, name, otype in ((torch.float32, "fp32", DType.kFloat32), (torch.bfloat16, "bf16", BF16)):
        x, gamma, beta = torch.randn(rows, cols).to(dtype), torch.randn(cols).to(dtype), torch.randn(cols).to(dtype)
        yield from _norms_of(x, gamma, beta, f"{name} [{rows}, {cols}], to FP8", otype)


def _norms_of(x: Tensor, gamma: Tensor, beta: Tensor, name: str, otype: DType) -> Iterator[Case]:
    scale, shape, nbytes = torch.tensor(3.0), gamma.shape, x.nbytes + x.numel()
    quantizer = delayed(scale)

    def layer() -> object:
        return tex.layernorm_fwd(x, gamma, beta, _EPS, None, quantizer, otype, 0, False)

    def root() -> object:
        return tex.rmsnorm_fwd(x, gamma, _EPS, None, quantizer, otype, 0, False)

    yield Case(f"LayerNorm, {name}", lambda: cast(F.layer_norm(x, shape, gamma, beta, _EPS), scale), layer, 4.0, nbytes=nbytes)
    yield Case(f"RMSNorm, {name}", lambda: cast(F.rms_norm(x, shape, gamma, _EPS), scale), root, nbytes=nbytes)


def _activations(quick: bool) -> Iterator[Case]:
    rows, cols = (32, 64) if quick else (4096, 4096)
    x, grad, scale = torch.randn(rows, cols).bfloat16(), torch.randn(rows, cols).bfloat16(), torch.tensor(3.0)
    left, right = x.chunk(2, -1)
    to_e4m3, to_e5m2 = delayed(scale), delayed(scale, E5M2)

    def dgelu() -> tuple[Tensor, Tensor]:
        dx = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        return dx.sum(0), cast(dx, scale, E5M2)

    name = f"bf16 [{rows}, {cols}], to FP8"
    nbytes = 2.0 * x.nbytes + x.numel()
    yield Case(f"GELU backward with bias gradient, {name}", dgelu, lambda: tex.dbias_dgelu(grad, x, to_e5m2), 4.0, nbytes=nbytes)
    yield Case(f"GELU, {name}", lambda: cast(F.gelu(x, approximate="tanh"), scale), lambda: tex.gelu(x, to_e4m3), nbytes=x.nbytes + x.numel())
    yield Case(f"SwiGLU, {name}", lambda: cast(F.silu(left) * right, scale), lambda: tex.swiglu(x, to_e4m3), nbytes=x.nbytes + x.numel() / 2)


def _attention(quick: bool) -> Iterator[Case]:
    b, s, h, d = (1, 32, 2, 16) if quick else (2, 2048, 16, 64)
    q, k, v, grad = (torch.randn(b, h, s, d).bfloat16() for _ in range(4))
    q_, k_, v_ = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    our_grad = grad.transpose(1, 2).contiguous()
    cu = torch.arange(0, (b + 1) * s, s, dtype=torch.int32)
    layout, format_, unset = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, NVTE_QKV_Format.NVTE_BSHD, NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    rules = (
        NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, [-1, -1], False
    )  # fmt: skip

    def forward() -> list[Any]:
        return tex.fused_attn_fwd(
            s, s, True, d**-0.5, 0.0, True, layout, format_, unset, *rules, cu, cu, q_, k_, v_, torch.bfloat16,
            None, None, None, None, None, None, None, None, None, 0, False, False,
        )  # fmt: skip

    output, *auxiliary = forward()

    def backward() -> list[Any]:
        return tex.fused_attn_bwd(
            s, s, d**-0.5, 0.0, True, layout, format_, format_, layout, unset, unset, *rules, True, cu, cu, q_, k_, v_, output, our_grad,
            torch.bfloat16, auxiliary, None, None, None, None, None, False,
        )  # fmt: skip

    leaves = [x.requires_grad_() for x in (q, k, v)]
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def plain_forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def plain_backward() -> object:
        return torch.autograd.grad(theirs, leaves, grad, retain_graph=True)

    products = 2.0 * b * h * s * s * d  # two products of half the scores
    name = f"attention, causal, bf16 b={b} s={s} h={h} d={d}"
    yield Case(f"{name}, forward", plain_forward, forward, flops=products, nbytes=4.0 * q.nbytes)
    yield Case(f"{name}, backward", plain_backward, backward, flops=2.5 * products, nbytes=8.0 * q.nbytes)


def _adam(quick: bool) -> Iterator[Case]:
    """Two vectors beside every matrix, as a model has them."""
    count, width, rows = (6, 16, 8) if quick else (150, 512, 976)
    values = [torch.randn(rows, width) if i % 3 == 0 else torch.randn(width) for i in range(count)]
    parameters = [torch.nn.Parameter(x.clone()) for x in values]
    grads = [torch.randn_like(x) for x in values]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer = torch.optim.AdamW(parameters, fused=True)
    lists = [grads, values, [torch.zeros_like(x) for x in values], [torch.zeros_like(x) for x in values]]
    flag, elements = torch.zeros(1, dtype=torch.int32), sum(x.numel() for x in values)

    def step() -> None:
        tex.multi_tensor_adam(0, flag, lists, 1e-3, 0.9, 0.999, 1e-8, 5, 1, 1, 0.01)

    name = f"AdamW, {count} tensors of {elements / 1e6:.0f} M fp32"
    yield Case(name, optimizer.step, step, nbytes=28.0 * elements)
