"""Times the native casts beside plain torch, alternating in one process: ``python cppsrc/bench/casts.py [rows] [cols]``.

Prints, per input dtype, the median of each in milliseconds and the ratio. E4M3; buffers are allocated beforehand for the native calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from timing import medians

from fusible import cpp_extensions

E4M3 = torch.float8_e4m3fn


def pairs(rows: int, cols: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What plain torch does and what the native call does, by name."""
    x, scale = torch.randn(rows, cols).to(dtype), torch.tensor([3.0])
    codes, turned = torch.empty(rows, cols, dtype=torch.uint8), torch.empty(cols, rows, dtype=torch.uint8)
    largest, sums = torch.empty(1), torch.empty(cols)
    wide, half = torch.empty(rows, cols), torch.empty(rows, cols, dtype=torch.bfloat16)
    cpp_extensions.quantize(x, codes, scale, E4M3)

    def cast() -> torch.Tensor:
        return (x.float() * scale).clamp(-448, 448).to(E4M3)

    def transposed(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8).t().contiguous()

    native = cpp_extensions
    return {
        "amax": (lambda: x.abs().amax(), lambda: native.amax(x, largest)),
        "quantize": (cast, lambda: native.quantize(x, codes, scale, E4M3)),
        "quantize + amax": (lambda: (cast(), x.abs().amax()), lambda: native.quantize(x, codes, scale, E4M3, None, largest)),
        "... + transpose": (lambda: (transposed(cast()), x.abs().amax()), lambda: native.quantize(x, codes, scale, E4M3, turned, largest)),
        "... + bias gradient": (
            lambda: (transposed(cast()), x.abs().amax(), x.float().sum(0)),
            lambda: native.quantize(x, codes, scale, E4M3, turned, largest, False, sums),
        ),
        "dequantize to float32": (lambda: codes.view(E4M3).float() * scale, lambda: native.dequantize(codes, wide, scale, E4M3)),
        "dequantize to bfloat16": (
            lambda: (codes.view(E4M3).float() * scale).bfloat16(),
            lambda: native.dequantize(codes, half, scale, E4M3),
        ),
        "transpose bytes": (lambda: transposed(codes), lambda: native.transpose_bytes(codes, turned)),
    }


def main() -> None:
    rows, cols = (int(text) for text in (sys.argv[1:3] or ("4096", "1024")))
    info = cpp_extensions.info()
    print(f"[{rows}, {cols}], {info['threads']} threads, {info['level']}, torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, (plain, native) in pairs(rows, cols, dtype).items():
            torch_ms, native_ms = medians(plain, native)
            print(f"{dtype!s:16} {name:24} torch {torch_ms:8.3f} ms   native {native_ms:8.3f} ms   {torch_ms / native_ms:6.1f}x")


if __name__ == "__main__":
    main()
