"""Records of the primitives, reductions and optimizer kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tex_op_table import Output, Sample, random, record, strided


@record("prim_add")
def add(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    a, b = random(generator, (4, 6), dtype), random(generator, (6,), torch.float32)
    yield Sample("broadcast", {"a": a, "b": b}, (Output(None, a.double() + b.double(), dtype),))
    yield Sample("wide", {"a": a, "b": b, "dtype": 4}, (Output(None, a.double() + b.double(), torch.float32),))
    c = random(generator, (4, 6), dtype)
    yield Sample("same", {"a": a, "b": c}, (Output(None, a.double() + c.double(), dtype),))


@record("prim_row_sum")
def row_sum(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x in (
        random(generator, (2, 300, 5), dtype),
        random(generator, (7,), dtype),
        strided(generator, (9, 4, 3), dtype),
        random(generator, (0, 3), dtype),
    ):
        rows = x.double().reshape(-1, x.shape[-1])
        size = rows.abs().sum(0).max().item()
        yield Sample(str(list(x.shape)), {"x": x}, (Output(None, rows.sum(0), dtype, rows.shape[0], size),))
        yield Sample(f"{list(x.shape)}-fp32", {"x": x, "dtype": torch.float32}, (Output(None, rows.sum(0), torch.float32, rows.shape[0], size),))


@record("prim_transpose")
def transpose(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    x = random(generator, (5, 3), dtype)
    yield Sample("matrix", {"x": x}, (Output(None, x.double().T, dtype),))


@record("prim_cast")
def cast(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    x = random(generator, (5, 3), torch.float32)
    yield Sample("matrix", {"x": x, "dtype": dtype}, (Output(None, x.double(), dtype),))


@record("prim_rope_angles", dtypes=(torch.float32,))
def rope_angles(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    frequencies = 10000.0 ** (-2 * torch.arange(3, dtype=torch.float64) / 6)
    angles = torch.arange(300, dtype=torch.float64)[:, None] * torch.cat((frequencies, frequencies))
    arguments = {"positions": 300, "width": 6, "base": 10000.0, "like": torch.zeros(1)}
    yield Sample("300", arguments, (Output(None, angles.reshape(300, 1, 1, 6)),))
