"""Times the native optimizer kernels beside torch, alternating in one process: ``python cppsrc/bench/optimizer.py [tensors] [millions]``.

A list of tensors of equal and small sizes, as a model has them; prints the median of each in milliseconds, the ratio, and bytes a second.
"""

from __future__ import annotations

import sys

import torch
from timing import medians
from torch import Tensor

from fusible import cpp_extensions, tex

STEP = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "step": 5, "mode": 1, "bias_correction": 1, "weight_decay": 0.01}


def parameters(tensors: int, millions: float) -> list[Tensor]:
    """Four vectors beside every two matrices, which share the rest."""
    width = 512
    rows = int(millions * 1e6 / width / (tensors / 3))
    return [torch.randn(rows, width) if i % 3 == 0 else torch.randn(width) for i in range(tensors)]


def main() -> None:
    tensors, millions = int((sys.argv[1:2] or ["150"])[0]), float((sys.argv[2:3] or ["25"])[0])
    info = cpp_extensions.info()
    p = parameters(tensors, millions)
    count = sum(x.numel() for x in p)
    print(f"{len(p)} tensors, {count / 1e6:.1f} million elements, {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    theirs = [torch.nn.Parameter(x.clone()) for x in p]
    for x in theirs:
        x.grad = torch.randn_like(x)
    optimizer = torch.optim.AdamW(theirs, fused=True)
    g, m, v = [torch.randn_like(x) for x in p], [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p]
    outputs, flag = [torch.empty_like(x) for x in p], torch.zeros(1, dtype=torch.int32)
    half = [x.bfloat16() for x in p]
    cases = {
        "AdamW": (optimizer.step, lambda: tex.multi_tensor_adam(0, flag, [g, p, m, v], *STEP.values()), 28),
        "L2 norm": (lambda: torch.nn.utils.get_total_norm(p), lambda: tex.multi_tensor_l2norm(0, flag, [p], False), 4),
        "L2 norm, bfloat16": (lambda: torch.nn.utils.get_total_norm(half), lambda: tex.multi_tensor_l2norm(0, flag, [half], False), 2),
        "scale": (lambda: torch._foreach_mul(p, 0.5), lambda: tex.multi_tensor_scale(0, flag, [p, outputs], 0.5), 8),
        "copy, for its bandwidth": (lambda: torch._foreach_copy_(outputs, p), lambda: tex.multi_tensor_scale(0, flag, [p, outputs], 1.0), 8),
    }
    for name, (plain, native, bytes_each) in cases.items():
        torch_ms, native_ms = medians(plain, native)
        rate = bytes_each * count / native_ms / 1e6
        print(f"{name:24} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.2f}x   {rate:6.1f} GB/s")


if __name__ == "__main__":
    main()
