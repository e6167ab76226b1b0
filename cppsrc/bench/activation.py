"""Times the native activations beside plain torch, alternating in one process: ``python cppsrc/bench/activation.py [rows] [cols]``.

Prints, per function, the median of each in milliseconds and the ratio. bfloat16 inputs. Results in bfloat16 go to buffers allocated beforehand
on both sides; those in FP8 (delayed scaling, E5M2) are what a call of tex gives, beside torch's steps, both with their allocations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from timing import medians

from fusible import cpp_extensions, tex
from fusible.quantized import Float8Quantizer

BF16, E5M2 = torch.bfloat16, torch.float8_e5m2
Pair = tuple[Callable[[], object], Callable[[], object]]


def to_bfloat16(x: torch.Tensor, g: torch.Tensor) -> dict[str, Pair]:
    """Torch's own fused kernels, and the native ones."""
    aten, native = torch.ops.aten, cpp_extensions
    theirs, ours = torch.empty_like(x), torch.empty_like(x)
    half, pair = torch.empty(x.shape[0], x.shape[1] // 2, dtype=BF16), torch.empty_like(x)
    a, b = x.chunk(2, -1)
    gh = g[:, : x.shape[1] // 2].contiguous()

    def dswiglu() -> None:
        aten.silu_backward.grad_input(gh * b, a, grad_input=pair[:, : a.shape[1]])
        torch.mul(torch.nn.functional.silu(a), gh, out=pair[:, a.shape[1] :])

    return {
        "gelu": (lambda: aten.gelu.out(x, approximate="tanh", out=theirs), lambda: native.activation("gelu", x, ours, BF16)),
        "silu": (lambda: aten.silu.out(x, out=theirs), lambda: native.activation("silu", x, ours, BF16)),
        "relu": (lambda: torch.clamp_min(x, 0, out=theirs), lambda: native.activation("relu", x, ours, BF16)),
        "dgelu": (
            lambda: aten.gelu_backward.grad_input(g, x, approximate="tanh", grad_input=theirs),
            lambda: native.activation_backward("gelu", g, x, ours, BF16),
        ),
        "dsilu": (lambda: aten.silu_backward.grad_input(g, x, grad_input=theirs), lambda: native.activation_backward("silu", g, x, ours, BF16)),
        "swiglu": (lambda: torch.nn.functional.silu(a).mul_(b), lambda: native.gated_activation("swiglu", x, half, BF16)),
        "dswiglu": (dswiglu, lambda: native.gated_activation_backward("swiglu", gh, x, pair, BF16)),
    }


def to_float8(x: torch.Tensor, g: torch.Tensor) -> dict[str, Pair]:
    """Torch's steps in bfloat16 and their cast, and a call of tex."""
    aten, scale = torch.ops.aten, torch.tensor([3.0])
    data = Float8Quantizer(scale, torch.zeros(1), tex.DType.kFloat8E5M2, rowwise=True, columnwise=False)
    both = Float8Quantizer(scale, torch.zeros(1), tex.DType.kFloat8E5M2)

    def cast(y: torch.Tensor) -> torch.Tensor:
        return (y.float() * scale).clamp(-57344, 57344).to(E5M2)

    def swiglu() -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return cast(torch.nn.functional.silu(a).mul_(b))

    def dbias_dgelu() -> tuple[torch.Tensor, torch.Tensor]:
        dx = aten.gelu_backward(g, x, approximate="tanh")
        return cast(dx), dx.sum(0)

    def turned() -> tuple[torch.Tensor, ...]:
        codes, bias_grad = dbias_dgelu()
        return codes, bias_grad, codes.view(torch.uint8).t().contiguous()

    return {
        "gelu to FP8": (lambda: cast(aten.gelu(x, approximate="tanh")), lambda: tex.gelu(x, data)),
        "swiglu to FP8": (swiglu, lambda: tex.swiglu(x, data)),
        "dgelu to FP8": (lambda: cast(aten.gelu_backward(g, x, approximate="tanh")), lambda: tex.dgelu(g, x, data)),
        "dbias_dgelu to FP8": (dbias_dgelu, lambda: tex.dbias_dgelu(g, x, data)),
        "... + transpose": (turned, lambda: tex.dbias_dgelu(g, x, both)),
    }


def main() -> None:
    rows, cols = (int(text) for text in (sys.argv[1:3] or ("4096", "4096")))
    info = cpp_extensions.info()
    print(f"[{rows}, {cols}], {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    x, g = torch.randn(rows, cols).to(BF16), torch.randn(rows, cols).to(BF16)
    with tex.set_backend("cpu"):
        for name, (plain, native) in (to_bfloat16(x, g) | to_float8(x, g)).items():
            torch_ms, native_ms = medians(plain, native)
            print(f"{name:20} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.2f}x")


if __name__ == "__main__":
    main()
