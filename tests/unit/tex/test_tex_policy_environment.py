"""What the environment variables of tex ask for, unset, empty, good and bad, in any case and with spaces: served, or refused by its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import cpp_extensions, knobs, tex
from fusible.errors import ArgumentError, BackendError, FusibleError, KnobError
from fusible.tex.interface.declare import Request
from fusible.tex.selection.registry import Registry, registry

NATIVE = "cpu" if cpp_extensions.available else "torch"
_VARIABLES = ("TE_BACKEND", "TE_PLUGIN", "TE_FALLBACK_BACKEND", *(name for name in knobs.KNOBS if name.startswith("TE_FL_")))


def _backend(name: str, vendor: str, priority: int, kind: str = "vendor", **body: Any) -> type[tex.TEXBackendBase]:
    methods = {function: lambda self, input, quantizer: input for function in ("relu", "gelu")}
    return type(name, (tex.TEXBackendBase,), {"NAME": name, "VENDOR": vendor, "PRIORITY": priority, "KIND": kind, **methods, **body})


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry that has read nothing yet: FlagGems, two vendors (one of them absent), this package's kernels and the reference."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    made = Registry()
    made.put_registered({name: backend for name, backend in registry.registered().items() if name in ("cpu", "torch", "xla")})
    made.register_backend(_backend("gems", "FlagOpen", 150, "flagos"))
    made.register_backend(_backend("hygon", "Hygon", 90))
    made.register_backend(_backend("moore", "Moore Threads", 80, VENDOR_NAMES=frozenset({"musa"})))
    made.register_backend(_backend("away", "Away", 300, unavailable=lambda self: "its driver is missing"))
    return made


def _served(given: Registry, function: str = "relu") -> str:
    backend = given.decide(Request(function, (("input", ("cpu", torch.float32)), ("quantizer", None)))).backend
    assert backend is not None
    return backend


_SERVED: list[tuple[dict[str, str], str, str]] = [
    ({}, "gems", "gems"),
    ({"TE_FL_PREFER": "flagos"}, "gems", "gems"),
    ({"TE_FL_PREFER": "default"}, "gems", "gems"),
    ({"TE_FL_PREFER": "vendor"}, "hygon", "hygon"),
    ({"TE_FL_PREFER": "reference"}, "torch", "torch"),
    ({"TE_FL_PREFER": "vendor", "TE_FL_DENY_VENDORS": "hygon"}, "moore", "moore"),
    ({"TE_FL_PREFER": "vendor", "TE_FL_DENY_VENDORS": "hygon,moore threads"}, "gems", "gems"),
    ({"TE_FL_PREFER": "vendor", "TE_FL_ALLOW_VENDORS": "musa"}, "moore", "moore"),
    ({"TE_FL_PREFER": "vendor", "TE_FL_ALLOW_VENDORS": "away"}, "gems", "gems"),
    ({"TE_FL_PREFER": "vendor", "TE_FL_ALLOW_VENDORS": "hygon,moore", "TE_FL_DENY_VENDORS": "hygon"}, "moore", "moore"),
    ({"TE_FL_DENY_VENDORS": "FlagOpen,Hygon,Moore"}, NATIVE, NATIVE),
    ({"TE_FL_DENY_VENDORS": "gems,hygon,moore,fusible"}, "torch", "torch"),
    ({"TE_FL_PER_OP": "relu=reference"}, "torch", "gems"),
    ({"TE_FL_PER_OP": "relu=vendor"}, "hygon", "gems"),
    ({"TE_FL_PER_OP": "relu=vendor:Moore Threads|reference"}, "moore", "gems"),
    ({"TE_FL_PER_OP": "relu=away|vendor:away|moore; gelu = hygon ;"}, "moore", "hygon"),
    ({"TE_FL_PER_OP": "relu=torch|hygon"}, "torch", "gems"),
    ({"TE_FL_PER_OP": "relu=impl:hygon|default;gelu=default"}, "hygon", "gems"),
    ({"TE_FL_PER_OP": "relu=vendor;prim.add=reference", "TE_FL_DENY_VENDORS": "hygon"}, "moore", "gems"),
    ({"TE_FL_PER_OP": "relu=moore", "TE_FL_PREFER": "reference", "TE_BACKEND": "hygon", "TE_FL_STRICT": "1"}, "moore", "hygon"),
    ({"TE_BACKEND": "moore", "TE_FL_PREFER": "reference"}, "moore", "moore"),
    ({"TE_PLUGIN": "moore"}, "moore", "moore"),
    ({"TE_PLUGIN": "moore", "TE_BACKEND": "hygon"}, "hygon", "hygon"),
    ({"TE_FALLBACK_BACKEND": "torch"}, "gems", "gems"),
]


def test_a_fallback_serves_what_the_backend_in_force_lacks(fresh: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is forced, or the best that is there."""
    assert _served(fresh, "silu") == NATIVE
    monkeypatch.setenv("TE_FALLBACK_BACKEND", "torch")
    for forced in ("", "hygon"):
        monkeypatch.setenv("TE_BACKEND", forced)
        given = Registry()
        given.put_registered(fresh.registered())
        assert (_served(given, "relu"), _served(given, "silu")) == (forced or "gems", "torch")


_SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "upper case": str.upper,
    "lower case": str.lower,
    "spaces around": lambda text: f"  {text}\t",
    "spaces within": lambda text: text.replace(",", " , ").replace("|", " | ").replace(";", " ; ").replace("=", " = "),
}


@pytest.mark.parametrize(("variables", "relu", "gelu"), _SERVED)
def test_what_is_asked_for_is_served(fresh: Registry, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], relu: str, gelu: str) -> None:
    for change in _SPELLINGS.values():
        given = Registry()
        given.put_registered(fresh.registered())
        for name, text in variables.items():
            functions = name == "TE_FL_PER_OP" and change in (str.upper, str.lower)  # the names of functions are Python's
            monkeypatch.setenv(name, text if functions else change(text))
        assert (_served(given, "relu"), _served(given, "gelu")) == (relu, gelu)
        assert variables or given.policy == tex.Policy()
        if "TE_FL_PER_OP" not in variables:
            assert given.current().NAME == relu


_EMPTY = ("", " ", "\t\n")
_BAD: dict[str, dict[str, type[FusibleError]]] = {
    "TE_BACKEND": {"nobody": BackendError, "away": BackendError, "gems,hygon": BackendError, "1": BackendError},
    "TE_PLUGIN": {"nobody": BackendError, "away": BackendError},
    "TE_FALLBACK_BACKEND": {"nobody": BackendError, "away": BackendError},
    "TE_FL_STRICT": dict.fromkeys(("2", "maybe", "truee", "0.0", "1 1"), KnobError),
    "TE_FL_DEBUG": dict.fromkeys(("2", "perhaps", "-"), KnobError),
    "TE_FL_SKIP_CUDA": dict.fromkeys(("2", "gpu"), KnobError),
    "TE_FL_PREFER": dict.fromkeys(("native", "flag gems", "vendor,reference", "1", "hygon"), KnobError),
    "TE_FL_PER_OP": {
        **dict.fromkeys(("relu", "relu=", "=torch", ";", "relu=torch|", "relu:torch"), KnobError),
        "relu=torch;relu=hygon": KnobError,
        **dict.fromkeys(("relu=nobody", "relu=torch,gelu", "relu=away", "relu=away|vendor:away"), BackendError),
        **dict.fromkeys(("relu=vendor:nobody", "relu=impl:nobody"), BackendError),
        **dict.fromkeys(("rleu=torch", "RELU=torch", "prim.nothing=torch"), ArgumentError),
    },
    "TE_FL_ALLOW_VENDORS": {",": KnobError, " , ,": KnobError, "nobody": BackendError, "hygon,nobody": BackendError, "torch": BackendError},
    "TE_FL_DENY_VENDORS": {",": KnobError, "nobody": BackendError, "hygon;moore": BackendError, "torch": BackendError, "pytorch": BackendError},
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in _BAD.items() for text in texts])
def test_what_cannot_be_followed_is_refused_by_the_variables_name_at_each_call(
    fresh: Registry, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    if name == "TE_FL_SKIP_CUDA":  # read by the nvidia backend's probe alone
        with pytest.raises(KnobError, match=name):
            knobs.TE_FL_SKIP_CUDA.get()
        return
    for call in (lambda: _served(fresh), lambda: _served(fresh), fresh.current):
        with pytest.raises(_BAD[name][text], match=rf"{name}\b") as refused:
            call()
        assert "\n" not in str(refused.value)
    monkeypatch.delenv(name)
    again = Registry()
    again.put_registered(fresh.registered())
    assert _served(again) == "gems"


@pytest.mark.parametrize(("name", "text"), list(itertools.product(_VARIABLES, _EMPTY)))
def test_an_empty_variable_is_an_unset_one(fresh: Registry, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    assert _served(fresh) == "gems" and fresh.policy == tex.Policy()
    assert knobs.KNOBS[name].get() == knobs.KNOBS[name].default


def test_a_bad_case_is_tested_of_every_variable() -> None:
    assert set(_VARIABLES) - set(_BAD) == {"TE_FL_PLUGIN_MODULES"}  # tests of plugins have it


_POLICIES: dict[str, dict[str, Any]] = {
    "forced": {"forced": 3},
    "prefer": {"prefer": "native"},
    "allow_vendors": {"allow_vendors": "hygon"},
    "deny_vendors": {"deny_vendors": [""]},
    "per_function": {"per_function": "relu"},
    "relu in per_function": {"per_function": {"relu": ""}},
    "gelu in per_function": {"per_function": {"relu": "torch", "gelu": ("torch", 3)}},
}


@pytest.mark.parametrize("of", _POLICIES)
def test_a_policy_refuses_what_none_has(of: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{of} of a policy: expected .*, got "):
        tex.Policy(**_POLICIES[of])


def test_a_policy_of_a_program_is_refused_without_a_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tex.get_policy()
    for policy, error, says in (
        (tex.Policy(deny_vendors=frozenset({"nobody"})), BackendError, "deny_vendors of the policy: expected .*, got 'nobody'"),
        (tex.Policy(per_function={"rleu": "torch"}), ArgumentError, r"per_function of the policy: expected .*, got rleu \(do you mean relu\?\)"),
        (tex.Policy(forced="cpu", deny_vendors=frozenset({"fusible"})), BackendError, "Backend 'cpu' is not available here: "),
    ):
        with pytest.raises(error, match=says) as refused:
            tex.set_policy(policy)
        assert "environment" not in str(refused.value)
    with pytest.raises(ArgumentError, match="set_policy: expected a tex.Policy or None"):
        tex.set_policy("torch")  # type: ignore[arg-type]
    assert tex.get_policy() == before
    with tex.set_policy(relu=("torch", "cpu"), gelu="reference"):
        assert tex.explain("relu", torch.ones(2, 2), None).backend == "torch" == tex.explain("gelu", torch.ones(2, 2), None).backend


def test_a_change_of_one_field_is_the_programs_own(fresh: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_BACKEND", "nobody")
    assert fresh.policy.variables == {"forced": "TE_BACKEND"}
    assert fresh.policy.changed(forced="neither").variables == {} and fresh.policy.changed(strict=True).variables == {"forced": "TE_BACKEND"}
