"""What tex's functions for mixtures of experts cost beside the torch calls that a user would write."""

from __future__ import annotations

from typing import Any

import torch

from fusible import tex
from fusible.cli.bench.timing import side_by_side
from fusible.tex import DType

__all__ = ["grouped_gemm", "router"]

BF16 = torch.bfloat16


EXPERTS, TOKENS, INNER, OUTER = 64, 4096, 1024, 4096


def grouped_gemm() -> list[dict[str, Any]]:
    """Milliseconds of 64 experts' products, 4096 tokens, 1024 -> 4096, bf16, and of their gradients. Target: as fast as a loop of torch.mm."""
    stacked = list(torch.randn(EXPERTS, OUTER, INNER, dtype=BF16))
    apart = [weight.clone() for weight in stacked]
    uneven = [TOKENS // EXPERTS + (-1) ** i * (i % 24) for i in range(EXPERTS)]
    uneven[-1] += TOKENS - sum(uneven)
    tokens, gradients = (list(torch.randn(TOKENS, width, dtype=BF16).split(uneven)) for width in (INNER, OUTER))
    even = list(torch.cat(tokens).split(TOKENS // EXPERTS))
    return [
        _experts("equally many tokens each, weights stacked", stacked, True, even, False),
        _experts("unequally many tokens, weights apart", apart, True, tokens, False),
        _experts("the same, gradients of the tokens", apart, False, gradients, False),
        _weight_gradients("the same, gradients of the weights, added to fp32", tokens, gradients),
    ]


def _experts(what: str, A: list[torch.Tensor], transa: bool, B: list[torch.Tensor], transb: bool) -> dict[str, Any]:
    """``op(B[i]) @ op(A[i])`` one after the other in one result."""
    split = [len(b) for b in B]
    out, theirs = (torch.empty(sum(split), A[0].shape[0 if transa else 1], dtype=BF16) for _ in range(2))
    into = list(theirs.split(split))

    def loop() -> None:
        for a, b, result in zip(A, B, into, strict=True):
            torch.mm(b, a.t() if transa else a, out=result)

    times = side_by_side({"loop": loop, "tex": lambda: _grouped(A, transa, B, transb, [out], single=True)}, rounds=15)
    torch.testing.assert_close(out, theirs, rtol=2**-7, atol=2**-8 * A[0].shape[1 if transa else 0] ** 0.5)
    return _row(what, times)


def _weight_gradients(what: str, tokens: list[torch.Tensor], gradients: list[torch.Tensor]) -> dict[str, Any]:
    ours, theirs = ([torch.zeros(OUTER, INNER) for _ in tokens] for _ in range(2))
    product = torch.empty(OUTER, INNER, dtype=BF16)

    def loop() -> None:
        for x, gradient, total in zip(tokens, gradients, theirs, strict=True):
            total.add_(torch.mm(gradient.t(), x, out=product))

    return _row(what, side_by_side({"loop": loop, "tex": lambda: _grouped(tokens, False, gradients, True, ours, accumulate=True)}, rounds=5))


def _grouped(A: Any, transa: bool, B: Any, transb: bool, D: list[torch.Tensor], *, single: bool = False, accumulate: bool = False) -> None:
    none = [torch.empty(0)] * len(A)
    dtype = DType.kBFloat16 if D[0].dtype is BF16 else DType.kFloat32
    split = [len(b) for b in B]
    tex.te_general_grouped_gemm(A, transa, B, transb, D, dtype, split, none, dtype, single, none, False, [], 0, accumulate, False, 0)


def router() -> list[dict[str, Any]]:
    """Milliseconds of routing 4096 tokens to 8 of 256 experts. Target: at least as fast as the torch calls."""
    logits = torch.randn(4096, 256)

    def softmax() -> None:
        values, index = torch.topk(logits, 8)
        weights = torch.softmax(values, -1)
        torch.zeros_like(logits).scatter_(1, index, weights)
        torch.full_like(logits, -torch.inf).scatter_(1, index, weights)
        torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, True)

    def sigmoid() -> None:
        scores = torch.sigmoid(logits)
        values, index = torch.topk(scores, 8)
        torch.zeros_like(logits).scatter_(1, index, values / (values.sum(-1, keepdim=True) + 1e-20))
        torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, True)

    rows = []
    for name, loop in (("softmax", softmax), ("sigmoid", sigmoid)):
        times = side_by_side(
            {"loop": loop, "tex": lambda name=name: tex.fused_topk_with_score_function_fwd(logits, 8, False, None, None, None, name, None)}, rounds=15
        )
        rows.append(_row(f"{name} of the 8 largest", times))
    return rows


def _row(what: str, times: dict[str, float]) -> dict[str, Any]:
    return {"call": what, "torch_ms": times["loop"] * 1e3, "tex_ms": times["tex"] * 1e3, "ratio": times["loop"] / times["tex"]}
