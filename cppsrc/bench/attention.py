"""Times native attention beside torch's, alternating in one process: ``python cppsrc/bench/attention.py [1]``.

Causal training shapes forward and backward, and decoding (one new token a sequence against 1024 cached ones), all bfloat16; prints the median of
each in milliseconds, the ratio, and the rate of the native call in billions of multiply-adds of visible scores. With ``1``: one thread, and the
least CPU time of each instead, for a machine that others compute on.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from timing import medians

from fusible import cpp_extensions as native

ALONE = sys.argv[1:] == ["1"]
timed = partial(medians, alone=ALONE)
SDPA = torch.nn.functional.scaled_dot_product_attention
TRAINING = [(8, 256, 4, 64), (2, 2048, 16, 64), (2, 2048, 16, 128)]
DECODING = [(1, 1024, 32, 8, 64), (8, 1024, 32, 8, 64), (8, 1024, 32, 32, 64)]


def report(name: str, torch_ms: float, native_ms: float, products: float) -> None:
    rate = products / native_ms / 1e6
    print(f"{name:44} torch {torch_ms:9.3f} ms   native {native_ms:9.3f} ms   {torch_ms / native_ms:6.2f}x   {rate:7.1f} G/s")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def train(b: int, s: int, h: int, d: int, rounds: int) -> None:
    q, k, v, grad = (random(b, h, s, d) for _ in range(4))
    mine = [x.transpose(1, 2) for x in (q, k, v)]
    o, (dq, dk, dv) = torch.empty(b, s, h, d, dtype=torch.bfloat16), (torch.empty_like(x) for x in mine)
    stats, largest = torch.empty(b, s, h, 1), torch.empty(b, s, h, 1)
    rules = (d**-0.5, True, False, -1, -1, False)
    products = b * h * s * s * d  # two products of half the scores

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return SDPA(q, k, v, is_causal=True)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = SDPA(*leaves, is_causal=True)
    name = f"b={b} s={s} h={h} d={d} causal"
    report(f"{name}, forward", *timed(forward, lambda: native.attention_forward(*mine, o, stats, largest, *rules), rounds=rounds), products)
    backward = timed(
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        lambda: native.attention_backward(*mine, o, grad.transpose(1, 2), stats, dq, dk, dv, *rules),
        rounds=rounds,
    )
    report(f"{name}, backward", *backward, 2.5 * products)


def decode(b: int, s: int, h: int, g: int, d: int, rounds: int) -> None:
    q, k, v = random(b, h, 1, d), random(b, g, s, d), random(b, g, s, d)
    mine = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o, stats, largest = torch.empty(b, 1, h, d, dtype=torch.bfloat16), torch.empty(b, 1, h, 1), torch.empty(b, 1, h, 1)
    rules = (d**-0.5, True, True, -1, -1, False)
    found = timed(
        lambda: SDPA(q, k, v, enable_gqa=h != g),
        lambda: native.attention_forward(*mine, o, stats, largest, *rules),
        rounds=rounds,
    )
    report(f"decoding b={b} s={s} h={h} g={g} d={d}", *found, 2 * b * h * s * d)
    print(f"{'':44} keys and values read at {4e-6 * b * g * s * d / found[1]:.1f} GB/s")


def main() -> None:
    if ALONE:
        torch.set_num_threads(1)
        native.set_num_threads(1)
    info = native.info()
    print(f"{info['threads']} threads, {info['level']}, torch {torch.__version__}")
    for shape in TRAINING:
        train(*shape, rounds=30 if shape[1] < 1024 else 9)
    for shape in DECODING:
        decode(*shape, rounds=50)


if __name__ == "__main__":
    main()
