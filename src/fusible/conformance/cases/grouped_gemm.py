"""Records of grouped matrix products. Each product is computed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.gemm import TRANSPOSED, product
from fusible.conformance.cases.grouped_blocks import ROWS, gather_blocks, products_in_blocks
from fusible.conformance.cases.pointwise import dgelu, gelu
from fusible.conformance.eight_bits import FORMATS, decoded, drawn
from fusible.conformance.special import plant
from fusible.conformance.table import Arguments, Output, Sample, random, record
from fusible.quantized import Float8Quantizer, Float8TensorStorage, GroupedTensorStorage
from fusible.tex import DType
from fusible.tex.protocol import to_dtype

__all__ = []

_ROWS, _N, _K = (5, 0, 1, 10), 12, 8
_TOTAL = sum(_ROWS)
_SIZE, _LENGTH = 60.0, _K + _N
"""The magnitude of sums of at most 12 products of normal values, and a length that covers every sum."""


def integers(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small integers: every dtype holds the sums of their products, also doubled or halved. So D rounds nothing before the bias is added."""
    return plant(torch.randint(-3, 4, shape, generator=generator).to(dtype))


def operands(generator: torch.Generator, layout: str, dtype: torch.dtype, k: int = _K, random: Any = random) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of every expert: weights and tokens, weights and gradients, or tokens and gradients."""
    weights = [random(generator, (_N, k), dtype) for _ in _ROWS]
    tokens = [random(generator, (rows, k), dtype) for rows in _ROWS]
    gradients = [random(generator, (rows, _N), dtype) for rows in _ROWS]
    return {"TN": (weights, tokens), "NN": (weights, gradients), "NT": (tokens, gradients)}[layout]


def exact(layout: str, A: list[Tensor], B: list[Tensor]) -> list[Tensor]:
    transa, transb = TRANSPOSED[layout]
    wide = [(a.double(), b.double()) for a, b in zip(A, B, strict=True)]
    return [(b.T if transb else b) @ (a.T if transa else a) for a, b in wide]


def filled(results: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.full(result.shape, 7.0, dtype=dtype) for result in results]


def close_to(at: str, results: list[Tensor], dtype: torch.dtype, length: int = _LENGTH, size: float = _SIZE) -> tuple[Output, ...]:
    return tuple(Output(f"{at}.{i}", result, dtype, length, size) for i, result in enumerate(results))


def listed(layout: str, A: list[Any], B: list[Any], D: list[Tensor] | None, dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    transa, transb = TRANSPOSED[layout]
    nothing = [torch.empty(0) for _ in A]
    call = {
        "A": A, "transa": transa, "B": B, "transb": transb, "D": D, "D_type": to_dtype(dtype), "m_splits": [*_ROWS], "bias": nothing,
        "bias_type": DType.kBFloat16, "single_output": False, "pre_gelu_out": [torch.empty(0) for _ in A], "grad": False, "workspace": [],
        "workspaceSize": 0, "accumulate": False, "use_split_accumulator": True, "math_sm_count": 0,
    }  # fmt: skip
    return {**call, **changes}


@record("te_general_grouped_gemm")
def general(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in TRANSPOSED:
        A, B = operands(generator, layout, dtype)
        products = exact(layout, A, B)
        for accumulate in (False, True):
            wanted = [x + 7 for x in products] if accumulate else products
            arguments = listed(layout, A, B, filled(products, dtype), dtype, accumulate=accumulate)
            yield Sample(f"{layout} accumulate {accumulate}", arguments, close_to("D", wanted, dtype))
        left_over = torch.full((2, products[0].shape[1]), 7.0, dtype=torch.float64)
        single = [torch.cat([*products, left_over])]
        arguments = listed(layout, A, B, filled(single, dtype), dtype, single_output=True)
        yield Sample(f"{layout} in one output", arguments, close_to("D", single, dtype))
        yield eight_bits(generator, layout, dtype)
    yield from in_blocks(dtype)
    yield from epilogues(generator, dtype)
    yield from gradients(generator, dtype)
    yield from empty(dtype)


_IN_BLOCKS = (
    ("TN", "mxfp8", "mxfp8 E5M2"), ("NN", "mxfp8", "mxfp8 E5M2"), ("TN", "block 128x128", "block 1x128"), ("TN", "nvfp4", "nvfp4 by rows"),
)  # fmt: skip
"""Layouts, and the formats of A and of B."""


def in_blocks(dtype: torch.dtype) -> Iterator[Sample]:
    """Block-scaled operands. Weight gradients also have the bias gradient, the sum of the row-wise copy."""
    for layout, *forms in _IN_BLOCKS:
        A, B, products, size, length, _ = products_in_blocks(layout, (forms[0], forms[1]), dtype)
        arguments = listed(layout, A, B, filled(products, dtype), dtype, m_splits=[*ROWS])
        yield Sample(f"{layout} of {forms[0]} and {forms[1]}", arguments, close_to("D", products, dtype, length, size))
    A, B, products, size, length, rows = products_in_blocks("NT", ("mxfp8", "mxfp8"), dtype)
    sums = [x.sum(0) for x in rows]
    arguments = listed("NT", A, B, filled(products, dtype), dtype, m_splits=[*ROWS], bias=filled(sums, dtype), grad=True)
    outputs = (*close_to("bias", sums, dtype, length, max(x.abs().sum(0).max().item() for x in rows)), *close_to("D", products, dtype, length, size))
    yield Sample("NT of mxfp8, bias gradient", arguments, outputs)


def epilogues(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for bias_dtype in dict.fromkeys((dtype, torch.float32)):
        A, B = operands(generator, "TN", dtype)
        bias = [random(generator, (_N,), bias_dtype) for _ in _ROWS]
        wanted = [x + b.double() for x, b in zip(exact("TN", A, B), bias, strict=True)]
        single = [torch.cat(wanted)]
        same = tuple(Output(f"result.{i}", b.clone()) for i, b in enumerate(bias))
        arguments = listed("TN", A, B, filled(single, dtype), dtype, bias=bias, single_output=True)
        yield Sample(f"bias of {bias_dtype}", arguments, (*close_to("D", single, dtype), *same))
    arguments = listed("TN", A, B, filled(wanted, dtype), dtype, bias=[b.to(dtype) for b in bias], pre_gelu_out=filled(wanted, dtype))
    wanted = [x + b.to(dtype).double() for x, b in zip(exact("TN", A, B), bias, strict=True)]
    outputs = (*close_to("pre_gelu_out", wanted, dtype), *close_to("D", [gelu(x) for x in wanted], dtype))
    yield Sample("bias and GELU", arguments, outputs)


def gradients(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    A, B = operands(generator, "NT", dtype)
    products, sums = exact("NT", A, B), [b.double().sum(0) for b in B]
    outputs = (*close_to("bias", sums, dtype), *close_to("D", products, dtype))
    yield Sample("bias gradient", listed("NT", A, B, filled(products, dtype), dtype, bias=filled(sums, dtype), grad=True), outputs)
    arguments = listed("NT", A, B, None, dtype, bias=filled(sums, dtype), grad=True)
    yield Sample("bias gradient without outputs", arguments, close_to("bias", sums, dtype))
    A, B = operands(generator, "NN", dtype)
    before = [random(generator, (rows, _K), dtype) for rows in _ROWS]
    wanted = [dgelu(x.double()) * y for x, y in zip(before, exact("NN", A, B), strict=True)]
    kept = tuple(Output(f"pre_gelu_out.{i}", x.clone()) for i, x in enumerate(before))
    arguments = listed("NN", A, B, filled(wanted, dtype), dtype, pre_gelu_out=before, grad=True)
    yield Sample("GELU gradient", arguments, (*close_to("D", wanted, dtype), *kept))


def empty(dtype: torch.dtype) -> Iterator[Sample]:
    """Products over an empty dimension: D is 0 though a bias is given, and unchanged where it accumulates."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    A, B, bias = [zeros(_N, 0), zeros(_N, 0)], [zeros(3, 0), zeros(3, 0)], [torch.full((_N,), 7.0, dtype=dtype) for _ in range(2)]
    pre, D = [torch.full((3, _N), 7.0, dtype=dtype), torch.empty(0)], [torch.full((3, _N), 7.0, dtype=dtype) for _ in range(2)]
    outputs = [Output(f"D.{i}", zeros(3, _N)) for i in range(2)] + [Output("pre_gelu_out.0", zeros(3, _N)), Output("bias.0", bias[0].clone())]
    yield Sample("nothing to add up", listed("TN", A, B, D, dtype, bias=bias, pre_gelu_out=pre), tuple(outputs))
    kept = torch.full((_N, _K), 7.0, dtype=dtype)
    outputs = (Output("D.0", kept.clone()), Output("bias.0", zeros(_N)))
    arguments = listed("NT", [zeros(0, _K)], [zeros(0, _N)], [kept], dtype, bias=[bias[0] + 1], grad=True, accumulate=True)
    yield Sample("nothing to accumulate", arguments, outputs)


def bits(generator: torch.Generator, shapes: list[torch.Size], fp8: DType) -> list[tuple[Tensor, float, Tensor]]:
    """Bytes, the inverse of their scale, and the float64 values that they represent."""
    found = []
    for i, shape in enumerate(shapes):
        data, scale = drawn(generator, tuple(shape), fp8), (0.5, 0.25, 1.0, 2.0)[i]
        found.append((data, scale, decoded(data, fp8) * scale))
    return found


def storages(found: list[tuple[Tensor, float, Tensor]], fp8: DType, dtype: torch.dtype) -> list[Float8TensorStorage]:
    """Those bytes as FP8 tensors with both copies."""
    return [
        Float8TensorStorage(data=data, data_transpose=data.T.contiguous(), fp8_scale_inv=torch.tensor([scale]), fp8_dtype=fp8, fake_dtype=dtype)
        for data, scale, _ in found
    ]


def eight_bits(generator: torch.Generator, layout: str, dtype: torch.dtype) -> Sample:
    """FP8 operands with one scale each. Both copies are given; a backend reads the one that it needs."""
    quantized, wide = [], []
    for operand, fp8 in zip(operands(generator, layout, dtype), FORMATS, strict=True):
        found = bits(generator, [x.shape for x in operand], fp8)
        wide.append([value for _, _, value in found])
        quantized.append(storages(found, fp8, dtype))
    products = exact(layout, wide[0], wide[1])
    transa, transb = TRANSPOSED[layout]
    largest = max(product(a, transa, b, transb)[1] for a, b in zip(wide[0], wide[1], strict=True) if a.numel() and b.numel())
    outputs = tuple(Output(f"D.{i}", x, dtype, _LENGTH, largest) for i, x in enumerate(products))
    return Sample(f"{layout} of FP8", listed(layout, quantized[0], quantized[1], filled(products, dtype), dtype), outputs)


def gather(parts: list[Tensor]) -> GroupedTensorStorage:
    """An unquantized grouped tensor with a gap of one row of sevens after its second member."""
    columns = parts[0].shape[1]
    data = torch.cat([*parts[:2], torch.full((1, columns), 7.0, dtype=parts[0].dtype), *parts[2:]])
    starts = [sum(part.numel() for part in parts[:i]) + (columns if i > 1 else 0) for i in range(len(parts))]
    offsets, rows = torch.tensor([*starts, data.numel()]), torch.tensor([len(part) for part in parts])
    shape, count = tuple(data.shape), len(parts)
    return GroupedTensorStorage(shape, data.dtype, num_tensors=count, data=data.view(-1), first_dims=rows, tensor_offsets=offsets)


def equal(parts: list[Tensor]) -> GroupedTensorStorage:
    """An unquantized grouped tensor of members of one shape."""
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    return GroupedTensorStorage(shape, parts[0].dtype, num_tensors=len(parts), data=torch.cat(parts).view(-1))


def quantized_group(found: list[tuple[Tensor, float, Tensor]], fp8: DType, dtype: torch.dtype) -> GroupedTensorStorage:
    """Those bytes as a grouped tensor, one member after the other, with both copies."""
    scales, rows = torch.tensor([scale for _, scale, _ in found]), torch.tensor([len(data) for data, *_ in found])
    fields: dict[str, Any] = {
        "data": torch.cat([data.reshape(-1) for data, *_ in found]), "columnwise_data": torch.cat([data.T.reshape(-1) for data, *_ in found]),
        "scale_inv": scales, "columnwise_scale_inv": scales.clone(), "first_dims": rows,
    }  # fmt: skip
    shape, quantizer = (int(rows.sum()), found[0][0].shape[1]), Float8Quantizer(torch.ones(1), torch.zeros(1), fp8)
    return GroupedTensorStorage(shape, dtype, num_tensors=len(found), quantizer=quantizer, **fields)


def on_groups(layout: str, A: Any, B: Any, D: Any, **changes: Any) -> dict[str, Any]:
    transa, transb = TRANSPOSED[layout]
    call = {"A": A, "transa": transa, "B": B, "transb": transb, "D": D, "bias": None, "bias_scale": None}
    call |= {"alpha": torch.ones(1), "beta": torch.zeros(1), "workspace_setup": torch.empty(0), "workspace_cublas": torch.empty(0)}
    return {**call, **changes, "use_split_accumulator": True, "math_sm_count": 0}


_GROUPED_BLOCKS = (
    ("TN", "mxfp8", "mxfp8 E5M2", False), ("NN", "mxfp8", "mxfp8 E5M2", False), ("NT", "mxfp8", "mxfp8 E5M2", False),
    ("TN", "nvfp4", "nvfp4 by rows", False), ("NN", "nvfp4", "nvfp4", True),
)  # fmt: skip
"""Layouts, the formats of A and of B, and whether the column-wise copies are transformed."""


def target(
    form: str, layout: str, wanted: list[Tensor], dtype: torch.dtype, length: int = _LENGTH, size: float = _SIZE
) -> tuple[Any, tuple[Output, ...]]:
    """D filled with sevens, and its expected values. A gap keeps its sevens."""
    D = filled(wanted, dtype)
    if form == "discrete_out":
        return D, (*close_to("D", wanted, dtype, length, size), *close_to("result", wanted, dtype, length, size))
    if layout == "NT":
        return equal(D), (Output("D.rowwise_data", torch.cat(wanted).view(-1), dtype, length, size),)
    gap = torch.full((1, wanted[0].shape[1]), 7.0, dtype=torch.float64)
    return gather(D), (Output("D.rowwise_data", torch.cat([*wanted[:2], gap, *wanted[2:]]).view(-1), dtype, length, size),)


def group_of(form: str, members: list[Tensor], *, gap: bool = False) -> Any:
    """The operand A: a list where the function takes one, else a grouped tensor, with a gap if asked for."""
    return members if form == "discrete_in" else gather(members) if gap else equal(members)


def of_blocks(form: str, dtype: torch.dtype) -> Iterator[Sample]:
    for layout, a, b, transformed in _GROUPED_BLOCKS:
        A, B, products, size, length, _ = products_in_blocks(layout, (a, b), dtype, transformed)
        D, outputs = target(form, layout, products, dtype, length, size)
        group = A if form == "discrete_in" else gather_blocks(A, [x.shape[0] for x in A], dtype)
        arguments = on_groups(layout, group, gather_blocks(B, ROWS, dtype), D)
        yield Sample(f"{layout} of {a} and {b}, transformed {transformed}", arguments, outputs)


def of_two_types(form: str, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Weights of another dtype than tokens and result: with a bias that has a scale, and added to D."""
    A, _ = operands(generator, "TN", torch.bfloat16 if dtype is torch.float32 else torch.float32, random=integers)
    _, B = operands(generator, "TN", dtype, random=integers)
    rows, factors = random(generator, (len(_ROWS), _N), dtype), torch.linspace(-1.0, 1.0, _TOTAL)
    parts = zip(exact("TN", A, B), rows.double(), factors.double().split(_ROWS), strict=True)
    D, outputs = target(form, "TN", [x + row * factor[:, None] for x, row, factor in parts], dtype)
    bias = GroupedTensorStorage((len(_ROWS), _N), dtype, num_tensors=len(_ROWS), data=rows.view(-1))
    arguments = on_groups("TN", group_of(form, A), gather(B), D, bias=bias, bias_scale=factors)
    yield Sample("weights of another type", arguments, outputs)
    D, outputs = target(form, "TN", [x + 7 for x in exact("TN", A, B)], dtype)
    yield Sample("weights of another type, added to D", on_groups("TN", group_of(form, A), gather(B), D, beta=torch.ones(1)), outputs)


def of_two_roundings(form: str, dtype: torch.dtype) -> Iterator[Sample]:
    """A product between two numbers of D's dtype. It is rounded to that dtype before the bias, minus the rounded product, is added: the sum is 0."""
    if dtype is torch.float32:  # the product is summed in it
        return
    near = 2.0 ** (1 - math.log2(torch.finfo(dtype).eps))  # 256 of bfloat16; the next number is near + 2
    A, B = [torch.ones(_N, 2, dtype=dtype) for _ in _ROWS], [torch.tensor([[near, 1.0]] * rows, dtype=dtype).view(rows, 2) for rows in _ROWS]
    bias = GroupedTensorStorage((len(_ROWS), _N), dtype, num_tensors=len(_ROWS), data=torch.full((len(_ROWS) * _N,), -near, dtype=dtype))
    for factors in (None, torch.ones(_TOTAL)):
        D, close = target(form, "TN", [torch.zeros(rows, _N, dtype=torch.float64) for rows in _ROWS], dtype)
        outputs = tuple(Output(output.at, output.reference.to(dtype)) for output in close)
        arguments = on_groups("TN", group_of(form, A), gather(B), D, bias=bias, bias_scale=factors)
        yield Sample(f"a bias is added to what was rounded, its scale {factors is not None}", arguments, outputs)


def on_grouped(generator: torch.Generator, dtype: torch.dtype, form: str) -> Iterator[Sample]:
    """The samples of a function whose A (``discrete_in``) or D (``discrete_out``) is a list."""
    for layout in TRANSPOSED:
        A, B = operands(generator, layout, dtype)
        D, outputs = target(form, layout, exact(layout, A, B), dtype)
        yield Sample(layout, on_groups(layout, group_of(form, A, gap=layout == "NT"), gather(B), D), outputs)
        times = {"TN": 1.0, "NN": 2.0, "NT": 0.5}[layout]
        D, outputs = target(form, layout, [x + 7 * times for x in exact(layout, A, B)], dtype)
        arguments = on_groups(layout, group_of(form, A, gap=layout == "NT"), gather(B), D, beta=torch.tensor([times]))
        yield Sample(f"{layout} added to {times} times D", arguments, outputs)
        (fa, a), (fb, b) = ((fp8, bits(generator, [x.shape for x in xs], fp8)) for xs, fp8 in zip((A, B), FORMATS, strict=True))
        D, outputs = target(form, layout, exact(layout, [value for *_, value in a], [value for *_, value in b]), dtype)
        group = storages(a, fa, dtype) if form == "discrete_in" else quantized_group(a, fa, dtype)
        yield Sample(f"{layout} of FP8", on_groups(layout, group, quantized_group(b, fb, dtype), D), outputs)
    yield from of_blocks(form, dtype)
    yield from of_two_types(form, generator, dtype)
    yield from of_two_roundings(form, dtype)
    A, B = operands(generator, "TN", dtype, _N, integers)  # square weights
    rows = torch.stack([random(generator, (_N,), dtype) for _ in _ROWS])
    factors = torch.linspace(-1.0, 1.0, _TOTAL)
    for count, alpha, beta in (
        (1, torch.tensor([0.5]), torch.ones(1)),
        (4, torch.tensor([0.5, 1.0, 2.0, -1.0]), torch.tensor([1.0, 0.5, -0.5, -1.0])),
        (1, torch.ones(1), torch.ones(1)),
    ):
        for biased, scaled in ((False, False), (True, False), (True, True)):
            wanted = []
            for i, (x, factor) in enumerate(zip(exact("TN", A, B), factors.double().split(_ROWS), strict=True)):
                value = alpha[i % count].double() * x + 7 * beta[i % count].double()
                if biased:  # it is added to what was rounded
                    value = value.to(dtype).double() + rows[i].double() * (factor[:, None] if scaled else 1.0)
                wanted.append(value)
            D, outputs = target(form, "TN", wanted, dtype)
            bias = GroupedTensorStorage((4, _N), dtype, num_tensors=4, data=rows.view(-1).clone()) if biased else None
            more = {"alpha": alpha.clone(), "beta": beta.clone(), "bias": bias, "bias_scale": factors.clone() if scaled else None}
            arguments = on_groups("TN", group_of(form, A), gather(B), D, **more)
            yield Sample(f"{alpha.tolist()} times and {beta.tolist()} times D, bias {biased}, its scale {scaled}", arguments, outputs)


for _form in ("grouped_tensor", "discrete_in", "discrete_out"):
    record(f"te_general_grouped_gemm_for_{_form}")(partial(on_grouped, form=_form))


@record("get_grouped_gemm_setup_workspace_size", dtypes=(torch.float32,))
def workspace_size(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Any number of bytes is right: a backend chooses its own workspace."""

    def fits(result: Any, arguments: Arguments) -> Any:
        return result if type(result) is int and result >= 0 else "a number of bytes"

    for count in (1, 64):
        yield Sample(f"{count} problems", {"num_tensors": count}, (Output(None, fits),))
