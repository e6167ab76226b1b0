"""Names of tensors in printed programs, where a tensor was recorded, and tensors that are printed before they have a value."""

from __future__ import annotations

from typing import Any

import pytest

from fusible import lazy
from fusible.errors import DTypeError
from fusible.lazy.logger import logger


def _named(trace: lazy.Trace) -> list[str]:
    return list(trace.names.values())


def test_a_name_is_given_or_assigned_and_printed() -> None:
    a, b = lazy.Tensor([1.0, 2.0], name="a"), lazy.Tensor([3.0, 4.0])
    assert a.name == "a" and b.name is None
    b.name = "b"
    total = a + b
    total.name = "total"
    text = str(lazy.Trace([total * 2.0]))
    assert "a = storage(shape=(2,), dtype=float32)\nb = storage(" in text and "total = binaryelementwise(a, b, kind=Kind.ADD)" in text
    assert "t3 = fill(value=2.0" in text and "t4 = binaryelementwise(total, t3, kind=Kind.MUL)" in text
    assert "total: [shape=(2,), " in str(lazy.Trace([total]).to_flat_ir())
    with pytest.raises(DTypeError, match="a text or None of the name of Tensor|name of Tensor"):
        b.name = 3  # type: ignore[assignment]


def test_equal_programs_are_one_whatever_their_names() -> None:
    a, b = lazy.Tensor([1.0], name="a"), lazy.Tensor([2.0])
    assert lazy.Trace([a.tanh()]).key() == lazy.Trace([b.tanh()]).key()


def test_names_in_a_program_are_distinct_and_in_its_characters() -> None:
    """Two tensors of one name, and names that the program itself gives, and what no name of a program may hold."""
    same, other, own, lowered = (lazy.Tensor([1.0], name=name) for name in ("x", "x", "t9", "t_inter1"))
    strange = lazy.Tensor([1.0], name="state['k'][0]")
    blank = lazy.Tensor([1.0], name="[]")
    last = lazy.Tensor([1.0], name="t6")
    trace = lazy.Trace([same, other, own, lowered, strange, blank, lazy.ones((1,)), last])
    names = _named(trace)
    assert names == ["x", "x_1", "t9_2", "t_inter1_3", "state.k.0", "t5", "t6", "t6_7"] and len(set(names)) == len(names)
    flat = str(trace.to_flat_ir())
    assert "state.k.0: [" in flat and "x_1: [" in flat


def test_arguments_and_parameters_have_names_in_compiled_programs() -> None:
    model = lazy.Sequential(lazy.Linear(2, 3), lazy.relu)
    model.initialize_dummy_parameters()
    executable = lazy.compile(model, args=[lazy.InputInfo((1, 2), lazy.float32)])
    text = str(executable.trace)
    assert "input: [shape=(1, 2,)" in text and "0.weight = " in text and "0.bias = " in text
    bound = lazy.compile(model.forward, args=[lazy.InputInfo((1, 2), lazy.float32)])
    assert "0.weight = " in str(bound.trace)

    def program(states: dict[str, Any], *rest: Any) -> Any:
        return states["k"] + rest[0]

    info = lazy.InputInfo((2,), lazy.float32)
    assert _named(lazy.compile(program, args=[{"k": info}, info]).trace) == ["states.k", "rest0", "t2"]


def test_a_parameter_keeps_the_name_that_it_has() -> None:
    layer = lazy.Linear(2, 3, bias=False)
    layer.weight = lazy.Tensor([[1.0, 2.0]] * 3, name="table")
    lazy.compile(layer, args=[lazy.InputInfo((1, 2), lazy.float32)])
    assert layer.weight.name == "table"


def test_the_place_where_a_tensor_was_recorded() -> None:
    tensor = lazy.ones((2,)) + 1.0
    (place,) = tensor.stack_info
    assert (place.file, place.module, place.function) == (__file__, __name__, "test_the_place_where_a_tensor_was_recorded")
    assert place.line == test_the_place_where_a_tensor_was_recorded.__code__.co_firstlineno + 1
    assert place.column_range is not None and place.code[slice(*place.column_range)] == "lazy.ones((2,)) + 1.0"
    tensor.eval()
    assert tensor.stack_info == [place]


def test_printing_in_a_compiled_function_warns_once_and_changes_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "_shown", set())

    def program(x: Any) -> Any:
        constant = lazy.ones((2,))
        print(x + 1.0, constant)
        print(repr(x))
        return x * 2.0 + constant

    executable = lazy.compile(program, args=[lazy.InputInfo(((1, 2, 4), 2), lazy.float32)])
    said = capfd.readouterr()
    assert said.out.splitlines()[0].startswith("tensor(<what a call gives>, dtype=float32, loc=cpu:0, shape=(x.0, 2)) tensor([1., 1.]")
    assert said.out.count("<what a call gives>") == 2 and said.err.count("is printed while the function that computes it is compiled") == 1
    assert executable(lazy.ones((1, 2))).tolist() == [[3.0, 3.0]]
    assert not capfd.readouterr().out


def test_modules_of_a_sequential_are_attributes_by_name() -> None:
    model = lazy.Sequential({"up": lazy.Linear(2, 3), "act": lazy.relu})
    assert model.up is model["up"] is model.modules["up"] and model.act is lazy.relu
    with pytest.raises(AttributeError, match="the attribute 'down' of a Sequential"):
        getattr(model, "down")  # noqa: B009
