"""torch's switches for products in half precision on a GPU, which need no GPU to be set: off within, and behind as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from threading import Barrier

import pytest
import torch

from fusible.tex.backends.torch_backend.exact_sums import _OFF, exact_sums

MATMUL = torch.backends.cuda.matmul
NAMES = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]


def switches() -> list[tuple[bool, bool]]:
    return [(getattr(MATMUL, name), getattr(MATMUL, f"{name}_split_k")) for name in NAMES]


@pytest.fixture(params=[*product([(True, True), (False, True), (False, False)], repeat=2)], ids=str, autouse=True)
def former(request: pytest.FixtureRequest) -> Iterator[list[tuple[bool, bool]]]:
    before = switches()
    for name, value in zip(NAMES, request.param, strict=True):
        setattr(MATMUL, name, value)
    yield list(request.param)
    for name, value in zip(NAMES, before, strict=True):
        setattr(MATMUL, name, value)


def test_they_are_off_within_and_then_as_they_were(former: list[tuple[bool, bool]]) -> None:
    off = [(False, cut) for _, cut in former]
    with _OFF:
        with suppress(ValueError), _OFF:
            raise ValueError
        assert switches() == off
    assert switches() == former


def test_of_threads_the_last_one_restores_them(former: list[tuple[bool, bool]]) -> None:
    together = Barrier(4)

    def within(_: int) -> bool:
        together.wait()
        seen = []
        for _ in range(200):
            with _OFF:
                seen += [allowed for allowed, _ in switches()]
        return any(seen)

    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(within, range(4)))
    assert switches() == former


def test_a_cpu_leaves_them_alone(former: list[tuple[bool, bool]]) -> None:
    with exact_sums(torch.ones(2)):
        assert switches() == former
