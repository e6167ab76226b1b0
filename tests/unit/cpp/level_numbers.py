"""What the native kernels give at the level of this process (``FUSIBLE_CPU_LEVEL``), saved to the file that is named: fp32 results.

On Zen 4, between AVX-512 and AVX2: activations, RoPE, casts and Adam agree to the bit; of norms, softmax and attention 10 to 64 % of the results
differ, by at most 1.6e-7 of the largest. Between these and generic code, 0.3 to 80 % of all but casts, ReLU and sums of squares, by at most 2.2e-7.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from fusible import tex
from fusible.quantized import Float8Quantizer

LENGTHS = torch.tensor([0, 40, 80], dtype=torch.int32)


def activations() -> dict[str, torch.Tensor]:
    x, g, gated = torch.randn(64, 257) * 3, torch.randn(64, 257), torch.randn(64, 258) * 3
    found = {name: getattr(tex, name)(x, None) for name in ("gelu", "erf_gelu", "qgelu", "silu", "relu", "srelu")}
    found |= {f"d{name}": getattr(tex, f"d{name}")(g, x, None) for name in ("gelu", "qgelu", "silu", "relu", "srelu")}
    found["erf_dgelu"] = tex.erf_dgelu(g, x, None)
    return found | {name: getattr(tex, name)(gated, None) for name in ("swiglu", "geglu")}


def norms() -> dict[str, torch.Tensor]:
    x, g, w, b = torch.randn(64, 257) * 3, torch.randn(64, 257), torch.randn(257), torch.randn(257)
    y, mu, rsigma = tex.layernorm_fwd(x, w, b, 1e-5, None, None, torch.float32, 0, False)
    dx, dgamma, _ = tex.layernorm_bwd(g, x, mu, rsigma, w, 0, False)
    z, _, rms = tex.rmsnorm_fwd(x, w, 1e-5, None, None, torch.float32, 0, False)
    names = {"layernorm": y, "layernorm mu": mu, "layernorm rsigma": rsigma, "layernorm_bwd": dx, "layernorm dgamma": dgamma, "rmsnorm": z}
    return names | {"rmsnorm_bwd": tex.rmsnorm_bwd(g, x, rms, w, 0, False)[0]}


def attention() -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(2, 40, 2, 32) for _ in range(3))
    form, layout = tex.NVTE_QKV_Format.NVTE_BSHD, tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    kinds = tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK, tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    sizes, rest = (40, 40, True, 0.2, 0.0, True, layout, form, form, *kinds, [-1, -1], False, LENGTHS, LENGTHS), [None] * 9
    o, stats, *_ = tex.fused_attn_fwd(*sizes, q, k, v, torch.float32, *rest, 0, False, False)  # pyright: ignore[reportCallIssue]
    scores = torch.randn(2, 2, 33, 65) * 4
    return {"attention O": o, "attention Stats": stats, "softmax": tex.scaled_softmax_forward(scores, 0.7)}


def others() -> dict[str, torch.Tensor]:
    angles, x = torch.rand(33, 1, 1, 32) * 50, torch.randn(33, 2, 2, 64)
    found = {"rope": tex.fused_rope_forward(x, angles, None, tex.NVTE_QKV_Format.NVTE_SBHD, False, None, 1, 0)}
    quantizer = Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), tex.DType.kFloat8E4M3)
    cast = tex.quantize(torch.randn(48, 96), quantizer)
    found |= {"cast": cast._data.float(), "dequantize": tex.dequantize(cast, torch.float32)}
    flag, states = torch.zeros(1, dtype=torch.int32), [torch.randn(1000) for _ in range(4)]
    states[3].abs_()
    tex.multi_tensor_adam(1, flag, [[x] for x in states], 1e-2, 0.9, 0.99, 1e-8, 3, 1, 1, 0.1)
    found |= dict(zip(("adam p", "adam m", "adam v"), states[1:], strict=True))
    return found | {"l2norm": tex.multi_tensor_l2norm(1, flag, [[torch.randn(64, 257)]], False)[0]}


if __name__ == "__main__":
    torch.manual_seed(0)
    with tex.set_backend("cpu", strict=True):
        results = activations() | norms() | attention() | others()
    np.savez(sys.argv[1], **{name: x.detach().numpy() for name, x in results.items()})  # type: ignore[arg-type]
