"""The binding layer serves a user's own extension: a native function of known parameter types is one line."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusible import cpp_extensions
from fusible.errors import ArgumentError, BackendError, CompileError, DTypeError

SOURCE = """
#include "fusible/module.hpp"

using namespace fusible;

static void awesomelu(const TensorView& x, const TensorView& y, float slope) {
    for (std::int64_t i = 0; i < x.numel(); ++i) y.as<float>()[i] = x.as<float>()[i] * (x.as<float>()[i] > 0 ? 1.0f : slope);
}

static std::int64_t total_elements(const std::vector<TensorView>& tensors, const std::optional<TensorView>& more) {
    std::int64_t count = more ? more->numel() : 0;
    for (const auto& tensor : tensors) count += tensor.numel();
    return count;
}

static std::string layout(const StridedView& x) {
    check_rows_contiguous(x, "x");
    return x.shape_text() + " " + std::to_string(x.strides[0]) + " " + std::to_string(*x.as<float>());
}

static std::string describe(DType dtype, Scalar scale, bool flag, int number, const std::string& text) {
    return std::string(name_of(dtype)) + " " + std::to_string(scale.value) + (flag ? " yes " : " no ") + std::to_string(number) + " " + text;
}

static void refuse() { throw ArgumentError(expected("nothing", "refuse", "a call", "leave it")); }

FUSIBLE_MODULE(awesome, m) {
    m.def("awesomelu", wrap(awesomelu));
    m.def("total_elements", wrap(total_elements));
    m.def("layout", wrap(layout));
    m.def("describe", wrap(describe));
    m.def("refuse", wrap(refuse));
}
"""


@pytest.fixture(scope="module")
def awesome(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    directory: Path = tmp_path_factory.mktemp("awesome")
    source = directory / "awesome.cpp"
    source.write_text(SOURCE)
    return cpp_extensions.build("awesome", [source], directory=directory, flags=["-O0", "-Wall", "-Wextra", "-Werror"])


def test_tensors_and_numbers_cross(awesome: ModuleType) -> None:
    x, y = torch.tensor([[-2.0, 4.0]]), torch.empty(1, 2)
    awesome.awesomelu(x, y, 0.5)
    assert torch.equal(y, torch.tensor([[-1.0, 4.0]]))


def test_lists_and_optional_tensors_cross(awesome: ModuleType) -> None:
    assert awesome.total_elements([torch.ones(3), torch.ones(2, 2)], None) == 7
    assert awesome.total_elements((), torch.ones(5)) == 5
    with pytest.raises(DTypeError, match="argument 1: expected a list of tensors, got 'Tensor'"):
        awesome.total_elements(torch.ones(3), None)


def test_a_tensor_with_gaps_crosses_where_it_is_asked_for(awesome: ModuleType) -> None:
    x = torch.arange(24.0).view(4, 6)
    assert awesome.layout(x[1:, 2:5]) == "[3, 3] 6 8.000000"
    assert awesome.layout(x[:, 2:3].t()[:, :1]) == "[1, 1] 1 2.000000"
    with pytest.raises(ArgumentError, match="x: expected neighbouring elements in the last dimension, got a stride of 6"):
        awesome.layout(x.t())
    with pytest.raises(DTypeError, match="argument 1: expected a tensor, got 'list'"):
        awesome.layout([1.0])


def test_dtypes_scalars_and_plain_values_cross(awesome: ModuleType) -> None:
    assert awesome.describe(torch.bfloat16, torch.tensor([0.5]), True, 3, "text") == "bfloat16 0.500000 yes 3 text"
    assert awesome.describe("float8_e5m2", 2, False, -1, "") == "float8_e5m2 2.000000 no -1 "
    assert awesome.describe(7, 1.0, False, 0, "").startswith("float8_e4m3fn")


def test_native_exceptions_are_the_house_ones(awesome: ModuleType) -> None:
    with pytest.raises(ArgumentError, match=r"^refuse: expected nothing, got a call; leave it\.$"):
        awesome.refuse()


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="the search path: expected a C\\+\\+ compiler, got no lost-compiler; install"):
        cpp_extensions.build("x", [], directory=tmp_path, compiler="lost-compiler")


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("not C++")
    with pytest.raises(CompileError, match="(?s)the extension 'broken': expected sources that compile, got .*not"):
        cpp_extensions.build("broken", [source], directory=tmp_path)
