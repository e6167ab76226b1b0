"""Dynamic dimensions: every operation on sizes that a call determines, in this process and from a file, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, CompileError, DTypeError, ShapeError
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.trace.checker import check_trace

_F32 = lazy.float32
_D = (1, 4, 9)
_N, _M = lazy.NamedDimension("n", *_D), lazy.NamedDimension("m", *_D)


def _info(*shape: Any) -> lazy.InputInfo:
    return lazy.InputInfo(shape, _F32)


def _softmax(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    grown = np.exp(x - x.max(axis=axis, keepdims=True))
    return grown / grown.sum(axis=axis, keepdims=True)


def _slices(x: Any) -> tuple[Any, ...]:
    n = x.shape[0]
    return (x[1:], x[:-1], x[::2], x[::-1], x[::-2], x[-1], x[0], x[n - 1], x[:2], x[-3:], x[:, :n], x[n // 2 :], x[2:0:-1], x[None, ..., 0], x[-n])


def _reshapes(x: lazy.Tensor) -> tuple[lazy.Tensor, ...]:
    n, m = x.shape
    return (
        x.reshape((-1,)),
        x.reshape((n, -1, 2)),
        x.reshape((n * 4, m // 4)),
        x.flatten(),
        x.unsqueeze(0).squeeze(0),
        x.reshape((-1, 4)),
        lazy.ones((x.size,)),
    )


_Function = Callable[..., tuple[Any, ...]]

_CASES: dict[str, tuple[_Function, _Function, list[Any], list[tuple[Any, ...]]]] = {
    "slices": (_slices, _slices, [_info(_D, 9)], [((1, 9),), ((4, 9),), ((5, 9),)]),
    "reshapes": (
        _reshapes,
        lambda x: (x.ravel(), x.reshape(len(x), 4, 2), x.reshape(-1, 2), x.ravel(), x, x.reshape(-1, 4), np.ones(x.size)),
        [_info(_D, 8)],
        [((1, 8),), ((9, 8),)],
    ),
    "two arguments": (
        lambda x, y: (x + y, lazy.concatenate([x, y, x], 0), x @ y.transpose(0, 1), lazy.stack([x, y], 1), lazy.where(x > y, x, 0.0), x + y[:1]),
        lambda x, y: (x + y, np.concatenate([x, y, x]), x @ y.T, np.stack([x, y], 1), np.where(x > y, x, 0), x + y[:1]),
        [_info(_D, 3), _info(_D, 3)],
        [((1, 3), (1, 3)), ((5, 3), (5, 3))],
    ),
    "reductions": (
        lambda x, y: (
            x @ y,
            x * x.shape[0] + x.shape[1],
            x.mean(),
            x.mean(1),
            x.sum(0),
            x.max(1, keepdim=True),
            x.argmax(0),
            x.cumsum(0),
            x.cumsum(1),
        ),
        lambda x, y: (
            x @ y,
            x * x.shape[0] + x.shape[1],
            x.mean(),
            x.mean(1),
            x.sum(0),
            x.max(1, keepdims=True),
            x.argmax(0),
            x.cumsum(0),
            x.cumsum(1),
        ),
        [_info(_N, _M), _info(_M, 2)],
        [((1, 3), (3, 2)), ((4, 2), (2, 2)), ((9, 1), (1, 2))],
    ),
    "fills": (
        lambda x: (
            x.pad([(1, 2), (0, 1)]),
            lazy.zeros_like(x) + x.sum(),
            lazy.softmax(x, 0),
            lazy.softmax(x),
            lazy.iota(x.shape, 0),
            lazy.full((x.shape[0], 3), 2.5),
            x.gather(1, lazy.arange(x.shape[0], dtype=lazy.int32)),
            x.gather(0, lazy.zeros((2,), lazy.int32) - 1),
        ),
        lambda x: (
            np.pad(x, [(1, 2), (0, 1)]),
            np.full_like(x, x.sum()),
            _softmax(x, 0),
            _softmax(x),
            np.indices(x.shape)[0],
            np.full((len(x), 3), 2.5),
            x[:, : len(x)],
            x[[-1, -1]],
        ),
        [_info(_D, 9)],
        [((1, 9),), ((4, 9),)],
    ),
    "ranges": (
        lambda x: (
            lazy.arange(x.shape[0], 0, -1),
            lazy.arange(0, x.shape[0], 2),
            lazy.arange(1, x.shape[0] * 3, 2, dtype=lazy.int32),
            x.unsqueeze(1).expand((-1, 3, -1)),
            lazy.ones((1, x.shape[1])).expand((x.shape[0], -1)),
            lazy.ones(((x.shape[0] - 6) // x.shape[1] + 6,)),
            x.permute((1, 0)),
            x.flip(0),
        ),
        lambda x: (
            np.arange(len(x), 0, -1),
            np.arange(0, len(x), 2),
            np.arange(1, 3 * len(x), 2),
            np.repeat(x[:, None], 3, 1),
            np.ones(x.shape),
            np.ones((x.shape[0] - 6) // x.shape[1] + 6),
            x.T,
            x[::-1],
        ),
        [_info(_D, (1, 2, 5))],
        [((1, 2),), ((4, 1),), ((9, 5),)],
    ),
    "batched products": (
        lambda x, y: (x @ y, x.split(2, 2)[1], x.split([1, x.shape[1] - 1], 1)[1], x * lazy.DimensionSize(2)),
        lambda x, y: (x @ y, x[:, :, 2:], x[:, 1:], x * 2),
        [_info(_D, 3, 4), _info(_N, 4, 2)],
        [((1, 3, 4), (1, 4, 2)), ((3, 3, 4), (3, 4, 2))],
    ),
    "sizes as inputs": (
        lambda x, n: (
            lazy.arange(n) + x.sum(),
            x[:n],
            lazy.full((n, n), 2.0),
            x.reshape((n, -1)),
            x.shape[0] * n + lazy.zeros((2,), lazy.int32),
            n + 0,
        ),
        lambda x, n: (np.arange(n) + x.sum(), x[:n], np.full((n, n), 2.0), x.reshape(n, -1), np.full(2, len(x) * n), np.array(n)),
        [_info((2, 4, 8), 3), lazy.DimensionInputInfo((1, 2, 4))],
        [((2, 3), 2), ((6, 3), 3), ((8, 3), 1)],
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_dynamic_program_computes_what_numpy_does_and_so_does_its_file(name: str, tmp_path: Path) -> None:
    function, reference, infos, calls = _CASES[name]
    executable = lazy.compile(function, args=infos)
    check_trace(executable.trace)
    check_flat_ir(check_flat_ir(executable.flat_ir).run(*DEFAULT_PASSES))
    executable.save(tmp_path / "program")
    loaded = lazy.Executable.load(tmp_path / "program")
    rng = np.random.default_rng(0)
    for shapes in calls:
        args = [s if isinstance(s, int) else rng.standard_normal(s).astype(np.float32) for s in shapes]
        wanted = reference(*[a if isinstance(a, int) else a.astype(np.float64) for a in args])
        # The longest reduction is over the 81 elements of the largest input, each below 4 or a product of two such.
        bound = 81 * 16 * np.finfo(np.float32).eps
        for got, again, want in zip(executable(*args), loaded(*args), wanted, strict=True):
            assert got.shape == again.shape == want.shape
            np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=bound, atol=bound)
            np.testing.assert_allclose(again.numpy().astype(np.float64), want, rtol=bound, atol=bound)


def test_ranges_to_a_size_step_by_fractions_that_are_exact() -> None:
    def function(x: lazy.Tensor) -> tuple[lazy.Tensor, ...]:
        n = x.shape[0]
        return lazy.arange(0.0, n / 2, 0.5), lazy.arange(n, 0, -0.75), lazy.arange(2.0, n)

    executable = lazy.compile(function, args=[_info((2, 4, 9))])
    for n in (2, 3, 4, 9):
        wanted = np.arange(0, n // 2, 0.5), np.arange(n, 0, -0.75), np.arange(2.0, n)
        assert [t.tolist() for t in executable(np.ones(n, np.float32))] == [t.tolist() for t in wanted]
    for ends in ((0, 0.1), (0.5, 1)):
        with pytest.raises(ArgumentError, match="whole numbers as ends beside a size, and a step that is a multiple of 1/1048576"):
            lazy.compile(lambda x, ends=ends: lazy.arange(ends[0], x.shape[0], ends[1]), args=[_info((2, 4, 9))])


def test_the_usual_sizes_are_compiled_ahead_and_no_sizes_twice() -> None:
    calls: list[int] = []

    def function(x: lazy.Tensor) -> lazy.Tensor:
        calls.append(1)
        return x * 1.0625 + x.shape[0]

    executable = lazy.compile(function, args=[_info(_D)])
    before = CACHE.compiled
    for n, compiled in ((4, 0), (3, 1), (4, 1), (3, 1), (9, 2)):
        assert executable(np.full(n, 16, np.float32)).tolist() == [17.0 + n] * n
        assert executable.run(np.full(n, 16, np.float32))[0].numpy().tolist() == [17.0 + n] * n
        assert CACHE.compiled - before == compiled
    assert calls == [1]


def test_the_sizes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusible.lazy.compilation.executable._CAPACITY", 3)
    executable = lazy.compile(lambda x: x, args=[_info((0, 1, 99))])
    for n in (2, 3, 1, 0, 7):
        assert executable(np.ones(n, np.float32)).shape == (n,)
    assert list(executable._programs) == [(1,), (0,), (7,)]


_BATCH = lazy.NamedDimension("batch", 1, 2, 8)


def _rows(n: int, width: int = 3) -> np.ndarray:
    return np.ones((n, width), np.float32)


def test_sizes_of_a_call_are_checked() -> None:
    named = lazy.compile(lambda x, y: x.sum(0) + y.sum(0), args=[_info(_BATCH, 3), _info(_BATCH, 3)])
    free = lazy.compile(lambda x, y: x + y, args=[_info((1, 2, 8), 3), _info((1, 4, 8), 3)])
    halves = lazy.compile(lambda x: lazy.concatenate(x.split(2, 0), 1), args=[_info((2, 4, 8), 3)])
    fifth = lazy.compile(lambda x: x[4], args=[_info((2, 6, 8), 3)])
    fixed = lazy.compile(lambda x: x + lazy.ones((4, 3)), args=[_info((1, 4, 8), 3)])
    sized = lazy.compile(lambda x, n: x.reshape((n, -1)), args=[_info((2, 4, 8), 3), lazy.DimensionInputInfo((1, 2, 4))])
    here = f"{__file__}:{test_sizes_of_a_call_are_checked.__code__.co_firstlineno + 2}"
    where = r"of x of the executable test_sizes_of_a_call_are_checked.<locals>.<lambda>"
    squeezed = lazy.compile(lambda x: x.squeeze(0), args=[_info((1, 1, 8), 3)])
    refused: list[tuple[str, Callable[[], Any]]] = [
        (r"squeeze .*: expected x.0 == 1 \(of dimension 0 of x\)", lambda: squeezed(_rows(2))),
        (f"dimension 0 {where}: expected a size from 1 to 8, got 9; pass one within", lambda: free(_rows(9), _rows(1))),
        (f"dimension 0 {where}: expected a size from 1 to 8, got 0", lambda: named(_rows(0), _rows(1))),
        (r"x of .*: expected shape \(x.0, 3\), got \(2, 4\)", lambda: free(_rows(2, 4), _rows(2))),
        (r"x of .*: expected shape \(batch, 3\), got \(3,\)", lambda: named(np.ones(3, np.float32), _rows(2))),
        (r"equal sizes of dimension 0 of x and dimension 0 of y of .*, both named 'batch', got 2 and 3", lambda: named(_rows(2), _rows(3))),
        (
            rf"the operands of add at {here}: expected x.0 == y.0 \(of dimension 0 of x, dimension 0 of y\), got 3 and 4; pass tensors",
            lambda: free(_rows(3), _rows(4)),
        ),
        (r"concatenate.* at .*: expected .* == .* \(of dimension 0 of x\).*, got (3 and 2|2 and 3)", lambda: halves(_rows(5))),
        (r"an index into dimension 0 at .*: expected x.0 - 1 >= 4 \(of dimension 0 of x\), got 3 and 4", lambda: fifth(_rows(4))),
        (r"x.0 == 4 .* of the operands of add", lambda: fixed(_rows(1))),
        (r"\(3\*x.0 % n\) == 0 \(of dimension 0 of x, the size n\)", lambda: sized(_rows(7), 2)),
    ]
    for text, call in refused:
        with pytest.raises(ShapeError, match=text) as caught:
            call()
        assert str(caught.value).startswith(__file__)
    assert squeezed(_rows(1)).shape == (3,)
    assert free(_rows(5), _rows(5)).shape == (5, 3) and halves(_rows(6)).shape == (3, 6) and fifth(_rows(5)).shape == (3,)
    with pytest.raises(ArgumentError, match="n of the executable .*: expected a size from 1 to 4, got 5"):
        sized(_rows(5), 5)
    with pytest.raises(ArgumentError, match="n of the executable .*: expected a size from 1 to 4, got 0"):
        sized(_rows(5), 0)
    assert sized(_rows(8), lazy.DimensionSize(4)).shape == (4, 6) == sized.run(_rows(8), 4)[0].shape
    with pytest.raises(DTypeError, match="n of the executable .*: expected an int or a DimensionSize with a value, got 2.0"):
        sized(_rows(4), 2.0)


def test_sizes_that_never_agree_are_refused_when_compiled() -> None:
    refused: list[tuple[type[Exception], str, Callable[[lazy.Tensor], Any]]] = [
        (ShapeError, "the operands of add", lambda x: x + lazy.ones((10,))),
        (ShapeError, "the operands of add", lambda x: x + lazy.ones((x.shape[0] + 1,))),
        (ShapeError, "x.0 elements", lambda x: x.reshape((x.shape[0] + 1,))),
        (ShapeError, "sizes of at least 0", lambda x: lazy.zeros((x.shape[0] - 10,))),
        (ArgumentError, "a position from", lambda x: x[9]),
        (ArgumentError, "an int other than 0", lambda x: x[:: x.shape[0]]),
        (CompileError, r"index\(\) of the size x.0", lambda x: [x[i] for i in range(x.shape[0])]),
        (CompileError, r"index\(\) of the size x.0", lambda x: len(x)),
        (CompileError, r"int\(\) of the size", lambda x: int(x.shape[0])),
        (CompileError, "a size of an argument of a function being compiled", lambda x: x if x.shape[0] > 3 else -x),
        (CompileError, "a size of an argument of a function being compiled", lambda x: x.shape[0].tolist()),
    ]
    for kind, text, function in refused:
        with pytest.raises(kind, match=text) as caught:
            lazy.compile(function, args=[_info(_D)])
        assert str(caught.value).startswith(__file__), text
    with pytest.raises(ArgumentError, match="the dimension 'batch': expected one set of bounds"):
        lazy.compile(lambda x, y: x, args=[_info(_BATCH), _info(lazy.NamedDimension("batch", 1, 2, 9))])


def test_a_size_does_not_leave_its_function() -> None:
    kept: list[Any] = []
    lazy.compile(lambda x: kept.append(x.shape[0]) or x, args=[_info(_D)])
    for use in (lambda: lazy.zeros((kept[0],)).eval(), lambda: lazy.compile(lambda y: y * kept[0], args=[_info(2)])):
        with pytest.raises(CompileError, match="a size of an argument of a function being compiled"):
            use()


def test_bounds_that_leave_one_size_make_it_fixed() -> None:
    executable = lazy.compile(lambda x: x.reshape((-1,)), args=[_info((4, 4, 4), lazy.NamedDimension("w", 2, 2, 2))])
    assert executable.trace.inputs[0].shape == (4, 2) and executable.output_infos == [_info(8)]
    assert lazy.Bounds(2, 2, 2).is_static() and not lazy.Bounds(*_D).is_static()
    assert _info(_D, 3).shape_bounds == lazy.Bounds((1, 3), (4, 3), (9, 3))


def test_the_types_of_results_carry_bounds() -> None:
    executable = lazy.compile(lambda x: (x[1:], x @ x.transpose(0, 1), x.sum()), args=[_info(_D, 3)])
    assert executable.output_infos == [_info((0, 3, 8), 3), _info(_D, _D), _info()]
    assert executable.input_infos == {"x": _info(_D, 3)}


def test_usual_sizes_that_disagree_are_left_to_the_calls() -> None:
    executable = lazy.compile(lambda x, y: x + y, args=[_info((1, 2, 8)), _info((1, 4, 8))])
    assert not executable._programs and executable(_rows(1)[0], _rows(1)[0]).tolist() == [2.0] * 3


def test_donation_reuses_memory_of_dynamic_sizes() -> None:
    executable = lazy.compile(lambda x: x + 1.0, args=[lazy.InputInfo((_D, 1024), _F32, donate=True)])
    x = lazy.zeros((3, 1024)).eval()
    address = x.trace_tensor.producer.placed().unsafe_buffer_pointer()
    y = executable(x)
    assert y.trace_tensor.producer.buffer.unsafe_buffer_pointer() == address and y.numpy().sum() == 3072.0
    with pytest.raises(ArgumentError, match="donated"):
        x.numpy()
