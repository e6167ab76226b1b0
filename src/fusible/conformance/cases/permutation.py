"""Records of moving tokens to their experts and back, copy by copy: places exactly, sums in float64, FP8 byte for byte."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusible.conformance.eight_bits import FORMATS, NUMPY, decoded, drawn
from fusible.conformance.table import FLOATS, Arguments, Found, Output, Sample, random, record
from fusible.tex import DType
from fusible.tex.protocol import to_dtype

__all__ = []

_TOKENS, _COPIES, _HIDDEN = 9, 3, 464
_MOVED = (*FLOATS, torch.uint8)


def experts(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 4, (_TOKENS, _COPIES), generator=generator, dtype=torch.int32)


def values(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, code: DType) -> Tensor:
    """Normal values; or bytes of an FP8 format without zeros, as a sum need not keep the sign of a zero."""
    if dtype is not torch.uint8:
        return random(generator, shape, dtype)
    found = drawn(generator, shape, code)
    found[decoded(found, code) == 0] = np.array(1, NUMPY[code]).view(np.uint8).item()
    found[-1, -1] = 0x7F  # NaN
    return found


def codes(dtype: torch.dtype) -> tuple[DType, ...]:
    return FORMATS if dtype is torch.uint8 else (DType(to_dtype(dtype)),)


def wide(x: Tensor, code: DType) -> Tensor:
    return decoded(x, code) if code in NUMPY else x.double()


def places(indices: Tensor, rows: int) -> tuple[Tensor, list[int]]:
    """The row_id_map, and the token that each row holds, by Python's stable sort."""
    tokens, copies = indices.shape
    pairs = sorted(((t, k) for t in range(tokens) for k in range(copies)), key=lambda pair: indices[pair].item())
    at = {pair: place for place, pair in enumerate(pairs)}
    found = [at[t, k] for k in range(copies) for t in range(tokens)]
    return torch.tensor([place if place < rows else -1 for place in found], dtype=torch.int32), [t for t, _ in pairs[:rows]]


def four(result: Any, arguments: Arguments) -> Any:
    """The returned workspace if it has four tensors, else a text, which does not agree."""
    return result[2] if len(result[2]) == 4 and all(isinstance(x, Tensor) for x in result[2]) else "four tensors"


@record("moe_permute_fwd", dtypes=_MOVED)
def permute_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for code, rows, integer in itertools.product(codes(dtype), (-1, 0, _TOKENS * _COPIES, 20, 1, 30), (torch.int32, torch.int64)):
        x, indices = values(generator, (_TOKENS, _HIDDEN), dtype, code), experts(generator)
        row_id_map, tokens = places(indices, rows if rows > 0 else _TOKENS * _COPIES)
        moved = torch.cat((x[tokens], x.new_zeros(max(0, rows - len(tokens)), _HIDDEN)))
        arguments = {
            "input": x, "dtype": code, "indices": indices.to(integer), "num_out_tokens": rows, "workspace": [],
            "max_expanded_token_num": indices.numel(),
        }  # fmt: skip
        yield Sample(f"{code.name} {rows} of {integer}", arguments, (Output(0, moved), Output(1, row_id_map), Output(2, four)))


def summed(x: Tensor, row_id_map: Tensor, prob: Tensor) -> Tensor:
    """``sum_k prob[t, k] x[row]`` in float64, one copy at a time."""
    out = torch.zeros(_TOKENS, x.shape[1], dtype=torch.float64)
    for place, row in enumerate(row_id_map.tolist()):
        k, t = divmod(place, _TOKENS)
        if row >= 0:
            out[t] += x[row] * prob[t, k].double()
    return out


def whatever_nan(wanted: Tensor, code: DType) -> Found:
    """The bytes ``wanted``, where any byte for NaN agrees with NaN."""

    def found(result: Any, arguments: Arguments) -> Tensor:
        got = result.cpu()
        return torch.where(wide(got, code).isnan() & wide(wanted, code).isnan(), got, wanted)

    return found


@record("moe_unpermute_fwd", dtypes=_MOVED)
@record("moe_permute_bwd", dtypes=_MOVED)
def coming_back(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for code, rows, weighted in itertools.product(codes(dtype), (_TOKENS * _COPIES, 20), (False, True)):
        x, (row_id_map, _) = values(generator, (rows, _HIDDEN), dtype, code), places(experts(generator), rows)
        # Quarters: sums of FP8 values times them are exact in fp32.
        prob = torch.randint(1, 5, (_TOKENS, _COPIES), generator=generator).float() / 4 if weighted else torch.empty(0)
        out = summed(wide(x, code), row_id_map, prob if weighted else torch.ones(_TOKENS, _COPIES))
        if code in NUMPY:
            rounded = (out if weighted else out / _COPIES).numpy().astype(np.float32).astype(NUMPY[code])
            output = Output(None, whatever_nan(torch.from_numpy(rounded.view(np.uint8)), code))
        else:
            output = Output(None, out, dtype, _COPIES, 3 * x.abs().max().item())
        arguments = {"input": x, "dtype": code, "row_id_map": row_id_map, "prob": prob, "num_tokens": _TOKENS, "topK": _COPIES}
        yield Sample(f"{code.name} {rows} weighted {weighted}", arguments, (output,))
    if dtype is not torch.uint8:
        x = torch.full((2, 4), math.nan, dtype=dtype)
        x[1] = 3.0
        arguments = {"input": x, "dtype": codes(dtype)[0], "row_id_map": torch.tensor([1, -1, -1, -1], dtype=torch.int32)}
        arguments |= {"prob": torch.empty(0), "num_tokens": 2, "topK": 2}
        yield Sample("a row that nothing comes from is NaN", arguments, (Output(None, torch.tensor([[3.0] * 4, [0.0] * 4], dtype=dtype)),))


@record("moe_unpermute_bwd")
def unpermute_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rows in (_TOKENS * _COPIES, 20, 30):
        x, (row_id_map, _) = random(generator, (rows, _HIDDEN), dtype), places(experts(generator), rows)
        prob, g = torch.rand(_TOKENS, _COPIES, generator=generator), random(generator, (_TOKENS, _HIDDEN), dtype)
        of_act, of_prob = torch.zeros(rows, _HIDDEN, dtype=torch.float64), torch.zeros(_TOKENS, _COPIES, dtype=torch.float64)
        for place, row in enumerate(row_id_map.tolist()):
            k, t = divmod(place, _TOKENS)
            if row >= 0:
                of_act[row] = g[t].double() * prob[t, k].double()
                of_prob[t, k] = (g[t].double() * x[row].double()).sum()
        size = (g.abs().max() * x.abs().max()).item() * _HIDDEN
        arguments = {"input_bwd": g, "input_fwd": x, "dtype": to_dtype(dtype), "row_id_map": row_id_map, "prob": prob}
        yield Sample(f"{rows}", arguments, (Output(0, of_act, dtype), Output(1, of_prob, torch.float32, _HIDDEN, size)))
    g, x = random(generator, (3, 4), dtype), random(generator, (4, 4), dtype)
    nothing = g.new_zeros(1, 4)
    arguments = {"input_bwd": g, "input_fwd": x, "dtype": to_dtype(dtype), "row_id_map": torch.tensor([2, -1, 0], dtype=torch.int32)}
    outputs = (Output(0, torch.cat((g[2:], nothing, g[:1], nothing))), Output(1, torch.zeros(3, 1)))
    yield Sample("without weights", {**arguments, "prob": torch.empty(0)}, outputs)
