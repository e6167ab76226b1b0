"""Every operation against numpy in float64, over dtypes and odd shapes, each sample in one compiled program."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lazy_op_table import TABLE, Op

from fusible import lazy
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.passes import PASSES
from fusible.lazy.trace.checker import check_trace

_CASES = [(op, of) for op in TABLE for of in op.dtypes]


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if lazy.dtypes.from_numpy(x.dtype).is_floating else x


@pytest.mark.parametrize(("op", "of"), _CASES, ids=[f"{op.name}-{of}" for op, of in _CASES])
def test_agrees_with_numpy(op: Op, of: lazy.dtype) -> None:
    rng = np.random.default_rng(sum(map(ord, op.name + of.name)))
    samples = op.samples(of, rng)
    inputs = [[lazy.Tensor(x) for x in operands] for operands in samples]
    outputs = [op.call(*operands) for operands in inputs]
    trace = check_trace(lazy.Trace(outputs))
    flat = check_flat_ir(trace.to_flat_ir())
    for run in PASSES.values():
        flat = check_flat_ir(run(flat))
    executable = lazy.compile(lambda: outputs)
    for operands, output, info in zip(samples, executable(), executable.output_infos, strict=True):
        with np.errstate(all="ignore"):
            want = np.asarray(op.reference(*(_wide(x) for x in operands)))
        got = output.numpy()
        assert got.shape == want.shape == info.shape
        assert output.dtype is info.dtype
        _agree(op, of, operands, got, want)


def _agree(op: Op, of: lazy.dtype, operands: list[np.ndarray], got: np.ndarray, want: np.ndarray) -> None:
    if not lazy.dtypes.from_numpy(got.dtype).is_floating:
        assert got.dtype == want.dtype
        if got.dtype == lazy.int4.numpy:
            got, want = got.astype(np.int8), want.astype(np.int8)
        if lazy.dtypes.from_numpy(got.dtype).is_float8:
            number = ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
            got, want = got[number], want[number]
        assert np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{got.itemsize}"))
        return
    with np.errstate(all="ignore"):
        rounded = want.astype(of.numpy).astype(np.float64)
        wide = got.astype(np.float64)
        size = np.abs(rounded) if op.scale is None else np.maximum(np.abs(rounded), op.scale(*operands))
        allowed = op.ulps * float(ml_dtypes.finfo(of.numpy).eps) * size
        same = (wide == rounded) | (np.isnan(wide) & np.isnan(rounded))
        close = np.isfinite(wide) & np.isfinite(rounded) & (np.abs(wide - rounded) <= allowed)
    assert (same | close).all(), f"{got} against {want}"
