"""Times the native norms beside plain torch, alternating in one process: ``python cppsrc/bench/norm.py [rows] [cols]``.

Prints, per input dtype, the median of each in milliseconds and the ratio. Parameters are float32 or the input's dtype, as torch takes them; FP8 is
E4M3 by a scale known beforehand; buffers are allocated beforehand for the native calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from casts import E4M3
from timing import medians
from torch import Tensor

from fusible import cpp_extensions as native

EPS = 1e-5
aten = torch.ops.aten
Pair = tuple[Callable[[], object], Callable[[], object]]


def rms(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rsigma = (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x.float() * rsigma * weight, rsigma


def rms_backward(dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dz, xh = dz.float(), x.float() * rsigma
    dy = dz * weight
    return (rsigma * (dy - xh * (dy * xh).mean(-1, keepdim=True))).to(x.dtype), (dz * xh).sum(0)


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Pair]:
    rows, cols = x.shape
    scale, largest, mu, rsigma = torch.tensor([3.0]), torch.empty(1), torch.empty(rows), torch.empty(rows)
    codes, turned, y = torch.empty(rows, cols, dtype=torch.uint8), torch.empty(cols, rows, dtype=torch.uint8), torch.empty_like(x)
    w, b = weight.to(x.dtype), bias.to(x.dtype)

    def cast(y: Tensor) -> Tensor:
        return (y.float() * scale).clamp(-448, 448).to(E4M3)

    def to_fp8(centered: bool, transposed: Tensor | None = None, amax: Tensor | None = None) -> None:
        mean, shift = (mu, bias) if centered else (None, None)
        native.norm_fwd(x, weight, shift, mean, rsigma, EPS, False, codes, E4M3, transposed, scale, amax)

    def turn(codes: Tensor) -> Tensor:
        return codes.view(torch.uint8).t().contiguous()

    def layer() -> Tensor:
        return aten.native_layer_norm(x, (cols,), w, b, EPS)[0]

    return {
        "layernorm": (layer, lambda: native.norm_fwd(x, w, b, mu, rsigma, EPS, False, y, x.dtype)),
        "layernorm -> fp8": (lambda: cast(layer()), lambda: to_fp8(True)),
        "... + amax + transpose": (lambda: (turn(cast(y := layer())), y.abs().amax()), lambda: to_fp8(True, turned, largest)),
        "rmsnorm": (lambda: rms(x, weight)[0].to(x.dtype), lambda: native.norm_fwd(x, weight, None, None, rsigma, EPS, False, y, x.dtype)),
        "rmsnorm (fused in torch)": (
            lambda: torch.nn.functional.rms_norm(x, (cols,), w, EPS),
            lambda: native.norm_fwd(x, weight, None, None, rsigma, EPS, False, y, x.dtype),
        ),
        "rmsnorm -> fp8": (lambda: cast(rms(x, weight)[0]), lambda: to_fp8(False)),
        "... + amax + transpose ": (lambda: (turn(cast(y := rms(x, weight)[0])), y.abs().amax()), lambda: to_fp8(False, turned, largest)),
    }


def backward(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Pair]:
    cols = x.shape[1]
    dz, add, dx = torch.randn_like(x), torch.randn_like(x), torch.empty_like(x)
    w, b = weight.to(x.dtype), bias.to(x.dtype)
    dgamma, dbeta = torch.empty_like(w), torch.empty_like(w)
    _, mean, rstd = aten.native_layer_norm(x, (cols,), w, b, EPS)
    mu, rs = mean.float().view(-1), rstd.float().view(-1)
    r = rms(x, weight)[1]

    def layer() -> object:
        return aten.native_layer_norm_backward(dz, x, (cols,), mean, rstd, w, b, [True, True, True])

    def rms_add() -> Tensor:
        return (rms_backward(dz, x, r, weight)[0].float() + add.float()).to(x.dtype)

    return {
        "layernorm backward": (layer, lambda: native.norm_bwd(dz, x, mu, rs, w, False, dx, dgamma, dbeta)),
        "rmsnorm backward": (lambda: rms_backward(dz, x, r, weight), lambda: native.norm_bwd(dz, x, None, rs, weight, False, dx, dgamma)),
        "... + add": (rms_add, lambda: native.norm_bwd(dz, x, None, rs, weight, False, dx, dgamma, None, add)),
    }


def main() -> None:
    rows, cols = (int(text) for text in (sys.argv[1:3] or ("4096", "1024")))
    info = native.info()
    print(f"[{rows}, {cols}], {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    weight, bias = torch.randn(cols), torch.randn(cols)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, cols).to(dtype)
        for name, (plain, ours) in {**forward(x, weight, bias), **backward(x, weight, bias)}.items():
            torch_ms, native_ms = medians(plain, ours)
            print(f"{dtype!s:16} {name:24} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.1f}x")


if __name__ == "__main__":
    main()
