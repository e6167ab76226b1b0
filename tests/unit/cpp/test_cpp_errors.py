"""Bad arguments raise one sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_calls import CALLS, invoke

import fusible.cpp_extensions as native
from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError, FusibleError, ShapeError
from fusible.tex.calls.examination import _OF_KERNELS
from fusible.tex.interface.declare import DECLARATIONS

X = torch.ones(4, 6)
E4M3 = torch.float8_e4m3fn

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = {
    "not a tensor": (cpp_extensions.amax, ([1.0],), DTypeError, "src: expected a tensor, got 'list'"),
    "None": (cpp_extensions.amax, (None,), DTypeError, "got 'NoneType'"),
    "an unknown dtype": (cpp_extensions.amax, (X.to(torch.complex64),), DTypeError, "got torch.complex64"),
    "a dtype that is not wide": (cpp_extensions.amax, (X.int(),), DTypeError, "src: expected .*, got int32"),
    "strides": (cpp_extensions.amax, (X.t(),), ArgumentError, "src: expected a contiguous tensor"),
    "another device": (cpp_extensions.amax, (X.to("meta"),), ArgumentError, "src: expected a tensor in host memory"),
    "too many dimensions": (cpp_extensions.amax, (X.reshape(4, 6, *[1] * 11),), ShapeError, "at most 12 dimensions"),
    "no fp8": (cpp_extensions.quantize, (X, X, 1.0, torch.int32), DTypeError, "fp8_dtype: expected .*, got int32"),
    "no dtype": (cpp_extensions.quantize, (X, X, 1.0, "fp8"), DTypeError, "fp8_dtype: expected a dtype, got 'fp8'"),
    "an unknown number": (cpp_extensions.quantize, (X, X, 1.0, 99), DTypeError, "got 99"),
    "the other format": (cpp_extensions.quantize, (X, X.to(torch.float8_e5m2), 1.0, E4M3), DTypeError, "dst: expected .*, got float8_e5m2"),
    "no output": (cpp_extensions.quantize, (X, None, 1.0, E4M3), ArgumentError, "got None for both"),
    "a wrong size": (cpp_extensions.quantize, (X, X[:3].byte(), 1.0, E4M3), ShapeError, re.escape("got 18 (shape [3, 6])")),
    "a wide scale": (cpp_extensions.quantize, (X, X.byte(), X, E4M3), ShapeError, "scale: expected 1 elements"),
    "a wrong bias": (cpp_extensions.quantize, (X, X.byte(), 1.0, E4M3, None, None, False, X), ShapeError, "bias_grad: expected 6 elements"),
    "threads": (
        cpp_extensions.quantize,
        (X, X.byte(), 1.0, E4M3, None, None, False, None, None, -1),
        ArgumentError,
        "num_threads: expected .*, got -1",
    ),
    "a dequantized size": (cpp_extensions.dequantize, (X.byte(), X[:1], 1.0, E4M3), ShapeError, "dst: expected 24 elements"),
    "wide bytes": (cpp_extensions.transpose_bytes, (X, X), DTypeError, "src: expected a dtype of one byte"),
    "a level": (cpp_extensions.set_level, ("sse9",), ArgumentError, "expected one of generic.*got 'sse9'"),
    "a negative setting": (cpp_extensions.set_num_threads, (-2,), ArgumentError, "num_threads: expected .*, got -2"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_one_sentence(case: str) -> None:
    function, arguments, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        function(*arguments)
    assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value)), str(caught.value)
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


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_refusal_names_the_argument(call: str) -> None:
    """Of every native function, each of its tensors, lists and dtypes."""
    arguments = CALLS[call]()
    tried = 0
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor | list):
            for wrong in (object(), X.to("meta") if isinstance(value, torch.Tensor) else [3]):
                with pytest.raises(FusibleError, match=rf"^{name}: expected .+, got "):
                    invoke(call, {**arguments, name: wrong})
                tried += 1
        elif name.endswith("dtype"):
            with pytest.raises(DTypeError, match=rf"^{name}: expected a dtype, got "):
                invoke(call, {**arguments, name: "fp9"})
            tried += 1
    assert tried


MADE = {"column_sums", "dbeta", "dgamma", "dk", "dq", "dst_transposed", "dv", "dx", "extra_gradient", "largest", "source_amax"}
"""Tensors that the cpu backend makes for the kernels: no argument of a caller."""


def test_what_a_kernel_calls_a_tensor_has_a_name_in_the_interface() -> None:
    stub = Path(native.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    called = {name for name in re.findall(r"(\w+): [\w\[| ]*TensorLike", stub)} - MADE
    known = {name for declaration in DECLARATIONS.values() for name in declaration.signature.parameters}
    assert called > {"dst", "src", "lengths_q"} and not called - known - set(_OF_KERNELS), called - known - set(_OF_KERNELS)
    assert all(name in known for names in _OF_KERNELS.values() for name in names)
