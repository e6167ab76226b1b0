"""Every operation of the table with all of its dimensions dynamic, in this process and from a file, against its static self."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lazy_op_table import TABLE, Op

from fusible import lazy

_REORDERED = {"cumsum": 9}
"""Operations that a file computes in another order, and the length of their longest sum."""


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_dynamic_dimensions_change_no_bit(op: Op, tmp_path: Path) -> None:
    operands = max(op.samples(op.dtypes[0], np.random.default_rng(0)), key=lambda sample: sum(x.size for x in sample))
    fixed = [lazy.InputInfo(x.shape, lazy.dtypes.from_numpy(x.dtype)) for x in operands]
    # A dynamic size is never taken to be 1, so what broadcasts stays fixed.
    infos = [lazy.InputInfo(tuple((2, n, n + 3) if n > 1 else n for n in info.shape), info.dtype) for info in fixed]
    executable = lazy.compile(op.call, args=infos)
    assert ("?" in executable.stablehlo.text) == any(n > 1 for x in operands for n in x.shape)
    executable.save(tmp_path / "program")
    want = lazy.compile(op.call, args=fixed)(*operands)
    for run in (executable, lazy.Executable.load(tmp_path / "program")):
        got = run(*operands)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if run is not executable and op.name in _REORDERED:
            # Each running sum of n values has at most n roundings of at most the sum of their magnitudes.
            bound = _REORDERED[op.name] * np.finfo(np.float32).eps * np.abs(operands[0]).sum()
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=bound)
        else:
            np.testing.assert_array_equal(_wide(got), _wide(want))


def _wide(x: lazy.Tensor) -> np.ndarray:
    """The values where NaN equals NaN: of float8 exactly widened, for numpy does not know that theirs are."""
    return x.numpy().astype(np.float32) if x.dtype.is_float8 else x.numpy()
