"""Bad arguments raise one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, ShapeError

X = torch.ones(4, 6)
E4M3 = torch.float8_e4m3fn

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "not a tensor": (cpp_extensions.amax, ([1.0],), DTypeError, "Expected a tensor of argument 1, got 'list'"),
    "None": (cpp_extensions.amax, (None,), DTypeError, "got 'NoneType'"),
    "an unknown dtype": (cpp_extensions.amax, (X.to(torch.complex64),), DTypeError, "got torch.complex64"),
    "a dtype that is not wide": (cpp_extensions.amax, (X.int(),), DTypeError, "of src, got int32"),
    "strides": (cpp_extensions.amax, (X.t(),), ArgumentError, "Expected a contiguous tensor of argument 1"),
    "another device": (cpp_extensions.amax, (X.to("meta"),), ArgumentError, "in host memory of argument 1"),
    "too many dimensions": (cpp_extensions.amax, (X.reshape(4, 6, *[1] * 11),), ShapeError, "at most 12 dimensions"),
    "no fp8": (cpp_extensions.quantize, (X, X, 1.0, torch.int32), DTypeError, "of fp8_dtype, got int32"),
    "no dtype": (cpp_extensions.quantize, (X, X, 1.0, "fp8"), DTypeError, "Expected a dtype of argument 4, got 'fp8'"),
    "an unknown number": (cpp_extensions.quantize, (X, X, 1.0, 99), DTypeError, "got 99"),
    "the other format": (cpp_extensions.quantize, (X, X.to(torch.float8_e5m2), 1.0, E4M3), DTypeError, "of dst, got float8_e5m2"),
    "no output": (cpp_extensions.quantize, (X, None, 1.0, E4M3), ArgumentError, "got None for both"),
    "a wrong size": (cpp_extensions.quantize, (X, X[:3].byte(), 1.0, E4M3), ShapeError, re.escape("got 18 (shape [3, 6])")),
    "a wide scale": (cpp_extensions.quantize, (X, X.byte(), X, E4M3), ShapeError, "Expected 1 elements of argument 3"),
    "a wrong bias": (cpp_extensions.quantize, (X, X.byte(), 1.0, E4M3, None, None, False, X), ShapeError, "Expected 6 elements of bias_grad"),
    "threads": (cpp_extensions.quantize, (X, X.byte(), 1.0, E4M3, None, None, False, None, None, -1), ArgumentError, "num_threads, got -1"),
    "a dequantized size": (cpp_extensions.dequantize, (X.byte(), X[:1], 1.0, E4M3), ShapeError, "Expected 24 elements of dst"),
    "wide bytes": (cpp_extensions.transpose_bytes, (X, X), DTypeError, "a dtype of one byte of src"),
    "a level": (cpp_extensions.set_level, ("sse9",), ArgumentError, "Expected one of generic.*got 'sse9'"),
    "a negative setting": (cpp_extensions.set_num_threads, (-2,), ArgumentError, "of num_threads, got -2"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_one_sentence(case: str) -> None:
    function, arguments, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        function(*arguments)
    assert re.fullmatch(r"Expected .+ of .+, got .+: .+\.", str(caught.value)), str(caught.value)
    assert issubclass(error, TypeError if error is DTypeError else ValueError)


def test_arguments_are_checked_before_anything_is_written() -> None:
    codes, largest = torch.zeros(4, 6, dtype=torch.uint8), torch.zeros(1)
    with pytest.raises(ShapeError):
        cpp_extensions.quantize(X, codes, 1.0, E4M3, None, largest, False, torch.zeros(5))
    assert not codes.any() and not largest.any()


def test_an_error_of_the_tensor_itself_passes_through() -> None:
    class Broken:
        dtype, shape = torch.float32, (2,)

        def is_contiguous(self) -> bool:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        cpp_extensions.amax(Broken())  # pyright: ignore[reportArgumentType]
