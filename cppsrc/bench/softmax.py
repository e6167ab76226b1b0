"""Times the native softmax beside plain torch, alternating in one process: ``python cppsrc/bench/softmax.py [heads] [queries] [keys]``.

Prints the median of each in milliseconds and the ratio.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from timing import medians

from fusible import cpp_extensions, tex

Pair = tuple[Callable[[], object], Callable[[], object]]


def pairs(heads: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, Pair]:
    """What plain torch does and what the native call does, by name."""
    x, g = torch.randn(2, 1, heads, queries, keys).to(dtype)
    mask = torch.randint(0, 2, (1, 1, queries, keys), dtype=torch.uint8)
    above = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    masked = mask == 1
    y = tex.scaled_aligned_causal_masked_softmax_forward(x, 0.125)

    def softmax(hidden: torch.Tensor | None, fill: float) -> torch.Tensor:
        scores = x.float() * 0.125
        return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, fill), -1).to(dtype)

    def gradient() -> torch.Tensor:
        wide, p = g.float(), y.float()
        return (0.125 * p * (wide - (p * wide).sum(-1, keepdim=True))).to(dtype)

    return {
        "scaled": (lambda: softmax(None, 0), lambda: tex.scaled_softmax_forward(x, 0.125)),
        "masked": (lambda: softmax(masked, -10000.0), lambda: tex.scaled_masked_softmax_forward(x, mask, 0.125)),
        "causal": (lambda: softmax(above, -torch.inf), lambda: tex.scaled_aligned_causal_masked_softmax_forward(x, 0.125)),
        "backward": (gradient, lambda: tex.scaled_softmax_backward(g, y, 0.125)),
        "causal backward": (gradient, lambda: tex.scaled_aligned_causal_masked_softmax_backward(g, y, 0.125)),
    }


def main() -> None:
    heads, queries, keys = (int(text) for text in (sys.argv[1:4] or ("4", "1024", "1024")))
    info = cpp_extensions.info()
    print(f"[1, {heads}, {queries}, {keys}], {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, (plain, native) in pairs(heads, queries, keys, dtype).items():
            torch_ms, native_ms = medians(plain, native)
            print(f"{dtype!s:16} {name:16} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.1f}x")


if __name__ == "__main__":
    main()
