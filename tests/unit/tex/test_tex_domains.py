"""What every argument of tex may be, told by its annotation: unknown and foreign enumerations, dtypes that a function cannot produce, numbers outside
their domain. Generated over all declarations."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from fusible import tex
from fusible.errors import FusibleError, subject
from fusible.tex import enums
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.domains import Domain, DTypes, Enumeration, Epsilon, Flag, Integers, Number, Presence, domain_of
from fusible.tex.protocol import to_torch

Place = tuple[str, str, Domain, bool]


def places() -> Iterator[Place]:
    """Every parameter that has a domain: its function, its name, the domain, and whether it may be None."""
    for name, declaration in DECLARATIONS.items():
        for parameter in () if declaration.unserved else declaration.signature.parameters.values():
            domain, optional = domain_of(parameter.annotation)
            if domain is not None:
                yield name, parameter.name, domain, optional


PLACES = list(places())


def foreign(domain: Enumeration) -> Enum:
    """A member of another enumeration whose value this one has too."""
    values = {member.value for member in domain.members}
    others = (getattr(enums, name) for name in enums.__all__ if name not in (domain.members.__name__, "FP8FwdTensors"))
    return next(member for other in others for member in other if member.value in values)


def outside(domain: Domain) -> list[Any]:
    """Values that do not belong."""
    if isinstance(domain, Enumeration):
        return [99, -2, foreign(domain), "causal", 1.0, None, True, [0], torch.tensor(0)]
    if isinstance(domain, DTypes):
        wrong = [dtype for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float32) if dtype not in domain.dtypes]
        return [*wrong, 99, -1, "float32", None, enums.NVTE_QKV_Format.NVTE_SBHD_2BSHD, True, 1.5, torch.zeros(1)]
    if isinstance(domain, Presence):
        return [None]
    if isinstance(domain, Flag):
        return ["no", 2, 1.0, 0.0, [True], object(), torch.tensor(True), np.array([True]), enums.NVTE_Fused_Attn_Backend(1)]
    if isinstance(domain, Integers):
        wrong = [torch.zeros(2, dtype=dtype) for dtype in (torch.int64, torch.int16, torch.float32, torch.bool)]
        return [*wrong, None, 3, [0, 1], *([torch.zeros((), dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)] if domain.rank else [])]
    assert isinstance(domain, Number)
    values: list[Any] = ["1", None, [1], object()]
    if domain.kind is int:
        values += [1.5, math.nan, math.inf]
    elif (domain.lower, domain.upper) != (-math.inf, math.inf):
        values += [math.nan, -math.inf]
    if domain.lower > -1e38:
        values += [domain.kind(domain.lower) - 1, torch.tensor(domain.lower - 1)]
        values += [domain.lower] * domain.open_lower
    if domain.upper < math.inf:
        values += [math.inf] if domain.upper > 1e38 else [domain.kind(domain.upper) + 1]
        values += [domain.upper] * domain.open_upper
    return values


def inside(domain: Domain) -> list[Any]:
    """Values that belong, in every form that callers have them in."""
    if isinstance(domain, Enumeration):
        alike: Any = Enum(domain.members.__name__, {member.name: member.value for member in domain.members})
        return [*domain.members, *(member.value for member in domain.members), *alike]
    if isinstance(domain, DTypes):
        return [*domain.dtypes, *(d for d in enums.DType if d != enums.DType.kFloat4E2M1 and tex_dtype(d) in domain.dtypes)]
    if isinstance(domain, Presence):
        return [0]
    if isinstance(domain, Flag):
        return [True, False, None, 1, 0, np.True_, np.False_]
    if isinstance(domain, Integers):
        return [torch.zeros(2, dtype=torch.int32), torch.nn.Parameter(torch.zeros(0, dtype=torch.int32), requires_grad=False)]
    assert isinstance(domain, Number)
    middle = max(domain.lower, 0.0) if not domain.open_lower else 0.5
    return [
        domain.kind(middle),
        torch.tensor(middle if domain.kind is float else int(middle)),
        torch.tensor(middle).numpy()[()] if domain.kind is float else 1,
    ]


def tex_dtype(dtype: enums.DType) -> torch.dtype:
    return to_torch(dtype)


def called_with(function: str, argument: str, value: Any) -> None:
    """Call ``function`` with every argument absent but those with domains before it, which are right."""
    declaration = DECLARATIONS[function]
    given: dict[str, Any] = {}
    for parameter in declaration.signature.parameters.values():
        domain, _ = domain_of(parameter.annotation)
        if parameter.name == argument:
            given[parameter.name] = value
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            given[parameter.name] = inside(domain)[0] if domain is not None else None
        elif isinstance(domain, Presence):
            given[parameter.name] = 0
    owner = tex.prim if function.startswith("prim_") else tex
    getattr(owner, function.removeprefix("prim_"))(**given)


def test_every_value_outside_its_domain_is_refused_in_one_sentence() -> None:
    calls = 0
    for function, argument, domain, optional in PLACES:
        for value in outside(domain):
            if value is None and optional:
                continue
            with pytest.raises(FusibleError) as refusal:
                called_with(function, argument, value)
            calls += 1
            of = f"{argument} of {function.removeprefix('prim_')}"
            text = str(refusal.value)
            if isinstance(domain, Integers) and DECLARATIONS[function].before:
                of = subject(text)  # what is looked at before is not there, and is told of first
                assert of.endswith(function), text
                continue
            assert text.startswith(f"{of}: expected {domain.what}, got ") and text.endswith("."), (function, argument, value, text)
    assert calls > 2300, calls


def test_every_value_of_a_domain_passes_in_every_form() -> None:
    for domain in {id(domain): domain for _, _, domain, _ in PLACES}.values():
        for value in inside(domain):
            domain.check(value, "x", "f")


def test_what_the_quick_test_lets_through_belongs() -> None:
    """The text in a dispatcher says yes only where the domain does: over what belongs and what does not."""
    for domain in {id(domain): domain for _, _, domain, _ in PLACES if not isinstance(domain, Integers)}.values():  # of these the key tells
        bound: list[Any] = []

        def bind(value: Any, bound: list[Any] = bound) -> str:
            bound.append(value)
            return f"_{len(bound) - 1}"

        text = domain.fast("x", bind)
        names = {f"_{place}": value for place, value in enumerate(bound)}
        for value in outside(domain):
            assert not eval(text, {**names, "x": value}), (domain, value)


def test_every_enumeration_and_every_number_of_the_interface_has_a_domain() -> None:
    """A parameter whose name says what it is has the annotation that says so too."""
    marked = {(function, argument): domain for function, argument, domain, _ in PLACES}
    for function, declaration in DECLARATIONS.items():
        for parameter in () if declaration.unserved else declaration.signature.parameters.values():
            name, key = parameter.name, (function, parameter.name)
            if name.endswith(("_layout", "_format", "mask_type", "softmax_type")) and name != "original_format":
                assert isinstance(marked.get(key), Enumeration), key
            if name in ("otype", "fp8_dtype", "out_dtype", "output_dtype", "D_type", "fake_dtype"):
                assert isinstance(marked.get(key), DTypes), key
            if name.startswith("cu_") and function != "thd_out_correction":
                assert isinstance(marked.get(key), Integers), key
            if str(parameter.annotation) in ("int", "float"):
                assert isinstance(marked.get(key), Number), key


def test_a_flag_of_none_is_false_to_the_backend_and_to_whoever_listens() -> None:
    """As in NVIDIA's binding, whose caster takes None for False. Where None is a value of its own it stays None."""

    @tex.declare("x")
    def flagged(x: Tensor, flag: bool, known: bool | None, default: bool = True, *, named: bool = True, epsilon: Epsilon = 1.0) -> Any:
        """What came of each argument."""

    try:
        tex.implement(flagged, backend="torch")(lambda backend, x, flag, known, default, *, named, epsilon: (flag, known, default, named))
        x, heard = torch.ones(1), []
        with tex.listening(lambda call: heard.append((call.args[1:], call.kwargs["named"], call.result))):
            for value in (None, False, True, 0, np.True_):
                passed = False if value is None else value
                result = flagged(x, value, None, value, named=value)
                assert [type(got) for got in result] == [type(passed), type(None), type(passed), type(passed)]
                assert result == (passed, None, passed, passed)
                assert heard.pop() == ((passed, None, passed), passed, result)
        assert flagged(x, True, None) == (True, None, True, True) == flagged(x, default=True, known=None, flag=True)
        for wrong in ("no", 2, 1.0, [True]):
            with pytest.raises(FusibleError, match="flag of flagged: expected a bool, got "):
                flagged(x, wrong, None)
    finally:
        tex.undeclare(flagged)


def test_every_flag_of_the_interface_takes_none_so() -> None:
    flags = {(function, argument): domain for function, argument, domain, optional in PLACES if isinstance(domain, Flag) and not optional}
    for place, domain in flags.items():
        variables = {"flag": None}
        assert eval(domain.fast("flag", lambda value: "_"), variables) and variables["flag"] is False, place
        for value in (True, False):
            variables = {"flag": value}
            assert eval(domain.fast("flag", lambda value: "_"), variables) and variables["flag"] is value, place
    assert len(flags) > 60
