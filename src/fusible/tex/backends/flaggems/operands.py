"""What FlagGems' kernels read."""

from __future__ import annotations

from typing import Any

import torch

from fusible.tex.interface.declare import Request

__all__ = ["FLOATING", "refused"]

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})


def refused(request: Request, floating: frozenset[Any] = FLOATING) -> str | None:
    """Why FlagGems' kernels refuse a request, for any function: an argument is quantized, or of a dtype that they do not read."""
    for name, kind in request.kinds:
        if name.endswith("quantizer"):
            if kind is not None:
                return f"gives unquantized results, and there is a {name}"
        elif isinstance(kind, tuple) and isinstance(kind[0], str):
            if len(kind) != 2:
                return f"reads unquantized tensors, and {name} is {kind[0]}"
            if kind[1] not in floating:
                return f"reads {', '.join(sorted(str(dtype)[6:] for dtype in floating))}, and {name} is {kind[1]}"
    return None
