"""What a plugin, a vendor's backend or a researcher registers wrongly is refused at once, in one sentence, and nothing is registered."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from registrations import OF_OPERATIONS, REGISTRATIONS, Quantizer, Registration, fused, fused_backward, put_back, undeclared, written
from scores import Scores, score
from wrong_values import others

from fusible import knobs, tex
from fusible.errors import ArgumentError
from fusible.fusions import unregister_fusion
from fusible.pytorch.engine import executors
from fusible.quantized import saving
from fusible.tex import factories, operands
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

ACCEPTED: dict[tuple[str, str], set[str]] = {
    ("register_backend", "cls"): {"None"},
    ("register_backend: NAME", "value"): {"a text"},
    ("register_backend: VENDOR", "value"): {"a text"},
    ("register_backend: PRIORITY", "value"): {"2.5", "-1", "99"},
    ("register_backend: DEVICES", "value"): {"None"},
    ("register_many", "implementations"): {"empty list"},
    ("register_many: impl_id", "value"): {"a text"},
    ("register_many: vendor", "value"): {"a text"},
    ("register_many: priority", "value"): {"2.5", "-1", "99"},
    ("register_many: supported_dtypes", "value"): {"None"},
    ("register_many: min_arch", "value"): {"None", "a text"},
    ("set_backend", "name"): {"None"},
    ("set_backend", "strict"): {"None"},
    ("set_policy", "policy"): {"None"},
    ("set_policy", "gelu"): {"a list"},
    ("Policy", "forced"): {"None", "a text"},
    ("Policy", "fallback"): {"a text"},
    ("Policy", "prefer"): {"None"},
    ("Policy", "allow_vendors"): {"None"},
    ("register_executor", "name"): {"a text"},
    **{(f"register_{kind}_fusion", "priority"): {"2.5", "-1", "99"} for kind in OF_OPERATIONS},
}
"""Wrong values that are none: another name, no limit, a decorator's form. Which backends a policy names is looked at when it is put in force."""
NOT_FOUND = "Backend 'bogus' not found. Available backends: ["
"""The sentence of NVIDIA's and of TransformerEngine-FL's users for a name that is none's."""


def _take_back(backends: dict[str, TEXBackendBase]) -> None:
    registry.put_registered(backends)
    undeclared()
    put_back()
    factories._FACTORIES.pop(Quantizer, None)
    operands.KINDS.pop(Quantizer, None)
    for function in (fused, fused_backward):
        unregister_fusion(function)


@pytest.fixture
def backends() -> Iterator[dict[str, TEXBackendBase]]:
    former, policy = registry.registered(), registry.policy_of_process()
    yield former
    _take_back(former)
    registry.put_policy(lambda _: policy)


def _calls() -> list[tuple[Registration, str, str]]:
    return [(one, argument, what) for one in REGISTRATIONS for argument, good in one.arguments().items() for what, _ in others(good)]


@pytest.mark.parametrize("one", REGISTRATIONS, ids=lambda one: one.title)
def test_every_right_registration_is_one(one: Registration, backends: dict[str, TEXBackendBase]) -> None:
    one.run(**one.arguments())


def test_a_wrong_registration_is_refused_clearly(backends: dict[str, TEXBackendBase]) -> None:
    scores = Scores()
    for one, argument, what in _calls():
        _take_back(backends)
        arguments = one.arguments()
        arguments[argument] = next(value for said, value in others(arguments[argument]) if said == what)
        before = written()
        try:
            one.run(**arguments)
        except Exception as error:
            found = score(error, {one.title.partition(":")[0], argument, *one.names}, changed=before != written())
            scores.add((one.title, argument, what), "clear" if found == "no such sentence" and str(error).startswith(NOT_FOUND) else found, error)
        else:
            accepted = what in ACCEPTED.get((one.title, argument), ())
            scores.add((one.title, argument, what), "accepted" if accepted else "accepted without a reason")
    print(f"{len(_calls())} wrong registrations: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 300


def test_a_name_that_is_taken_is_not_given_twice(backends: dict[str, TEXBackendBase]) -> None:
    before = written()
    with pytest.raises(ArgumentError, match="^register_executor: expected a new name, got 'eager' again; "):
        executors.register_executor("eager", executors.EagerExecutor)
    other = type("Float8TensorStorage", (), {"__module__": "elsewhere"})
    with pytest.raises(ArgumentError, match="^register_saved: expected a new name, got elsewhere.Float8TensorStorage after fusible.quantized"):
        saving.register_saved(Quantizer, other)
    assert written() == before
    executors.register_executor("eager", executors.DIRECT.__class__, replace=True)
    assert written() != before


def test_a_function_of_the_interface_is_not_undeclared() -> None:
    with pytest.raises(ArgumentError, match="function of undeclare: expected a function that declare made, got gelu"):
        tex.undeclare(tex.gelu)
    assert "gelu" in DECLARATIONS and tex.explain("gelu", None, None)


VALUES = ("bogus", "", " ", "-1", "2.5", "1e9", "99999999999999999999", "=", ";", "gelu", "gelu=", "=torch", "gelu=torch;;relu", "\t", "None", "é")


def test_an_environment_variable_that_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is set to, a knob gives a value or one sentence that names it; and so does the policy that is made of them."""
    counts, unclear = Counter[str](), []
    for name, knob in knobs.KNOBS.items():
        for value in VALUES:
            monkeypatch.setenv(name, value)
            reads = [knob.get, tex.Policy.from_environment] if name.startswith("TE_") else [knob.get]
            for read in reads:
                try:
                    read()
                except Exception as error:
                    found = score(error, {name})
                    counts[found] += 1
                    unclear += [] if found == "clear" else [f"{name}={value!r}: {found}: {type(error).__name__}: {error}"]
                else:
                    counts["read"] += 1
            monkeypatch.delenv(name)
    print(f"{len(knobs.KNOBS)} variables: {dict(counts)}")
    assert not unclear, "\n".join(unclear)
    assert counts["clear"] > 100 and not os.environ.get("TE_FL_PREFER")
