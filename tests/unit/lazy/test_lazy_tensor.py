"""Tensors: making them, what is known without computing, what makes them compute, and what is refused when recorded."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

import fusible
from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, FusibleError, NotServedError, ShapeError
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.trace.storage import Storage


def test_data_becomes_tensors() -> None:
    cases = [
        (2.5, lazy.float32, ()),
        (3, lazy.int32, ()),
        (True, lazy.bool, ()),
        ([[1, 2, 3]], lazy.int32, (1, 3)),
        ([], lazy.float32, (0,)),
        (np.zeros((2, 0), np.uint8), lazy.uint8, (2, 0)),
        (np.ones(3, ml_dtypes.bfloat16), lazy.bfloat16, (3,)),
        (np.float64(1.0), lazy.float64, ()),
    ]
    for data, of, shape in cases:
        tensor = lazy.Tensor(data)
        assert (tensor.dtype, tensor.shape, tensor.ndim) == (of, shape, len(shape))
        assert str(tensor.device) == "gpu:0"
        np.testing.assert_array_equal(tensor.numpy(), np.asarray(data))
    assert lazy.Tensor([1.7, 300.0], dtype=lazy.bfloat16).tolist() == [1.703125, 300.0]


def test_numpy_data_is_a_snapshot() -> None:
    data = np.zeros(1024, np.float32)
    tensor = lazy.Tensor(data)
    data[:] = 1
    assert tensor.numpy().sum() == 0


def test_nothing_computes_before_a_value_is_used() -> None:
    before = CACHE.compiled
    y = (lazy.ones((2, 2)) * 3.0)[0].sum()
    assert (y.shape, y.dtype) == ((), lazy.float32)
    assert CACHE.compiled == before and not isinstance(y.trace_tensor.producer, Storage)
    assert float(y) == 6.0 and int(y) == 6 and bool(y) and y.item() == 6.0
    assert isinstance(y.trace_tensor.producer, Storage) and y.eval() is y


def test_programs_that_print_alike_are_compiled_once() -> None:
    (lazy.Tensor([1.0, 2.0]) * 1.25).eval()
    before = CACHE.compiled
    assert (lazy.Tensor([3.0, 4.0]) * 1.25).tolist() == [3.75, 5.0]
    assert CACHE.compiled == before
    (lazy.Tensor([3.0, 4.0, 5.0]) * 1.25).eval()
    assert CACHE.compiled == before + 1


def test_repr_and_conversions() -> None:
    assert repr(lazy.Tensor([1.0, 2.0])) == "tensor([1., 2.], dtype=float32, loc=cpu:0, shape=(2,))"
    assert lazy.full((2,), 1000.0, lazy.float8).tolist() == [448.0, 448.0]
    assert [10, 20, 30][lazy.Tensor(1)] == 20
    assert (np.ones(2, np.float32) + lazy.Tensor([1.0, 2.0])).tolist() == [2.0, 3.0]
    assert (2.0 - lazy.Tensor([1.0, 2.0])).tolist() == [1.0, 0.0]
    assert (2 ** lazy.Tensor([1, 2])).tolist() == [2, 4]
    assert lazy.Tensor([1.0]) != None  # noqa: E711 - the operator itself is tested
    assert len(lazy.zeros((3, 2))) == 3
    assert {lazy.float32: 1}[lazy.float32] == 1 and repr(lazy.float8) == "float8" and lazy.bfloat16.itemsize == 2


@pytest.mark.parametrize(
    ("args", "of"), [((5,), lazy.float32), ((2, 9, 3), lazy.int32), ((5, 0, -2), lazy.int64), ((0, 1, 0.25), lazy.bfloat16), ((3, 3), lazy.float64)]
)
def test_arange(args: tuple[float, ...], of: lazy.dtype) -> None:
    got = lazy.arange(*args, dtype=of)
    assert got.dtype is of
    np.testing.assert_array_equal(got.numpy().astype(np.float64), np.arange(*args, dtype=np.float64))


def test_fills() -> None:
    assert lazy.iota((2, 3), 1, lazy.int32).tolist() == [[0, 1, 2]] * 2
    assert lazy.ones(2, lazy.bool).tolist() == [True, True]
    x = lazy.zeros((2,), lazy.bfloat16)
    assert lazy.full_like(x, 3).tolist() == [3, 3] and lazy.ones_like(x, lazy.uint8).dtype is lazy.uint8 and lazy.zeros_like(x).shape == (2,)
    assert lazy.full((), float("nan")).tolist() != lazy.full((), float("nan")).tolist()
    assert lazy.full((2,), 2**64 - 1, lazy.uint64).tolist() == [2**64 - 1] * 2
    assert np.signbit(lazy.full((), -0.0).numpy())


_A, _B = lazy.zeros((2, 3)), lazy.zeros((4, 5))
_INT, _BOOL, _F8 = lazy.zeros(2, lazy.int32), lazy.zeros(2, lazy.bool), lazy.zeros(2, lazy.float8)

_REFUSED = [
    (ShapeError, lambda: _A + _B),
    (DTypeError, lambda: lazy.zeros(2) + _INT),
    (DTypeError, lambda: _INT + 1.5),
    (ArgumentError, lambda: lazy.zeros(2, lazy.uint8) + 256),
    (DTypeError, lambda: _F8 * _F8),
    (DTypeError, lambda: _A & _A),
    (DTypeError, lambda: lazy.logical_and(_INT, _INT)),
    (DTypeError, lambda: lazy.tanh(_INT)),
    (DTypeError, lambda: lazy.where(_INT, _INT, _INT)),
    (DTypeError, lambda: _INT.all()),
    (DTypeError, lambda: _BOOL.mean()),
    (DTypeError, lambda: _BOOL.sum()),
    (DTypeError, lambda: _A.bitcast(lazy.uint8)),
    (DTypeError, lambda: _A.cast("float32")),
    (DTypeError, lambda: lazy.rand(3, dtype=lazy.int32)),
    (DTypeError, lambda: _A.gather(0, lazy.zeros(2))),
    (DTypeError, lambda: _A[_A]),
    (ShapeError, lambda: _A[lazy.zeros(3, lazy.bool)]),
    (ShapeError, lambda: _A[_BOOL, lazy.zeros(2, lazy.bool)]),
    (ArgumentError, lambda: _A[[0], [0], [0]]),
    (ArgumentError, lambda: _A[2, [0]]),
    (DTypeError, lambda: lazy.matmul(_A, _A.transpose(0, 1), dtype=lazy.int32)),
    (ShapeError, lambda: _A @ _B),
    (ShapeError, lambda: lazy.full(2, _A)),
    (ShapeError, lambda: lazy.dot_general(_A, _B, ((0,), (0,)))),
    (ShapeError, lambda: lazy.dot_general(_A, _A, ((2,), (0,)))),
    (ShapeError, lambda: _A.reshape(4)),
    (ShapeError, lambda: _A.reshape((-1, 4))),
    (ShapeError, lambda: _A.expand((3, 3))),
    (ShapeError, lambda: _A.squeeze(0)),
    (ShapeError, lambda: _A.split(0, 0)),
    (ShapeError, lambda: _A.split([1, 2], 0)),
    (ShapeError, lambda: lazy.concatenate([_A, _B], 0)),
    (ShapeError, lambda: lazy.zeros((0, 2)).max(0)),
    (ArgumentError, lambda: lazy.concatenate([], 0)),
    (ArgumentError, lambda: _A.permute(0)),
    (ArgumentError, lambda: _A.sum(2)),
    (ArgumentError, lambda: _A.sum((0, -2))),
    (ArgumentError, lambda: _A.pad([(0, 0)])),
    (ArgumentError, lambda: _A[2]),
    (ArgumentError, lambda: _A[0, 0, 0]),
    (ArgumentError, lambda: _A[::0]),
    (ArgumentError, lambda: _A.flatten(1, 0)),
    (ArgumentError, lambda: bool(_A)),
    (ArgumentError, lambda: len(lazy.zeros(()))),
    (ArgumentError, lambda: lazy.arange(0, 3, 0)),
    (ArgumentError, lambda: lazy.Tensor("text")),
    (ArgumentError, lambda: lazy.Tensor([[1], [2, 3]])),
    (ArgumentError, lambda: lazy.Tensor([300], dtype=lazy.uint8)),
    (ArgumentError, lambda: lazy.device("tpu")),
    (DTypeError, lambda: lazy.Tensor(np.zeros(2, np.uint16))),
    (TypeError, lambda: iter(_A)),
]


@pytest.mark.parametrize("case", range(len(_REFUSED)))
def test_illegal_operations_are_refused_when_recorded(case: int) -> None:
    kind, record = _REFUSED[case]
    before = CACHE.compiled
    with pytest.raises(kind) as caught:
        record()
    assert CACHE.compiled == before
    if kind is not TypeError:
        place, *marked, sentence = str(caught.value).split("\n")
        assert place.startswith(__file__) and len(marked) == 2 and marked[1].strip(" ^") == ""
        assert ": expected " in sentence and sentence.endswith(".")


def test_methods_come_from_the_registry() -> None:
    x = lazy.Tensor([0.5])
    for name in ("tanh", "sum", "matmul", "reshape", "cast", "softmax", "__getitem__", "__add__"):
        assert getattr(lazy.Tensor, name) is TENSOR_METHOD_REGISTRY.methods[name]
    assert x.tanh().tolist() == lazy.tanh(x).tolist()


def test_a_long_chain_is_recorded_evaluated_and_freed() -> None:
    x = lazy.zeros((1,))
    for _ in range(2000):
        x = x.reshape((1, 1)).reshape(1)
    assert x.tolist() == [0.0]
    for _ in range(100_000):
        x = -x
    del x
    gc.collect()


def test_the_public_names() -> None:
    assert lazy.__all__ == sorted(lazy.__all__)
    for name in lazy.__all__:
        public = getattr(lazy, name)
        assert public.__doc__, name


def test_every_error_is_a_tripy_exception_and_the_package_has_its_version() -> None:
    with pytest.raises(lazy.TripyException, match=": expected "):
        lazy.zeros((2,)) + lazy.zeros((3,))
    assert lazy.__version__ == fusible.__version__


def test_types_for_annotations_hold_what_functions_take() -> None:
    size = lazy.DimensionSize(4)
    assert all(isinstance(given, lazy.types.TensorLike) for given in (lazy.ones(2), size, 2, 2.5, True))
    assert not isinstance("2", lazy.types.TensorLike)
    assert isinstance(4, lazy.types.IntLike) and isinstance(size, lazy.types.IntLike) and not isinstance(lazy.ones(2), lazy.types.IntLike)
    assert get_args(lazy.types.ShapeLike) == (lazy.types.IntLike,)


COPIED: dict[str, Callable[[Any], Any]] = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}
DTYPES = [getattr(lazy, name) for name in lazy.__all__ if isinstance(getattr(lazy, name), lazy.dtype) and name not in ("floating", "integer")]


@pytest.mark.parametrize("way", COPIED)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_a_copy_of_a_tensor_has_its_value(way: str, of: lazy.dtype) -> None:
    x = lazy.Tensor(lazy.Tensor([0.0, 1.0, 3.0]).cast(of).numpy(), device=lazy.device("cpu"), name="x")
    for tensor in (x, lazy.concatenate([x, x], 0), lazy.concatenate([x, x], 0).eval()):  # the second has none yet
        made = COPIED[way](tensor)
        assert (made.dtype, made.shape, str(made.device), made.name) == (of, tensor.shape, str(tensor.device), tensor.name)
        assert made is not tensor and made.numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("way", COPIED)
def test_a_copy_in_a_function_that_is_compiled_is_the_same_value(way: str) -> None:
    if way == "pickle":
        with pytest.raises(FusibleError):
            lazy.compile(lambda x: COPIED[way](x * 2.0), args=[lazy.InputInfo((2,), lazy.float32)])
    else:
        doubled = lazy.compile(lambda x: COPIED[way](x * 2.0) + 1.0, args=[lazy.InputInfo((2,), lazy.float32)])
        assert doubled(lazy.ones((2,))).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("way", COPIED)
def test_a_copy_of_what_holds_tensors_has_their_values(way: str) -> None:
    module = lazy.Sequential(lazy.Linear(2, 3), lazy.Linear(3, 3))
    module[0].initialize_dummy_parameters()
    made = COPIED[way](module)
    assert made[0](lazy.ones((1, 2))).tolist() == module[0](lazy.ones((1, 2))).tolist()
    assert isinstance(made[1].weight, lazy.DefaultParameter) and made[1].weight.shape == (3, 3)
    size = COPIED[way](lazy.DimensionSize(4))
    assert type(size) is lazy.DimensionSize and size.tolist() == 4 and lazy.ones((size, 2)).shape == (4, 2)  # pyright: ignore[reportArgumentType]


def test_an_executable_is_copied_and_saved_but_not_pickled() -> None:
    executable = lazy.compile(lambda x: x + 1.0, args=[lazy.InputInfo(((1, 2, 4), 2), lazy.float32)])
    for way in ("copy", "deepcopy"):
        made = COPIED[way](executable)
        assert made(lazy.ones((3, 2))).tolist() == [[2.0, 2.0]] * 3
        made.stream = lazy.Stream()
        assert executable.stream is not made.stream
    with pytest.raises(
        NotServedError, match=r"^a pickle of the Executable .*: expected a file of its own, got a pickle; write it by its save\(path\)"
    ):
        pickle.dumps({"executable": executable})
