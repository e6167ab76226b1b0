"""Times the native rotary embedding beside plain torch, alternating in one process: ``python cppsrc/bench/rope.py [tokens] [heads] [width]``.

One sequence of a packed ``[1, tokens, 3, heads, width]``, of which q is rotated; prints the median of each in milliseconds and the ratio.
"""

from __future__ import annotations

import sys

import torch
from timing import medians
from torch import Tensor

from fusible import cpp_extensions, tex

BSHD = tex.NVTE_QKV_Format.NVTE_BSHD


def composed(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """What a model written in torch does."""
    angles = freqs[: x.shape[1]].reshape(1, x.shape[1], 1, -1)
    wide = x.float()
    if interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        low, high = wide.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
    return (wide * angles.cos() + turned * angles.sin()).to(x.dtype)


def main() -> None:
    tokens, heads, width = (int(text) for text in (sys.argv[1:4] or ("2048", "16", "128")))
    info = cpp_extensions.info()
    print(f"[1, {tokens}, {heads}, {width}], {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    freqs = tex.prim.rope_angles(tokens, width, 10000.0, torch.zeros(1))
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(1, tokens, 3, heads, width).to(dtype)
        for name, x in {"contiguous": packed[:, :, 0].contiguous(), "cut from qkv": packed[:, :, 0]}.items():
            for interleaved in (False, True):
                torch_ms, native_ms = medians(
                    lambda x=x, pairs=interleaved: composed(x, freqs, pairs),
                    lambda x=x, pairs=interleaved: tex.fused_rope_forward(x, freqs, None, BSHD, pairs, None, 1, 0),
                )
                label = f"{name}, {'interleaved' if interleaved else 'halves'}"
                print(f"{dtype!s:16} {label:24} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.1f}x")


if __name__ == "__main__":
    main()
