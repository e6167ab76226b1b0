"""What programs written for Tripy compute with: bools and int8 in arithmetic, sizes that are divided, uneven parts, wide reflections, scalars."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from fusible import lazy
from fusible.errors import ArgumentError, CompileError

_A, _B = np.array([False, False, True, True]), np.array([False, True, False, True])
_INT8 = np.arange(-128, 128, dtype=np.int8)


@pytest.mark.parametrize("name", ["sub", "div", "floor_div", "mod"])
def test_bools_count_as_numbers(name: str) -> None:
    """0 and 1 as int32, by the rules of integers, where what is divided by 0 gives 0; the result is whether it is not 0."""
    a, b = _A.astype(np.int32), _B.astype(np.int32)
    safe = np.maximum(b, 1)
    want = {"sub": a - b, "div": a // safe * b, "floor_div": a // safe * b, "mod": a % safe * b}[name]
    got = getattr(lazy, name)(lazy.Tensor(_A), lazy.Tensor(_B))
    assert got.dtype is lazy.bool and np.array_equal(got.numpy(), want != 0)


def test_operators_take_bools_on_either_side() -> None:
    b = lazy.Tensor(_B)
    assert np.array_equal((True - b).numpy(), ~_B) and np.array_equal((b - True).numpy(), ~_B) and np.array_equal((True / b).numpy(), _B)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "silu", "gelu"])
def test_activations_of_int8_are_rounded_to_the_nearest(name: str) -> None:
    x = torch.from_numpy(_INT8).double()
    want = getattr(torch, name)(x) if name in ("tanh", "sigmoid") else getattr(torch.nn.functional, name)(x)
    got = getattr(lazy, name)(lazy.Tensor(_INT8))
    assert got.dtype is lazy.int8 and np.array_equal(got.numpy(), torch.round(want).to(torch.int8).numpy())


def test_the_mean_of_int8_windows_is_truncated_toward_zero() -> None:
    x = _INT8.reshape(1, 2, 128)
    want = np.trunc(x.astype(np.float64).reshape(1, 2, 32, 4).mean(-1))
    got = lazy.avgpool(lazy.Tensor(x), (4,), stride=(4,))
    assert got.dtype is lazy.int8 and np.array_equal(got.numpy(), want)
    padded = lazy.avgpool(lazy.Tensor(x), (2,), stride=(130,), padding=((2, 0),), count_include_pad=False)
    assert padded.numpy().tolist() == [[[0], [0]]]


@pytest.mark.parametrize(("size", "count"), [(7, 3), (6, 4), (5, 5), (2, 4), (0, 2), (9, 1)])
def test_uneven_parts(size: int, count: int) -> None:
    """``ceil(size / count)`` elements each, as long as there are any."""
    data = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    step = -(-size // count)
    got = lazy.split(lazy.Tensor(data), count, 1)
    assert isinstance(got, tuple) and len(got) == count
    for i, part in enumerate(got):
        assert np.array_equal(part.numpy(), data[:, i * step : (i + 1) * step])


def test_uneven_parts_of_a_dynamic_dimension() -> None:
    executable = lazy.compile(lambda x: list(lazy.split(x, 3)), args=[lazy.InputInfo(((1, 6, 9),), lazy.float32)])
    for size in range(1, 10):
        data, step = np.arange(size, dtype=np.float32), -(-size // 3)
        assert [part.tolist() for part in executable(data)] == [data[i * step : (i + 1) * step].tolist() for i in range(3)]


@pytest.mark.parametrize("pad", [((0, 0), (7, 5)), ((3, 4), (0, 9)), ((1, 1), (2, 2)), ((6, 0), (0, 1))])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 1)])
def test_wide_reflections_go_back_and_forth(shape: tuple[int, int], pad: Any) -> None:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert np.array_equal(lazy.pad(lazy.Tensor(data), pad, "reflect").numpy(), np.pad(data, pad, "reflect"))


def test_topk_of_a_scalar() -> None:
    values, indices = lazy.topk(lazy.Tensor(3.5), 1, 0)
    assert values.tolist() == 3.5 and indices.tolist() == 0 and indices.dtype is lazy.int32 and values.shape == indices.shape == ()
    with pytest.raises(ArgumentError):
        lazy.topk(lazy.Tensor(3.5), 2, 0)


@pytest.mark.parametrize("of", [lazy.float32, lazy.bfloat16, lazy.int32, lazy.bool])
def test_a_tensor_fills(of: lazy.dtype) -> None:
    for value in (lazy.Tensor(2.5), lazy.Tensor([2.5]), lazy.Tensor([[3]])):
        want = lazy.cast(value, of).reshape(()).tolist()
        assert lazy.full((2, 1), value, of).tolist() == [[want], [want]]
    assert lazy.full_like(lazy.ones((2,), lazy.float16), lazy.Tensor(3)).dtype is lazy.float16


def test_what_a_call_gives_fills_a_dynamic_shape() -> None:
    executable = lazy.compile(lambda x, n: lazy.full((x.shape[0], n / 2), x[0, 0] + n), args=_dynamic())
    for rows, n in ((1, 4), (3, 7)):
        data = np.full((rows, 2), 0.5, np.float32)
        assert np.array_equal(executable(data, n).numpy(), np.full((rows, n // 2), n + 0.5, np.float32))


def _dynamic() -> list[Any]:
    return [lazy.InputInfo(((1, 2, 4), 2), lazy.float32), lazy.DimensionInputInfo((2, 4, 8))]


def test_sizes_are_divided_as_integers() -> None:
    def program(x: Any, n: Any) -> list[Any]:
        rows = x.shape[0]
        values = [rows / 2, 9 / rows, (rows - n) / 2, -n / 3, n / -2, abs(rows - n), rows**2, n / rows, (rows * 6) / 3]
        assert all(isinstance(value, lazy.DimensionSize) for value in values)
        return [*(lazy.cast(value, lazy.int32) for value in values), n / 2.5 + 0.0, x * (n / 2)]

    executable = lazy.compile(program, args=_dynamic())
    for rows in (1, 2, 4):
        for n in (2, 5, 8):
            data = np.ones((rows, 2), np.float32)
            *got, floated, scaled = executable(data, n)
            want = [rows / 2, 9 / rows, (rows - n) / 2, -n / 3, n / -2, abs(rows - n), rows**2, n / rows, rows * 6 / 3]
            assert [value.tolist() for value in got] == [int(value) for value in want]  # int() truncates toward zero
            assert floated.dtype is lazy.float32 and floated.tolist() == np.float32(n) / np.float32(2.5)
            assert np.array_equal(scaled.numpy(), data * (n // 2))


def test_divisions_of_sizes_that_have_no_result_are_refused() -> None:
    size = lazy.DimensionSize(7)
    assert str(size / 2) == "3" and repr(lazy.DimensionSize(7)) == "DimensionSize(7)" and str(size) == "7"
    with pytest.raises(ArgumentError, match="the division of 7: expected a divisor other than 0"):
        size / 0
    with pytest.raises(ArgumentError, match="a divisor that is positive for all sizes"):
        lazy.compile(lambda n: lazy.ones((4 / (n - 2),)), args=[lazy.DimensionInputInfo((2, 4, 8))])


def test_a_whole_float_is_a_size() -> None:
    """Of a size that is known, ``n / 2`` is Python's float."""
    x = lazy.ones((4, 6))
    assert lazy.reshape(x, (x.shape[0] / 2, 12)).shape == (2, 12) and lazy.zeros((2.0,)).shape == (2,)
    with pytest.raises(lazy.TripyException, match="an int or a sequence of ints"):
        lazy.reshape(x, (x.shape[1] / 4, -1))


def test_bounds_are_tuples() -> None:
    named = lazy.NamedDimension("n", 1, 2, 3)
    assert named.bounds == (1, 2, 3)
    info = lazy.InputInfo((named, 4, (2, 2, 5)), lazy.float32)
    assert (info.shape_bounds.min, info.shape_bounds.opt, info.shape_bounds.max) == ((1, 4, 2), (2, 4, 2), (3, 4, 5))
    assert info.dimension_names == {0: "n"} and not info.shape_bounds.is_static()
    size = lazy.DimensionInputInfo((1, 2, 3))
    assert (size.value_bounds.min, size.value_bounds.opt, size.value_bounds.max) == ((1,), (2,), (3,))
    assert lazy.DimensionInputInfo(size.value_bounds) == size


def test_an_executable_has_the_signature_of_its_runtime_inputs() -> None:
    def program(a: Any, factor: Any, *rest: Any, size: Any, states: Any) -> Any:
        return a * factor + rest[0] + states["k"], lazy.ones((size,))

    info = lazy.InputInfo((2,), lazy.float32)
    executable = lazy.compile(program, args=[info, 2.0, info], kwargs={"size": lazy.DimensionInputInfo((1, 2, 3)), "states": {"k": info}})
    found = inspect.signature(executable)
    assert list(found.parameters) == ["a", "rest0", "size", "states"]
    assert found.parameters["size"].kind is inspect.Parameter.KEYWORD_ONLY and found.parameters["a"].annotation is lazy.Tensor
    assert found.return_annotation == tuple[lazy.Tensor, lazy.Tensor]
    x = lazy.ones((2,))
    for called in (executable(x, x, size=1, states={"k": x}), executable(a=x, rest0=x, size=1, states={"k": x})):
        assert called[0].tolist() == [4.0, 4.0] and called[1].shape == (1,)
    one = lazy.compile(lazy.relu, args=[info])
    assert inspect.signature(one).return_annotation is lazy.Tensor and list(inspect.signature(one).parameters) == ["input"]
    assert str(one) == "Executable(input: Tensor) -> Tensor"
    assert str(executable) == "Executable(a: Tensor, rest0: Tensor, size: Tensor, states: dict) -> tuple[Tensor, Tensor]"


def test_a_loaded_executable_has_its_signature(tmp_path: Any) -> None:
    path = tmp_path / "relu"
    lazy.compile(lazy.relu, args=[lazy.InputInfo((2,), lazy.float32)]).save(path)
    assert str(lazy.Executable.load(path)) == "Executable(input: Tensor) -> Tensor"


def test_a_value_that_a_call_gives_is_used_by_no_bool() -> None:
    with pytest.raises(CompileError):
        lazy.compile(lambda x: x if x.sum() > 0 else -x, args=[lazy.InputInfo((2,), lazy.float32)])
