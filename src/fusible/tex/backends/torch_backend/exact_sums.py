"""Products in half precision that add in fp32 and round once, on GPUs too: there torch lets cuBLAS add parts of a product in half precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusible.locks import Lock

__all__ = ["exact_sums"]

_MATMUL: Any = torch.backends.cuda.matmul

_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Of ``torch.backends.cuda.matmul``. Beside each stands whether a product may be cut along what it contracts, which is set together with it."""


class _ExactSums:
    """torch's switches, off while any thread is within; then as they were found."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._state: tuple[int, tuple[tuple[bool, bool], ...]] = (0, ())
        """How many are within, and the switches as they were before."""

    def __enter__(self) -> None:
        with self._lock:
            within, former = self._state
            if not within:
                former = tuple((getattr(_MATMUL, name), getattr(_MATMUL, f"{name}_split_k")) for name in _SWITCHES)
                _set((False, cut) for _, cut in former)
            self._state = (within + 1, former)

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            within, former = self._state
            if within == 1:
                _set(former)
            self._state = (within - 1, former)


def _set(values: Iterable[tuple[bool, bool]]) -> None:
    for name, value in zip(_SWITCHES, values, strict=True):
        setattr(_MATMUL, name, value)


_OFF, _AS_IT_IS = _ExactSums(), nullcontext()


def exact_sums(x: Tensor) -> AbstractContextManager[Any]:
    """Around a product of tensors that lie where ``x`` does."""
    return _OFF if x.is_cuda else _AS_IT_IS
