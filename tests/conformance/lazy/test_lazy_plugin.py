"""Plugins: an XLA FFI handler in C++, compiled here, registered, called, compiled into programs, and refused."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, ExecutionError
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.ops.plugin import attribute_text
from fusible.lazy.stablehlo import mlir as bindings
from fusible.lazy.trace.checker import check_trace

_SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Blend(double weight, float bias, ffi::Span<const int64_t> shift, std::string_view mode, bool negate, ffi::Buffer<ffi::F32> x,
                        ffi::Buffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::S32> sizes) {
  if (mode != "caf\xC3\xA9 \"\\") return ffi::Error(ffi::ErrorCode::kInvalidArgument, "mode is not known");
  for (size_t i = 0; i < x.element_count(); ++i) {
    float value = static_cast<float>(weight) * x.typed_data()[i] + y.typed_data()[i] + bias + static_cast<float>(shift[1] + i);
    out->typed_data()[i] = negate ? -value : value;
  }
  for (size_t d = 0; d < x.dimensions().size(); ++d) sizes->typed_data()[d] = static_cast<int32_t>(x.dimensions()[d]);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(blend, Blend,
                              ffi::Ffi::Bind()
                                  .Attr<double>("weight")
                                  .Attr<float>("bias")
                                  .Attr<ffi::Span<const int64_t>>("shift")
                                  .Attr<std::string_view>("mode")
                                  .Attr<bool>("negate")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

static ffi::Error Reverse(ffi::Buffer<ffi::S32> x, ffi::ResultBuffer<ffi::S32> out) {
  std::reverse_copy(x.typed_data(), x.typed_data() + x.element_count(), out->typed_data());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(reverse, Reverse, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());
"""

_MODE = 'café "\\'
_ATTRIBUTES: dict[str, Any] = {"weight": 1 / 3, "bias": np.float32(-2.5), "shift": [3, 4], "mode": _MODE, "negate": True}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared library with both handlers, registered under several names."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    found = importlib.util.find_spec("jaxlib")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs a C++ compiler, and the headers that jaxlib ships")
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "handlers.cc").write_text(_SOURCE)
    made = folder / "handlers.so"
    headers = Path(found.origin).parent / "include"
    done = subprocess.run(
        [compiler, "-std=c++17", "-O0", "-w", "-shared", "-fPIC", f"-I{headers}", "-o", str(made), str(folder / "handlers.cc")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lazy.register_plugin("test::blend", made, outputs=lambda x, y, **_: [(x.shape, x.dtype), ((x.ndim,), lazy.int32)])
    lazy.register_plugin("reverse", ctypes.CDLL(str(made)).reverse, namespace="test")
    return made


def _operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 3)).astype(np.float32), rng.standard_normal((3, 2)).astype(np.float32)


def _blended(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the handler computes: it adds the position of each element in row-major order."""
    return -(x.astype(np.float64).T / 3 + y - 2.5 + 4 + np.arange(y.size).reshape(y.shape))


@pytest.mark.usefixtures("library")
def test_a_handler_gets_operands_and_attributes_and_gives_several_results() -> None:
    x, y = _operands()
    out, sizes = lazy.plugin("test::blend", [lazy.Tensor(x).transpose(0, 1), lazy.Tensor(y)], **_ATTRIBUTES)
    assert (out.shape, out.dtype, sizes.shape, sizes.dtype) == ((3, 2), lazy.float32, (2,), lazy.int32)
    trace = check_trace(lazy.Trace([out + 1, sizes]))
    check_flat_ir(trace.to_flat_ir())
    # Five roundings of numbers below 16.
    np.testing.assert_allclose(out.numpy(), _blended(x, y), rtol=0, atol=5 * 16 * np.finfo(np.float32).eps)
    assert sizes.tolist() == [3, 2]


@pytest.mark.usefixtures("library")
def test_a_plugin_is_compiled_into_a_program_among_other_operations() -> None:
    x, y = _operands()

    def program(a: lazy.Tensor, b: lazy.Tensor) -> lazy.Tensor:
        out, sizes = lazy.plugin(
            name="blend", namespace="test", inputs=[a.transpose(0, 1), b], output_info=[(2, lazy.float32), (1, lazy.int32)], **_ATTRIBUTES
        )
        return (out * 2).sum(0) + lazy.plugin(op="test::reverse", inputs=(sizes,), output_info=[((2,), lazy.int32)]).cast(lazy.float32)

    executable = lazy.compile(program, args=[lazy.InputInfo(x.shape, lazy.float32), lazy.InputInfo(y.shape, lazy.float32)])
    want = 2 * _blended(x, y).sum(0) + [2, 3]
    np.testing.assert_allclose(executable(x, y).numpy(), want, rtol=0, atol=8 * 128 * np.finfo(np.float32).eps)
    assert "CustomCallOp(t2, b, target=test::blend@1" in str(executable.flat_ir)
    assert 'stablehlo.custom_call @"test::blend@1"' in executable.stablehlo.text


@pytest.mark.usefixtures("library")
def test_one_output_is_one_tensor_and_versions_are_apart(library: Path) -> None:
    lazy.register_plugin("test::turned", library, version="2", symbol="reverse")
    x = lazy.Tensor([1, 2, 3])
    assert lazy.plugin("turned", [x], [((3,), lazy.int32)], "2", "test").tolist() == [3, 2, 1]
    with pytest.raises(ArgumentError, match="got 'test::turned' version '1'"):
        lazy.plugin("turned", [x], [((3,), lazy.int32)], namespace="test")


@pytest.mark.usefixtures("library")
def test_a_failing_handler_says_why() -> None:
    x = lazy.zeros((2,))
    wrong = [({"mode": "other"}, "mode is not known"), ({"weight": 1}, "expected F64 but got S64"), ({"shift": [0.5]}, "expected S64 but got F64")]
    for change, reason in wrong:
        out, _ = lazy.plugin("test::blend", [x, x], **{**_ATTRIBUTES, **change})
        with pytest.raises(ExecutionError, match=reason) as caught:
            out.eval()
        assert str(caught.value).startswith(__file__)


@pytest.mark.usefixtures("library")
def test_illegal_calls_are_refused_when_recorded() -> None:
    x = lazy.zeros((2,))
    one = [((2,), lazy.int32)]
    cases: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "got 'test::unknown' version '1'", lambda: lazy.plugin("test::unknown", [x])),
        (ArgumentError, "the shape and dtype of every output", lambda: lazy.plugin("test::reverse", [x])),
        (ArgumentError, "a number of dimensions, 1", lambda: lazy.plugin("test::reverse", [x], [(1, lazy.int32)])),
        (ArgumentError, "pairs of a shape and a dtype", lambda: lazy.plugin("test::reverse", [x], [lazy.int32])),
        (DTypeError, "a dtype of fusible.lazy", lambda: lazy.plugin("test::reverse", [x], [((2,), "int32")])),
        (ArgumentError, "2 outputs", lambda: lazy.plugin("test::blend", [x, x], one, **_ATTRIBUTES)),
        (ArgumentError, r"float32 \[2\]", lambda: lazy.plugin("test::blend", [x, x], [(2, lazy.float32), (1, lazy.int32)], **_ATTRIBUTES)),
        (ArgumentError, r"int32 \[1\]", lambda: lazy.plugin("test::blend", [x, x], [(1, lazy.float32), (1, lazy.int64)], **_ATTRIBUTES)),
        (DTypeError, "the attribute scale", lambda: lazy.plugin("test::reverse", [x], one, scale=x)),
        (DTypeError, "the attribute scale", lambda: lazy.plugin("test::reverse", [x], one, scale=np.zeros(2, np.uint8))),
        (DTypeError, "the attribute scale", lambda: lazy.plugin("test::reverse", [x], one, scale=[[1, 2]])),
        (ArgumentError, "one name", lambda: lazy.plugin(inputs=[x])),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text) as caught:
            call()
        assert str(caught.value).startswith(__file__) and "^^^" in str(caught.value)


def test_an_unregistered_name_shows_the_users_line() -> None:
    x = lazy.zeros((2,))
    with pytest.raises(ArgumentError) as caught:
        lazy.plugin("no::such", [x])
    line = test_an_unregistered_name_shows_the_users_line.__code__.co_firstlineno + 3
    place, code, carets, sentence = str(caught.value).split("\n")
    assert place.startswith(f"{__file__}:{line}") and code[carets.index("^") : carets.rindex("^") + 1] == '"no::such"'
    assert sentence.startswith("a call of plugin: expected a registered plugin, got 'no::such' version '1' (registered: ")


def test_what_is_no_handler_is_refused(library: Path) -> None:
    with pytest.raises(ArgumentError, match="a new name"):
        lazy.register_plugin("test::reverse", library)
    with pytest.raises(ArgumentError, match="the symbol 'absent'"):
        lazy.register_plugin("test::absent", library)
    with pytest.raises(ArgumentError, match="a shared library"):
        lazy.register_plugin("test::absent", library.parent / "absent.so")
    with pytest.raises(DTypeError, match="got function"):
        lazy.register_plugin("test::absent", lambda x: x)


def test_attributes_are_exact_and_typed() -> None:
    numbers: list[tuple[Any, str]] = [
        (1 / 3, "f64"),
        (-1e-300, "f64"),
        (-0.0, "f64"),
        (float("-inf"), "f64"),
        (np.float32(1e-45), "f32"),
        (np.float32("nan"), "f32"),
        (np.float16(65504), "f16"),
        (-(2**63), "i64"),
        (np.int8(-128), "i8"),
        (np.uint64(2**64 - 1), "ui64"),
    ]
    mlir = bindings.get()
    with mlir.context:
        for value, of in numbers:
            parsed = mlir.ir.Attribute.parse(attribute_text("name", value))
            assert str(parsed.type) == of
            np.testing.assert_array_equal(np.array(parsed.value), np.array(value))
            assert np.signbit(float(parsed.value)) == np.signbit(float(value))
        texts = {True: "true", "": '""'}
        for value, text in texts.items():
            assert str(mlir.ir.Attribute.parse(attribute_text("name", value))) == text
        spans: list[tuple[Any, str]] = [
            ([], "array<f64>"),
            ((True, False), "array<i1: true, false>"),
            (np.array([-1, 2], np.int16), "array<i16: -1, 2>"),
            ([0.5, 2], "array<f64: 5.000000e-01, 2.000000e+00>"),
        ]
        for value, text in spans:
            assert str(mlir.ir.Attribute.parse(attribute_text("name", value))) == text
