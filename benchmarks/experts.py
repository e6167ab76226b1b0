"""What tex's functions for mixtures of experts cost beside the torch calls that a user would write."""

from __future__ import annotations

from typing import Any

import torch

from fusible import tex
from fusible.cli.bench.timing import side_by_side
from fusible.tex import DType

__all__ = ["grouped_gemm", "router"]

BF16 = torch.bfloat16


def grouped_gemm() -> list[dict[str, Any]]:
    """Milliseconds of 64 experts' products, 4096 tokens, 1024 -> 4096, bf16. Target: at least as fast as a loop of torch.mm."""
    experts, tokens, inner, outer = 64, 4096, 1024, 4096
    stacked = list(torch.randn(experts, outer, inner, dtype=BF16))
    apart = [weight.clone() for weight in stacked]
    uneven = [tokens // experts + (-1) ** i * (i % 24) for i in range(experts)]
    uneven[-1] += tokens - sum(uneven)
    return [
        _experts("equally many tokens each, weights stacked", stacked, [tokens // experts] * experts),
        _experts("unequally many tokens, weights apart", apart, uneven),
    ]


def _experts(what: str, weights: list[torch.Tensor], split: list[int]) -> dict[str, Any]:
    x = torch.randn(sum(split), weights[0].shape[1], dtype=BF16)
    out, theirs = torch.empty(len(x), len(weights[0]), dtype=BF16), torch.empty(len(x), len(weights[0]), dtype=BF16)
    rows, into, none = list(x.split(split)), list(theirs.split(split)), [torch.empty(0)] * len(weights)

    def loop() -> None:
        for weight, part, result in zip(weights, rows, into, strict=True):
            torch.mm(part, weight.t(), out=result)

    def ours() -> None:
        tex.te_general_grouped_gemm(
            weights, True, rows, False, [out], DType.kBFloat16, split, none, DType.kBFloat16, True, none, False, [], 0, False, False, 0
        )

    times = side_by_side({"loop": loop, "tex": ours}, rounds=15)
    torch.testing.assert_close(out, theirs, rtol=2**-7, atol=2**-8 * weights[0].shape[1] ** 0.5)
    return _row(what, times)


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
