"""What reaches a native kernel has memory of its own that means what its dtype and strides say: anything else is resolved or refused."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from cpp_calls import CALLS, declared, tensors
from memory_kinds import KINDS, LAZY, ORDINARY, WITHOUT_MEMORY, allowed

from fusible import cpp_extensions
from fusible.errors import ShapeError

Outcomes = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    program = Path(__file__).with_name("memory_kinds.py")
    finished = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=300)
    lines = finished.stdout.splitlines()
    assert finished.returncode == 0, f"{lines[-1] if lines else 'nothing'}: exit {finished.returncode}: {finished.stderr[-500:]}"
    return {(call, place, kind): rest for call, place, kind, rest in (line.split(" ", 3) for line in lines)}


def test_every_function_of_tensors_has_a_call() -> None:
    assert {name.removesuffix(end) for name in CALLS for end in ("_paged", "_padded", "_packed", "_dense")} >= declared()
    assert declared() <= CALLS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_each_kind_of_tensor_is_right_or_refused(call: str, outcomes: Outcomes) -> None:
    wrong = {case: found for case, found in outcomes.items() if case[0] == call and found != "none" and found not in allowed(*case)}
    assert not wrong


def test_the_sweep_has_every_case(outcomes: Outcomes) -> None:
    assert len(outcomes) == len(KINDS) * sum(len(tensors(make())) for make in CALLS.values())
    made = Counter(kind for (_, _, kind), found in outcomes.items() if found != "none")
    # A kind that cannot be made of most arguments would test nothing: sparse rows are of matrices, negation is of signed numbers.
    assert {kind for kind in KINDS if made[kind] < 20} == set()
    assert made["freed"] == made["fake"] == made["parameter"] == len(outcomes) // len(KINDS)
    assert WITHOUT_MEMORY and ORDINARY and LAZY


def test_a_tensor_of_an_unknown_framework_is_asked_by_name() -> None:
    class Foreign:
        def __init__(self, x: torch.Tensor) -> None:
            self.dtype, self.shape, self._x = x.dtype, tuple(x.shape), x

        def data_ptr(self) -> int:
            return self._x.data_ptr()

        def is_contiguous(self) -> bool:
            return True

    x = torch.tensor([1.0, -3.0])
    assert cpp_extensions.amax(Foreign(x)) == 3.0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", [(2**33, 2**33, 0), (2**62, 4, 0), (2**61,)])
def test_sizes_whose_product_wraps_are_refused(shape: tuple[int, ...]) -> None:
    class Foreign:
        dtype = torch.float32

        def data_ptr(self) -> int:
            return 64

        def is_contiguous(self) -> bool:
            return True

    Foreign.shape = shape
    with pytest.raises(ShapeError, match="whose product is below"):
        cpp_extensions.amax(Foreign())  # pyright: ignore[reportArgumentType]


def test_a_result_whose_size_wraps_is_refused() -> None:
    tall = torch.empty(2**33, 0)
    with pytest.raises(ShapeError, match="whose product is below"):
        cpp_extensions.gemm(tall, False, torch.float32, 1.0, tall, True, torch.float32, 1.0, torch.zeros(4), torch.float32)


def test_threads_that_no_system_has_are_not_asked_for() -> None:
    assert cpp_extensions.amax(torch.ones(100_000_00), None, 2**31 - 1) == 1.0
