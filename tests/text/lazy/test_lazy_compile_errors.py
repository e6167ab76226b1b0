"""What a failure of MLIR or of an engine shows: the user's line with carets, one sentence, why lowering made its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import CompileError, ExecutionError
from fusible.lazy.checks import CHECKS
from fusible.lazy.engine.engine import EngineRefusal
from fusible.lazy.engine.engines import ENGINES
from fusible.lazy.flat_ir.diagnostics import blamed, location_name
from fusible.lazy.flat_ir.op import FLAT_OPS, FlatIROp, emit
from fusible.lazy.flat_ir.ops import AddOp, ConvertOp, ReshapeOp
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.record import record
from fusible.lazy.trace.op import TRACE_OPS, TraceOp

_BEFORE = [(table, dict(table)) for table in (FLAT_OPS, TRACE_OPS)]

Lower = Callable[[Sequence[FlatIRTensor], Sequence[FlatIRTensor]], None]


class CustomCallToNothing(FlatIROp):
    """A call to a target that no engine has."""

    def to_mlir(self, mlir: Any, operands: Sequence[Any]) -> Any:
        return mlir.hlo.custom_call([mlir.type(self.outputs[0])], list(operands), "no_such_target")


class UnboundedOp(FlatIROp):
    """A result of another type than was recorded."""

    def to_mlir(self, mlir: Any, operands: Sequence[Any]) -> Any:
        return mlir.hlo.convert(mlir.ir.Type.parse("tensor<?xf32>"), operands[0])


class OddSliceOp(FlatIROp):
    """A slice beyond its operand, which the bindings build and verification refuses."""

    def to_mlir(self, mlir: Any, operands: Sequence[Any]) -> Any:
        return mlir.hlo.SliceOp(operands[0], mlir.ints([0]), mlir.ints([9]), mlir.ints([1]), results=[mlir.type(self.outputs[0])]).result


class Planted(TraceOp):
    """An operation whose lowering is given."""

    lower: Lower

    def infer(self, *inputs: Any) -> Any:
        return inputs[0].shape, inputs[0].dtype

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        self.lower(inputs, outputs)


for _table, _names in _BEFORE:  # what tests plant is no operation of the library
    for _name in [*_table]:
        if _name not in _names:
            del _table[_name]


def _mixed(inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
    wide = emit(ConvertOp, inputs, inputs[0].shape, lazy.float64, "show an error")
    AddOp([inputs[0], wide], list(outputs))


def _grown(inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
    wide = emit(ReshapeOp, inputs, (5,), inputs[0].dtype, "grow for no reason")
    AddOp([wide, wide], list(outputs))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted here is refused by the checks of every test before MLIR comes to refuse it."""
    monkeypatch.delitem(CHECKS, "FlatIR")


def _fails(lower: Lower) -> tuple[str, str]:
    """The user's lines of the error, and the rest of it."""
    x = lazy.Tensor(np.ones(4, np.float32))
    y = x.tanh() + record(Planted(lower), x)
    with pytest.raises(CompileError) as caught:
        y.eval()
    head, line, sentence = str(caught.value).replace(__file__, "user.py").partition("planted")
    return head, line + sentence


_FUNCTION = _fails.__code__.co_firstlineno + 3
_HEAD = f"user.py:{_FUNCTION}, in _fails\n    y = x.tanh() + record(Planted(lower), x)\n{' ' * 19}^^^^^^^^^^^^^^^^^^^^^^^^^\n"


def test_operands_that_do_not_fit_show_the_line_and_the_tensor_that_lowering_made(unchecked: None) -> None:
    head, text = _fails(_mixed)
    assert head == _HEAD
    sentence = "planted (AddOp): expected a valid StableHLO operation, got Verification failed: error: op requires the same element type"
    assert text.startswith(sentence)
    assert text.endswith("\n    t_inter1: [shape=(4,), dtype=(float64), loc=(gpu:0)]: introduced to show an error")
    assert len(text.split("\n")) == 2


def test_an_operation_that_lowering_introduced_shows_why(unchecked: None) -> None:
    head, text = _fails(_grown)
    assert head == _HEAD
    assert "its result is tensor<5xf32> where t2: [shape=(4,)" in text
    assert text.endswith("\n    t_inter1: [shape=(5,), dtype=(float32), loc=(gpu:0)]: introduced to grow for no reason")


def test_a_result_of_another_type_than_recorded_is_refused() -> None:
    head, text = _fails(lambda i, o: UnboundedOp(list(i), list(o)) and None)
    assert head == _HEAD
    assert text.startswith("planted (UnboundedOp): expected a valid StableHLO operation, got its result is tensor<?xf32> where t2: [shape=(4,)")


def test_what_only_verification_refuses_shows_the_line() -> None:
    head, text = _fails(lambda i, o: OddSliceOp(list(i), list(o)) and None)
    assert head == _HEAD
    assert "planted (OddSliceOp): expected a valid StableHLO operation, got" in text and "limit index 9 is larger" in text


def test_what_only_the_engine_refuses_shows_the_line() -> None:
    head, text = _fails(lambda i, o: CustomCallToNothing(list(i), list(o)) and None)
    assert head == _HEAD
    assert text.startswith("planted (CustomCallToNothing): expected a module that XLA compiles, got NOT_FOUND")


def test_a_diagnostic_that_names_no_operation_is_said_of_the_program() -> None:
    class Refusing(type(ENGINES["pjrt"])):
        def compile(self, *args: Any) -> Any:
            raise EngineRefusal("a module that it compiles", "a bad mood")

    ENGINES["refusing"] = Refusing()
    lazy.config.engine = "refusing"
    try:
        with pytest.raises(CompileError, match="a recorded program: expected a module that it compiles, got a bad mood; simplify"):
            lazy.ones((3,)).eval()
    finally:
        del lazy.config.engine, ENGINES["refusing"]


def test_a_diagnostic_is_mapped_by_tensor_names_or_line_and_column_or_a_symbol() -> None:
    x = lazy.Tensor(np.ones(4, np.float32))
    flat = lazy.Trace([x.tanh() + x.exp()]).to_flat_ir()
    tanh, exp, add = flat.ops
    line = test_a_diagnostic_is_mapped_by_tensor_names_or_line_and_column_or_a_symbol.__code__.co_firstlineno + 2
    assert location_name(add) == "binaryelementwise:t1,t2->t3"
    assert blamed(flat, 'loc("unaryelementwise:t0->t2"("user.py":3:4)): error: no') is exp
    assert blamed(flat, f"{__file__}:{line}:35: error: 'stablehlo.exponential' op") is exp
    assert blamed(flat, f'"{__file__}":{line}:24: error: no') is tanh
    assert blamed(flat, f"{__file__}:{line}:1: error: no") is None
    located = '%1 = custom_call @target(%0) loc("binaryelementwise:t1,t2->t3"("user.py":3:4))\n%2 = tanh loc("unaryelementwise:t0->t1"(unknown))'
    assert blamed(flat, "NOT_FOUND: target", located) is add
    assert blamed(flat, "NOT_FOUND: target", located + "\n" + located) is None


def test_extra_information_adds_the_program_and_the_diagnostic() -> None:
    lazy.config.extra_error_information = ("flat_ir", "diagnostic")
    try:
        _, text = _fails(lambda i, o: OddSliceOp(list(i), list(o)) and None)
    finally:
        del lazy.config.extra_error_information
    assert "==== Flat IR ====" in text
    marked = [row for row in text.split("\n") if row.startswith("-> ")]
    assert len(marked) == 1 and "OddSliceOp(t0)" in marked[0]
    assert '"planted:t0->t2"' in text


def test_an_execution_that_fails_is_one_sentence() -> None:
    huge = lazy.full((1 << 44,), 1.0) + lazy.Tensor(1.0)
    with pytest.raises(ExecutionError, match="a compiled program: expected a run without failure, got RESOURCE_EXHAUSTED"):
        huge.eval()
