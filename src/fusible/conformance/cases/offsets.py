"""Records of the offsets of segments, as running sums of Python integers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from fusible.conformance.table import Output, Sample, record

__all__ = []

_INTEGERS = (torch.int32, torch.int64)
_SPLITS = ([3, 0, 2**20], [0], [], [5, 1, 0, 0, 7])


@record("splits_to_offsets", dtypes=_INTEGERS)
def splits_to_offsets(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for splits in _SPLITS:
        for width in (1, 2**12):
            wanted = torch.tensor([*accumulate((rows * width for rows in splits), initial=0)])
            arguments = {"first_dims": torch.tensor(splits, dtype=dtype), "logical_last_dim": width}
            yield Sample(f"{splits} of {width}", arguments, (Output(None, wanted),))


@record("splits_to_offsets_multi", dtypes=_INTEGERS)
def splits_to_offsets_multi(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    strides, zeros, types = [1, 1, 2**31], [False, True, True], [torch.int32, torch.int64, torch.int64]
    for splits in _SPLITS:
        ends = [*accumulate(splits)]
        described = tuple(zip(strides, zeros, types, strict=True))
        wanted = [torch.tensor([stride * end for end in ([0] if zero else []) + ends], dtype=of) for stride, zero, of in described]
        for together in (False, True):
            arguments = {
                "split_sizes": torch.tensor(splits, dtype=dtype), "device": torch.device("cpu"), "strides": strides, "include_leading_zero": zeros,
                "dtypes": types, "bulk_allocate": together,
            }  # fmt: skip
            outputs = [Output(f"result.1.{i}", x) for i, x in enumerate(wanted)]
            yield Sample(f"{splits} together {together}", arguments, (Output(0, torch.tensor(splits, dtype=torch.int64)), *outputs))
