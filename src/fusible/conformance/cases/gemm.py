"""Records of the matrix product, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.block_tensors import BLOCKED, stored
from fusible.conformance.cases.pointwise import dgelu, gelu
from fusible.conformance.cases.quantize import FORMER, with_former
from fusible.conformance.eight_bits import FORMATS, cast, decoded, drawn
from fusible.conformance.table import Output, Sample, random, record
from fusible.quantized import BlockScaledStorage, Float8Quantizer, Float8TensorStorage
from fusible.tex import DType
from fusible.tex.formats import block_format_of

Operand = Tensor | Float8TensorStorage | BlockScaledStorage

CALL: dict[str, Any] = {
    "D": None,
    "quantizer": None,
    "output_dtype": None,
    "bias": None,
    "bias_type": torch.bfloat16,
    "gelu": False,
    "gelu_in": None,
    "grad": False,
    "workspace": None,
    "workspace_size": 0,
    "accumulate": False,
    "use_split_accumulator": False,
}


def call(a: Operand, trans_a: bool, b: Operand, trans_b: bool, **changes: Any) -> dict[str, Any]:
    return {"A": a, "transA": trans_a, "B": b, "transB": trans_b, **CALL, **changes}


TRANSPOSED = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
"""By layout, whether A and B are transposed: of the forward, of the input's gradient, of the weight's."""


def shapes_of(layout: str, tokens: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of A and B: of a weight ``[n, k]`` and tokens, of the weight and gradients, or of tokens and gradients."""
    return {"TN": ((n, k), (tokens, k)), "NN": ((n, k), (tokens, n)), "NT": ((tokens, k), (tokens, n))}[layout]


def flat(x: Tensor) -> Tensor:
    return x.double().reshape(-1, x.shape[-1])


def product(a: Tensor, trans_a: bool, b: Tensor, trans_b: bool) -> tuple[Tensor, float, int]:
    """``op(B) @ op(A)``, the largest sum of absolute products, and the contracted length."""
    left, right = flat(b), flat(a)
    left, right = left.T if trans_b else left, right.T if trans_a else right
    return left @ right, (left.abs() @ right.abs()).max().item(), left.shape[1]


def layouts(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool, Tensor, bool]]:
    for tokens, n, k in ((16, 8, 32), (7, 5, 3), (1, 1, 65), (65, 65, 5)):  # the last: a square gradient
        weight, x, dy = random(generator, (n, k), dtype), random(generator, (tokens, k), dtype), random(generator, (tokens, n), dtype)
        yield f"TN-{tokens}-{n}-{k}", weight, True, x, False
        yield f"NN-{tokens}-{n}-{k}", weight, False, dy, False
        yield f"NT-{tokens}-{n}-{k}", x, False, dy, True
        yield f"TT-{tokens}-{n}-{k}", random(generator, (k, tokens), dtype), True, random(generator, (tokens, n), dtype), True
    x, dy = random(generator, (2, 3, 6), dtype), random(generator, (2, 3, 5), dtype)
    yield "NT-3d", x, False, dy, True
    yield "TN-3d", random(generator, (5, 6), dtype), True, x, False
    yield "NN-strided", random(generator, (6, 5), dtype).t(), False, random(generator, (5, 7), dtype).t(), False


@record("generic_gemm")
def generic_gemm(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    nothing = tuple(Output(i, None) for i in (1, 2, 3))
    for label, a, trans_a, b, trans_b in layouts(generator, dtype):
        ab, size, length = product(a, trans_a, b, trans_b)
        shape = (*(() if trans_b else b.shape[:-1]), ab.shape[1]) if not trans_b else tuple(ab.shape)
        ab = ab.reshape(shape)
        yield Sample(label, call(a, trans_a, b, trans_b), (Output(0, ab, dtype, length, size), *nothing))
        yield Sample(
            f"{label}-fp32", call(a, trans_a, b, trans_b, output_dtype=torch.float32), (Output(0, ab, torch.float32, length, size), *nothing)
        )
        bias = random(generator, shape[-1:], dtype)
        y = ab + bias.double()
        yield Sample(f"{label}-bias", call(a, trans_a, b, trans_b, bias=bias), (Output(0, y, dtype, length, size + 4), *nothing))
        outputs = (Output(0, gelu(y), dtype, length, 2 * size + 8), Output(1, None), Output(2, y, dtype, length, size + 4), Output(3, None))
        yield Sample(f"{label}-bias-gelu", call(a, trans_a, b, trans_b, bias=bias, gelu=True, gelu_in=torch.zeros(1)), outputs)
        rows = b.reshape(-1, b.shape[-1]).double()
        outputs = (Output(0, ab, dtype, length, size), Output(1, rows.sum(0), dtype, rows.shape[0], rows.abs().sum(0).max().item()), *nothing[1:])
        yield Sample(f"{label}-bias_grad", call(a, trans_a, b, trans_b, bias=bias, grad=True), outputs)
        yield from gradients_of_gelu(generator, dtype, label, call(a, trans_a, b, trans_b), ab, size, length)
        for d_dtype in dict.fromkeys((dtype, torch.float32)):
            d = random(generator, shape, d_dtype)
            alpha, beta = (0.5, 2.0) if d_dtype is dtype else (1.5, -1.0)
            total = alpha * ab + beta * d.double()
            arguments = call(a, trans_a, b, trans_b, D=d, accumulate=True, alpha=alpha, beta=beta)
            yield Sample(f"{label}-accumulate-{d_dtype}", arguments, (Output(0, total, d_dtype, length, size + 8), *nothing), ("D",))
            added = call(a, trans_a, b, trans_b, D=d.clone(), accumulate=True, output_dtype=d_dtype)
            yield Sample(f"{label}-add-{d_dtype}", added, (Output(0, ab + d.double(), d_dtype, length, size + 8), *nothing), ("D",))
    yield from eight_bits(generator, dtype)
    yield into_eight_bits(generator, dtype)
    yield from in_blocks(generator, dtype)


def into_eight_bits(generator: torch.Generator, dtype: torch.dtype) -> Sample:
    """A quantized product of small integers, which every dtype holds exactly. The element of the largest absolute value is negative."""
    a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((8, 16), (5, 16)))
    ab, fp8 = flat(b) @ flat(a).T, DType.kFloat8E4M3
    if ab.max() > -ab.min():
        a, ab = -a, -ab
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.tensor([FORMER]), fp8)
    data = Output("result.0._data", cast(ab, 4.0, fp8)), Output("result.0._scale_inv", torch.tensor([0.25]))
    outputs = (*data, Output("quantizer.amax", with_former(ab)), *(Output(i, None) for i in (1, 2, 3)))
    return Sample("quantized", call(a, True, b, False, quantizer=quantizer), outputs)


def eight_bits(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Products of FP8 operands with one scale each. Both copies of an operand are given; a backend reads the one that it needs."""
    for fp8, (layout, transposed) in itertools.product(FORMATS, TRANSPOSED.items()):
        operands, values = [], []
        for shape, scale in zip(shapes_of(layout, 16, 8, 32), (0.5, 0.25), strict=True):
            bits = drawn(generator, shape, fp8)
            values.append(decoded(bits, fp8) * scale)
            storage = {"data": bits, "data_transpose": bits.t().contiguous(), "fp8_scale_inv": torch.tensor([scale]), "fp8_dtype": fp8}
            operands.append(Float8TensorStorage(**storage, fake_dtype=dtype))
        ab, size, length = product(values[0], transposed[0], values[1], transposed[1])
        arguments = call(operands[0], transposed[0], operands[1], transposed[1], output_dtype=dtype)
        yield Sample(f"{layout}-{fp8.name}", arguments, (Output(0, ab, dtype, length, size), *(Output(i, None) for i in (1, 2, 3))))


_IN_BLOCKS = (
    ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8 E5M2"), ("block 128x128", "block 1x128"), ("block 1x128", "block 1x128"), ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4 by rows"), ("nvfp4 4 over 6", "nvfp4"),
)  # fmt: skip
"""Formats of A and of B."""


def in_blocks(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Products of block-scaled operands. The two copies of an operand have different values; the product reads the one whose blocks lie along the
    reduced dimension."""
    nothing = tuple(Output(i, None) for i in (1, 2, 3))
    for of_a, of_b in _IN_BLOCKS:
        for layout, (trans_a, trans_b) in TRANSPOSED.items():
            if of_b == "nvfp4 by rows" and layout != "TN":
                continue
            a, b = shapes_of(layout, 32, 64, 160)
            for swizzled in (False, True) if of_a == of_b and block_format_of(BLOCKED[of_a]()).swizzles and layout != "NN" else (False,):
                (x, wide_a), (y, wide_b) = stored(of_a, a, dtype, 1, swizzled=swizzled), stored(of_b, b, dtype, 2, swizzled=swizzled)
                ways = "rowwise" if trans_a else "columnwise", "columnwise" if trans_b else "rowwise"
                ab, size, length = product(wide_a[ways[0]], trans_a, wide_b[ways[1]], trans_b)
                arguments = call(x, trans_a, y, trans_b, output_dtype=dtype)
                yield Sample(f"{layout}, {of_a} and {of_b}, swizzled {swizzled}", arguments, (Output(0, ab, dtype, length, size), *nothing))


def gradients_of_gelu(
    generator: torch.Generator, dtype: torch.dtype, label: str, arguments: dict[str, Any], ab: Tensor, size: float, length: int
) -> Iterator[Sample]:
    z = random(generator, tuple(ab.shape), dtype)
    d = ab * dgelu(z.double())
    main = Output(0, d, dtype, length, 4 * size)
    arguments = {**arguments, "grad": True, "gelu": True, "gelu_in": z}
    yield Sample(f"{label}-dgelu", arguments, (main, Output(1, None), Output(2, None), Output(3, None)))
    rows = d.reshape(-1, d.shape[-1])
    bias_grad = Output(1, rows.sum(0), dtype, length + rows.shape[0], 4 * size * rows.shape[0])
    yield Sample(f"{label}-dgelu-bias_grad", {**arguments, "bias": z.new_zeros(d.shape[-1])}, (main, bias_grad, Output(2, None), Output(3, None)))
