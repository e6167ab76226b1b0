"""What every declared function says about dtypes is what it does: generated from the declarations, for every combination of dtypes."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
from lazy_samples import SAMPLES, arguments, is_dtype

from fusible import lazy
from fusible.errors import DTypeError
from fusible.lazy.dtypes import DTYPES
from fusible.lazy.evaluation.executor import program_of
from fusible.lazy.frontend.interface import FUNCTIONS, Public, spell

_NAMES = sorted(FUNCTIONS)


def _results(value: Any) -> list[lazy.Tensor]:
    """The lazy tensors that a function returned; none of one that computed at once."""
    return [value] if isinstance(value, lazy.Tensor) else list(value) if isinstance(value, list | tuple) else []


def test_every_declared_function_has_a_sample() -> None:
    assert sorted(SAMPLES) == _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_accepted_dtypes_run_and_give_the_declared_dtype(name: str) -> None:
    public = FUNCTIONS[name]
    returns = public.constraints.returns
    outputs: list[lazy.Tensor] = []
    accepted = 0
    for given, accepts in public.constraints.combinations():
        if accepts:
            results = _results(public.call(**arguments(public, given)))
            declared = returns if len(returns) > 1 else returns * len(results)
            assert bool(returns) <= bool(results)
            for result, of in zip(results, declared, strict=bool(returns)):
                assert result.dtype is (given[of] if of in given else DTYPES[of]), given
            outputs += results
            accepted += 1
    assert accepted
    if outputs:
        trace = lazy.Trace(outputs)
        arrays = program_of(trace)([storage.data for storage in trace.storages])
        assert [(a.shape, a.dtype) for a in arrays] == [(t.shape, t.dtype.numpy) for t in outputs]


@pytest.mark.parametrize("name", _NAMES)
def test_refused_dtypes_name_the_parameter_what_it_takes_and_the_users_line(name: str) -> None:
    public = FUNCTIONS[name]
    for given, accepts in public.constraints.combinations():
        if not accepts:
            call, called = public.call, arguments(public, given)
            with pytest.raises(DTypeError) as caught:
                call(**called)
            text = str(caught.value)
            _begins_with_the_line_of_the_call(text)
            assert any(part in text for part in _refusals(public, given)), f"{given}: {text}"


def _refusals(public: Public, given: dict[str, lazy.dtype]) -> list[str]:
    """What the error may say: which parameter lacks which dtypes; or, where each is allowed, that their combination is not."""
    rules = public.constraints
    parts = []
    for parameter, kind in rules.inputs.items():
        variable = kind.strip("[]?")
        if given[variable] not in rules.variables[variable]:
            parts.append(f"{parameter} of {public.name}: expected a dtype among {spell(rules.variables[variable])}, got ")
    together = ", ".join(f"{variable}={of}" for variable, of in given.items())
    return parts or ([f"{public.name}: expected {rules.rule.wanted}, got {together}; "] if rules.rule else [])


def _begins_with_the_line_of_the_call(text: str) -> None:
    place, line, marks, sentence = text.split("\n")
    number = int(place.removeprefix(f"{__file__}:").split(",")[0])
    assert line.strip() == linecache.getline(__file__, number).strip() == "call(**called)"
    assert marks.strip() == "^" * len(line.strip()) and ": expected " in sentence


@pytest.mark.parametrize("name", _NAMES)
def test_tensors_of_one_type_variable_do_not_mix(name: str) -> None:
    """Every parameter after the first of its type variable, in another dtype that it would take."""
    public = FUNCTIONS[name]
    rules = public.constraints
    for variable, allowed in rules.variables.items():
        first, *others = [p for p, kind in rules.inputs.items() if kind == variable and not is_dtype(p)] or [""]
        a, b = (sorted(allowed, key=lambda of: list(DTYPES).index(of.name)) * 2)[:2]
        if a is b or any({a, b} <= group for group in rules.mixes):
            continue
        rest = {v: next(iter(of)) for v, of in rules.variables.items()}
        for parameter in others:
            call, called = public.call, arguments(public, {**rest, variable: a}, **{parameter: b})
            with pytest.raises(DTypeError) as caught:
                call(**called)
            text = str(caught.value)
            _begins_with_the_line_of_the_call(text)
            assert f"{first} and {parameter} of {public.name}: expected one dtype, got {a} " in text and f" and {b} " in text


@pytest.mark.parametrize("name", _NAMES)
def test_the_documentation_lists_the_dtypes(name: str) -> None:
    public = FUNCTIONS[name]
    rules = public.constraints
    summary, _, listed = (public.call.__doc__ or "").partition("Dtypes:\n")
    assert summary.strip() or name.startswith("_")
    for variable, allowed in rules.variables.items():
        (line,) = [text for text in listed.split("\n") if text.strip().startswith(f"{variable} (")]
        assert line.endswith(f"): {spell(allowed)}")
        assert all(parameter in line for parameter, kind in rules.inputs.items() if kind.strip("[]?") == variable)
    assert all(of in rules.variables or any(line.endswith(f": {of}") for line in listed.splitlines()) for of in rules.returns)


@pytest.mark.parametrize("name", [n for n in _NAMES if any(is_dtype(p) for p in FUNCTIONS[n].constraints.inputs)])
def test_an_argument_that_is_no_dtype_is_named(name: str) -> None:
    public = FUNCTIONS[name]
    given = {variable: next(iter(allowed)) for variable, allowed in public.constraints.variables.items()}
    for parameter in filter(is_dtype, public.constraints.inputs):
        default = inspect.signature(public.call).parameters[parameter].default
        for wrong in ("float32", lazy.floating, *(() if default is None else (None,))):
            with pytest.raises(DTypeError, match=f"{parameter} of {name}: expected a dtype of fusible.lazy, got ") as caught:
                public.call(**{**arguments(public, given), parameter: wrong})
            assert f"got {wrong!r}; " in str(caught.value)


def test_no_dtype_means_that_of_the_input_where_it_is_the_default() -> None:
    found = 0
    for public in FUNCTIONS.values():
        for parameter in filter(is_dtype, public.constraints.inputs):
            if inspect.signature(public.call).parameters[parameter].default is None:
                called = arguments(public, dict.fromkeys(public.constraints.variables, lazy.bfloat16))
                assert public.call(**{**called, parameter: None}).dtype is lazy.bfloat16, public.name
                found += 1
    assert found
