"""Engines on the same programs: XLA, the reference interpreter of StableHLO, and IREE where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lazy_op_table import TABLE, Op
from reference_interpreter import interpret

from fusible import lazy
from fusible.errors import CompileError
from fusible.lazy.engine.engines import ENGINES
from fusible.lazy.engine.iree import _errors
from fusible.lazy.engine.pjrt import PJRT
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES, function_deduplication

Array = np.ndarray[Any, Any]

_SAMPLES = 2


def _cases(every: int) -> list[tuple[Op, lazy.dtype]]:
    """Each ``every``-th operation of the table, on its first dtype and on one of its others, which changes from operation to operation."""
    cases = []
    for i, op in enumerate(TABLE[::every]):
        cases += [(op, of) for of in dict.fromkeys((op.dtypes[0], op.dtypes[i % len(op.dtypes)]))]
    return cases


def _program(op: Op, of: lazy.dtype) -> tuple[FlatIR, list[Array], list[list[Array]]] | None:
    """One program of a few samples with elements, what it reads, and the operands of every output."""
    rng = np.random.default_rng(0)
    samples = [operands for operands in op.samples(of, rng) if all(x.size for x in operands)][-_SAMPLES:]
    outputs = [op.call(*map(lazy.Tensor, operands)) for operands in samples]
    trace = lazy.Trace(outputs)
    return trace.to_flat_ir(), [storage.data for storage in trace.storages], samples


def _xla(flat: FlatIR, inputs: list[Array]) -> list[Array]:
    types = [[(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs)]
    return PJRT().compile(flat.to_stablehlo().bytecode, *types)(inputs)


def _agree(op: Op, of: lazy.dtype, operands: list[Array], got: Array, want: Array) -> None:
    """Each of two engines is within the record's error of the reference, so they are within twice that of one another."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if lazy.dtypes.from_numpy(got.dtype).is_float8:  # bit for bit, but for the sign of NaN
        got, want = (np.where(np.isnan(x.astype(np.float32)), 0x7F, x.view(np.uint8)) for x in (got, want))
    if not lazy.dtypes.from_numpy(got.dtype).is_floating:
        assert got.tobytes() == want.tobytes(), f"{op.name} {of}: {got} against {want}"
        return
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), want.astype(np.float64)
        size = np.maximum(np.abs(a), np.abs(b))
        if op.scale is not None:
            size = np.maximum(size, op.scale(*operands))
        close = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= 2 * op.ulps * float(ml_dtypes.finfo(of.numpy).eps) * size)
        assert ((a == b) | (np.isnan(a) & np.isnan(b)) | close).all(), f"{op.name} {of}: {got} against {want}"


def test_the_interpreter_agrees_with_xla(tmp_path: Path) -> None:
    cases = _cases(every=1)
    made = [_program(op, of) for op, of in cases]
    optimized = [(flat.run(*DEFAULT_PASSES), inputs) for flat, inputs, _ in made]
    for (op, of), (flat, inputs), third, (*_, samples) in zip(cases, optimized, interpret(optimized, tmp_path), made, strict=True):
        for operands, got, want in zip(samples, _xla(flat, inputs), third, strict=True):
            _agree(op, of, operands, got, want)


def test_the_interpreter_agrees_on_calls_of_functions(tmp_path: Path) -> None:
    x = lazy.Tensor(np.linspace(-500, 500, 12, dtype=np.float32).reshape(3, 4))
    flat = lazy.Trace([(x * float(i)).cast(lazy.float8) for i in (1, 2)]).to_flat_ir().run(function_deduplication)
    assert flat.functions
    (third,) = interpret([(flat, [x.numpy()])], tmp_path)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(_xla(flat, [x.numpy()]), third, strict=True))


_NO_IREE = ENGINES["iree"].unavailable()


@pytest.fixture
def iree() -> Iterator[None]:
    if _NO_IREE:
        pytest.skip(_NO_IREE)
    lazy.config.engine = "iree"
    yield
    del lazy.config.engine


@pytest.mark.slow
@pytest.mark.skipif(bool(_NO_IREE), reason=str(_NO_IREE))
@pytest.mark.parametrize(("op", "of"), _cases(every=6), ids=lambda v: getattr(v, "name", str(v)))
def test_iree_agrees_with_xla(op: Op, of: lazy.dtype) -> None:
    flat, inputs, samples = _program(op, of)
    flat = flat.run(*DEFAULT_PASSES)
    types = [[(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs)]
    program = ENGINES["iree"].compile(flat.to_stablehlo().portable, *types)
    for operands, got, want in zip(samples, program(inputs), _xla(flat, inputs), strict=True):
        _agree(op, of, operands, got, want)


def test_iree_evaluates_and_compiles_what_xla_does(iree: None) -> None:
    x = lazy.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert (x @ x.transpose(0, 1)).tolist() == (x.numpy() @ x.numpy().T).tolist()
    run = lazy.compile(lambda a: (a + a, a > 3.0), args=[lazy.InputInfo((3, 4), lazy.bfloat16)])
    double, above = run(x.numpy().astype(ml_dtypes.bfloat16))
    assert double.numpy().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(double.numpy().astype(np.float32), 2 * x.numpy())
    np.testing.assert_array_equal(above.numpy(), x.numpy() > 3)


def test_what_iree_refuses_is_one_sentence(iree: None) -> None:
    with pytest.raises(CompileError, match="a recorded program: expected a module that IREE compiles, got a tensor of int4"):
        lazy.Tensor([1, 2]).cast(lazy.int4).eval()


def test_what_irees_compiler_says_is_cut_to_its_errors() -> None:
    said = "Error invoking tool\nDiagnostics:\n  a.py:7:13: error: failed to legalize 'arith.extf'\n  x.cast(y)\n   ^\nInvoked with: iree-compile -"
    assert _errors(said) == "a.py:7:13: error: failed to legalize 'arith.extf'"
    assert _errors("out of memory") == "out of memory"


def test_iree_reads_its_own_binary(iree: None) -> None:
    flat = lazy.Trace([lazy.full((2,), 3.0).tanh()]).to_flat_ir()
    outputs = [((2,), lazy.float32)]
    program = ENGINES["iree"].compile(flat.to_stablehlo().portable, [], outputs)
    again = ENGINES["iree"].load(program.serialize(), [], outputs)
    assert again([])[0].tobytes() == program([])[0].tobytes()
