"""The IRs: tables of operations, lowering, passes, checkers, and errors that name the user's line."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest

from fusible import lazy
from fusible.errors import ArgumentError, CompileError
from fusible.lazy.checks import CHECKS
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.op import FLAT_OPS, FlatIROp
from fusible.lazy.flat_ir.ops import AddOp, ConvertOp, TanhOp
from fusible.lazy.flat_ir.ops.call import CallOp, Function
from fusible.lazy.flat_ir.passes import PASSES, common_subexpression, dead_code
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.frontend.record import record
from fusible.lazy.ops.convolution import convolution, convolution_transpose
from fusible.lazy.trace.checker import check_trace
from fusible.lazy.trace.op import TRACE_OPS, TraceOp


def _program() -> lazy.FlatIR:
    x = lazy.Tensor(np.zeros((2, 3), np.float32))
    y = (x + 2.0) * (x + 2.0) - 2.0
    return lazy.Trace([y, lazy.softmax(y.cast(lazy.bfloat16))]).to_flat_ir()


def test_every_operation_is_a_documented_record() -> None:
    for table in (TRACE_OPS, FLAT_OPS):
        assert len(table) > 15
        for op in table.values():
            assert is_dataclass(op)
    for name, op in TRACE_OPS.items():
        assert op.__doc__ and name == op.__name__.lower()
        assert op.is_input or "to_flat_ir" in vars(op)


@pytest.mark.parametrize("base", [TraceOp, FlatIROp])
def test_an_operation_with_an_init_of_its_own_is_refused(base: type) -> None:
    """What it sets is in no key: programs would be shared by operations that compute something else."""
    before = dict(TRACE_OPS), dict(FLAT_OPS)
    with pytest.raises(ArgumentError, match="the attributes of the operation Scaled: expected fields, got an __init__; annotate them in the class"):
        type("Scaled", (base,), {"__init__": lambda self, factor: setattr(self, "factor", factor)})
    assert (dict(TRACE_OPS), dict(FLAT_OPS)) == before


class _Lowered(TraceOp):
    """Lowers as ``lower`` does."""

    lower: Any

    def to_flat_ir(self, inputs: Any, outputs: Any) -> None:
        self.lower(list(inputs), list(outputs))


class _Built(FlatIROp):
    build: Any

    def to_mlir(self, mlir: Any, operands: Any) -> Any:
        return self.build(mlir, *operands)


def _ill_built(build: Any) -> Any:
    return lambda inputs, outputs: _Built(inputs, outputs, build)


ILL_MADE = {
    "gives nothing": (_ill_built(lambda mlir, x: None), "its to_mlir gives NoneType where a value for each of its 1 outputs was recorded"),
    "gives two": (_ill_built(lambda mlir, x: [x, x]), "its to_mlir gives .*, .* where a value for each of its 1 outputs was recorded"),
    "gives an empty list": (_ill_built(lambda mlir, x: []), "its to_mlir gives nothing where a value for each of its 1 outputs was recorded"),
    "gives the operation": (_ill_built(lambda mlir, x: mlir.hlo.TanhOp(x)), "its to_mlir gives TanhOp where a value for each of its 1 outputs"),
    "lowers to nothing": (lambda inputs, outputs: None, r"to_flat_ir of _Lowered: expected operations that give each output, got none that has t1"),
    "lowers to what reads nothing": (
        lambda inputs, outputs: TanhOp([FlatIRTensor((2,), lazy.float32)], outputs),
        "to_flat_ir of _Lowered: expected operations that give each output, got none that has ",
    ),
}


@pytest.mark.parametrize("how", ILL_MADE)
def test_an_operation_that_is_made_wrongly_says_so(how: str) -> None:
    lower, said = ILL_MADE[how]
    with pytest.raises(CompileError, match=said):
        record(_Lowered(lower), lazy.ones((2,))).eval()


def test_constants_and_equal_operations_are_computed_once() -> None:
    flat = check_flat_ir(_program())
    once = check_flat_ir(common_subexpression(flat))
    count = {kind: [sum(type(op).__name__ == kind for op in f.ops) for f in (flat, once)] for kind in ("ConstantOp", "AddOp", "BroadcastOp")}
    assert count["AddOp"] == [2, 1]
    assert count["ConstantOp"][1] < count["ConstantOp"][0] and count["BroadcastOp"][1] < count["BroadcastOp"][0]
    assert str(common_subexpression(once)) == str(once)


def test_zero_and_negative_zero_are_not_one_constant() -> None:
    flat = common_subexpression(lazy.Trace([lazy.full((), 0.0), lazy.full((), -0.0), lazy.full((), 0.0, lazy.float64)]).to_flat_ir())
    assert len(flat.ops) == 3


def test_dead_code_goes_and_inputs_stay() -> None:
    flat = _program()
    cut = check_flat_ir(dead_code(lazy.FlatIR(flat.inputs, flat.ops, flat.outputs[:1])))
    assert len(cut.ops) < len(flat.ops) and len(cut.inputs) == len(flat.inputs)
    assert not dead_code(lazy.FlatIR(flat.inputs, flat.ops, flat.inputs)).ops


def test_passes_leave_the_program_that_they_are_given() -> None:
    flat = _program()
    before = str(flat)
    for name, run in PASSES.items():
        assert name and str(run(flat)) != ""
    assert str(flat) == before
    check_flat_ir(flat)


def test_what_lowering_introduces_says_why() -> None:
    reasons = [t.reason_details for op in _program().ops for t in op.outputs if t.name.startswith("t_inter")]
    assert len(reasons) > 3 and all(reasons)


def test_printing_is_deterministic() -> None:
    assert str(_program()) == str(_program())
    assert _program().to_stablehlo().text == _program().to_stablehlo().text


class Broken(TraceOp):
    """Adds tensors of different dtypes in FlatIR."""

    def infer(self, *inputs):  # type: ignore[no-untyped-def]
        return inputs[0].shape, inputs[0].dtype

    def to_flat_ir(self, inputs, outputs):  # type: ignore[no-untyped-def]
        wide = FlatIRTensor(inputs[0].shape, lazy.float64, reason="show an error")
        ConvertOp(list(inputs), [wide])
        AddOp([inputs[0], wide], list(outputs))


def test_a_module_that_mlir_refuses_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = record(Broken(), lazy.zeros((2,)))
    here = test_a_module_that_mlir_refuses_names_the_users_line.__code__.co_firstlineno + 1
    monkeypatch.delitem(CHECKS, "FlatIR")  # which would refuse it before MLIR comes to do so
    with pytest.raises(CompileError, match=rf"(?s)test_lazy_ir.py:{here}, in .*\^\^\^\nbroken \(AddOp\): expected "):
        broken.eval()
    with pytest.raises(CompileError, match="elementwise operands have one shape and one dtype") as caught:
        check_flat_ir(lazy.Trace([broken]).to_flat_ir())
    assert "-> t1" in str(caught.value) and "ConvertOp" in str(caught.value)


def test_the_checkers_find_planted_faults() -> None:
    flat = _program()
    faults = {
        "made before its use": lazy.FlatIR(flat.inputs, flat.ops[1:], flat.outputs),
        "made once": lazy.FlatIR(flat.inputs, [*flat.ops, flat.ops[0]], flat.outputs),
        "outputs are made": lazy.FlatIR(flat.inputs, [], flat.outputs),
    }
    for text, faulty in faults.items():
        with pytest.raises(CompileError, match=text):
            check_flat_ir(faulty)
    unnamed = FlatIRTensor((), lazy.float32)
    given = FlatIRTensor((), lazy.float32, name="t0")
    with pytest.raises(CompileError, match="a name of its own"):
        check_flat_ir(lazy.FlatIR([given], [TanhOp([given], [unnamed])], [unnamed]))
    other = FlatIRTensor((), lazy.float32, name="t0")
    for inputs in ([given, given], [given, other], [unnamed]):
        with pytest.raises(CompileError, match="an input is given once, under a name of its own"):
            check_flat_ir(lazy.FlatIR(inputs, [], []))
    out = FlatIRTensor((), lazy.float32, name="t1")
    for name, inside in (("f", [other, given]), ("g", [other])):
        function = Function(name, inside, [], inside[:1])
        called = lazy.FlatIR([given], [CallOp([given] * len(inside), [out], function)], [out])
        if name == "f":
            with pytest.raises(CompileError, match="an input is given once"):
                check_flat_ir(called)
        else:
            check_flat_ir(called)
    twice = [CallOp([given], [made], Function("f", [other], [], [other])) for made in (out, FlatIRTensor((), lazy.float32, name="t2"))]
    with pytest.raises(CompileError, match="functions have names of their own"):
        check_flat_ir(lazy.FlatIR([given], twice, [out]))
    for wrong in ({}, {"t9": None}, "t0"):
        trace = lazy.Trace([lazy.zeros((2,)) + 1.0])
        trace.names = dict.fromkeys(trace.names, wrong) if isinstance(wrong, str) else dict.fromkeys(wrong)  # type: ignore[assignment]
        with pytest.raises(CompileError, match="every tensor has a name of its own"):
            check_trace(trace)
    trace = lazy.Trace([lazy.zeros((2,)) + 1.0])
    trace.inputs = [trace.ops[0].outputs[0]] * 2
    with pytest.raises(CompileError, match="an input is given once"):
        check_trace(trace)
    trace = lazy.Trace([lazy.zeros((2,)) + 1.0])
    trace.ops[-1].outputs[0].dtype = lazy.float64
    with pytest.raises(CompileError, match="the type that its operation infers"):
        check_trace(trace)


def test_locations_carry_names_and_the_users_line() -> None:
    module = lazy.Trace([lazy.zeros((2,)).tanh()]).to_flat_ir().to_stablehlo().module
    text = module.operation.get_asm(enable_debug_info=True)
    assert "unaryelementwise:t0->t1" in text and "test_lazy_ir.py" in text


_ACCUMULATING = {
    "DotOp": [lambda x: x @ x, lambda x: lazy.dot_general(x, x, ((1,), (1,)))],
    "ReduceWindowOp": [lambda x: x.cumsum(0), lambda x: x.unsqueeze(0).avgpool((2,))],
    "ReduceOp": [lambda x: x.sum(), lambda x: x.prod(0), lambda x: x.mean(1), lambda x: lazy.softmax(x, 1).sum(0)],
    "ConvolutionOp": [lambda x: convolution(x.unsqueeze(0), x.unsqueeze(2)), lambda x: convolution_transpose(x.unsqueeze(0), x.unsqueeze(2))],
}


@pytest.mark.parametrize("of", [lazy.float16, lazy.bfloat16])
@pytest.mark.parametrize("kind", _ACCUMULATING)
def test_16_bits_are_accumulated_in_float32_by_every_engine(kind: str, of: lazy.dtype) -> None:
    """Engines may do so by themselves, so that no number shows it."""
    for call in _ACCUMULATING[kind]:
        out = call(lazy.ones((4, 4), of))
        ops = [op for op in lazy.Trace([out]).to_flat_ir().ops if type(op).__name__ == kind]
        assert ops and all(op.outputs[0].dtype is lazy.float32 for op in ops) and out.dtype is of
