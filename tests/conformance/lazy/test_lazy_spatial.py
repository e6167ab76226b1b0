"""Windows, sampling, padding, order and cuts: compiled and eager, and indexing with any index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_lazy_operations as operations
from lazy_op_table import Op, Operands
from lazy_spatial_table import SPATIAL

from fusible import lazy
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.passes import PASSES
from fusible.lazy.trace.checker import check_trace

_FAMILIES = {op.name.split()[0]: [o for o in SPATIAL if o.name.split()[0] == op.name.split()[0]] for op in SPATIAL}


@pytest.mark.parametrize("family", _FAMILIES)
def test_agrees_with_its_reference(family: str) -> None:
    """All records, dtypes and samples of a family in one program: compiling is most of the time that a program takes."""
    rng = np.random.default_rng(len(family))
    cases = [(op, of, operands) for op in _FAMILIES[family] for of in op.dtypes for operands in op.samples(of, rng)]
    outputs = [op.call(*map(lazy.Tensor, operands)) for op, _, operands in cases]
    flat = check_flat_ir(check_trace(lazy.Trace(outputs)).to_flat_ir())
    for run in PASSES.values():
        check_flat_ir(run(flat))
    for (op, of, operands), recorded, computed in zip(cases, outputs, lazy.compile(lambda: outputs)(), strict=True):
        got, want = computed.numpy(), _want(op, operands)
        assert got.shape == recorded.shape == want.shape and computed.dtype is recorded.dtype, (op.name, of)
        _agree(op, of, operands, got, want)


def _want(op: Op, operands: Operands) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(op.reference(*map(operations._wide, operands)))


def _agree(op: Op, of: lazy.dtype, operands: Operands, got: np.ndarray, want: np.ndarray) -> None:
    try:
        operations._agree(op, of, operands, got, want)
    except AssertionError as error:
        error.add_note(f"{op.name} of {of} on shapes {[x.shape for x in operands]}")
        raise


@pytest.mark.parametrize("family", _FAMILIES)
def test_agrees_when_evaluated_at_once(family: str) -> None:
    op = _FAMILIES[family][0]
    of = op.dtypes[-1]
    operands = op.samples(of, np.random.default_rng(3))[0]
    _agree(op, of, operands, op.call(*map(lazy.Tensor, operands)).numpy(), _want(op, operands))


def _random_index(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Ints within bounds, slices far beyond them in either direction, None anywhere, and perhaps one ellipsis."""

    def bound(n: int) -> int | None:
        return None if rng.random() < 0.3 else int(rng.integers(-2 * n - 3, 2 * n + 4))

    items: list[Any] = []
    for n in shape[: int(rng.integers(0, len(shape) + 1))]:
        while rng.random() < 0.2:
            items.append(None)
        if n and rng.random() < 0.3:
            items.append(int(rng.integers(-n, n)))
        else:
            step = int(rng.choice([-7, -3, -2, -1, 1, 2, 3, 7]))
            items.append(slice(bound(n), bound(n), None if rng.random() < 0.3 else step))
    if rng.random() < 0.4:
        items.append(Ellipsis)
    return items[0] if len(items) == 1 and rng.random() < 0.5 else tuple(items)


@pytest.mark.parametrize("seed", range(4))
def test_indexing_is_numpys_beyond_every_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(40):
        shape = tuple(int(n) for n in rng.integers(0, 6, rng.integers(1, 5)))
        x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        index = _random_index(rng, shape)
        cases.append((x, index, lazy.Tensor(x)[index]))
    outputs = [output for *_, output in cases]
    check_flat_ir(lazy.Trace(outputs).to_flat_ir())
    for (x, index, got), computed in zip(cases, lazy.compile(lambda: outputs)(), strict=True):
        assert got.shape == x[index].shape, (x.shape, index)
        np.testing.assert_array_equal(computed.numpy(), x[index], err_msg=f"{x.shape} {index}")


def test_outputs_of_one_operation_are_evaluated_together() -> None:
    values, indices = (lazy.Tensor([3.0, 1.0, 2.0]) * 2).topk(2, 0)
    shifted = values + indices.cast(lazy.float32)
    assert indices.tolist() == [0, 2]
    assert type(values.trace_tensor.producer).__name__ == "Storage"
    assert values.tolist() == [6.0, 4.0] and shifted.tolist() == [6.0, 6.0]


def test_compiled_functions_return_some_or_all_outputs() -> None:
    info = lazy.InputInfo((2, 3), lazy.float32)
    x = np.array([[1, 3, 2], [5, 4, 6]], np.float32)
    values, indices = lazy.compile(lambda t: t.topk(2, 1), args=[info])(x)
    assert values.numpy().tolist() == [[3, 2], [6, 5]] and indices.numpy().tolist() == [[1, 2], [2, 0]]
    only = lazy.compile(lambda t: lazy.topk(t, 1, 0)[1], args=[info])(x)
    assert only.numpy().tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(("mode", "align"), [("linear", False), ("linear", True), ("cubic", False), ("nearest", False)])
def test_both_overloads_of_resize_agree_by_position_and_by_keyword(mode: str, align: bool) -> None:
    x = lazy.Tensor(np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32))
    results = [
        lazy.resize(x, (1, 2, 8, 10), mode, align),
        lazy.resize(x, output_shape=[1, 2, 8, 10], mode=mode, align_corners=align),
        lazy.resize(x, (1.0, 1.0, 2.0, 2.0), mode, align),
        lazy.resize(x, scales=(1, 1, 2, 2), mode=mode, align_corners=align),
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result.numpy(), results[0].numpy())
