"""What may be registered: every public method of a backend is served, or registration says what is wrong with it; a name has one backend."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.errors import ArgumentError, BackendError, NotServedError
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.backend_checks import admitted
from fusible.tex.selection.registry import registry

X = torch.randn(4, 6)


def _backend(name: str = "hygon", /, **body: Any) -> type[tex.TEXBackendBase]:
    return type("Hygon", (tex.TEXBackendBase,), {"NAME": name, "VENDOR": "Hygon", **body})


@pytest.fixture(autouse=True)
def registered():
    before = registry.registered()
    yield
    registry.put_registered(before)


def test_a_method_that_a_backend_lacks_raises_and_names_both() -> None:
    """Of every declared function: by a backend that has none, by its ``super()``, and by those that are registered and lack it."""
    for function, declaration in DECLARATIONS.items():
        nones = (None,) * len(declaration.signature.parameters)
        empty = _backend()()

        def through(self: Any, *args: Any, function: str = function, **kwargs: Any) -> Any:
            return getattr(super(type(self), self), function)(*args, **kwargs)

        derived = type("Derived", (_backend(),), {function: through})()
        lacking = [backend for backend in registry.ordered() if getattr(type(backend), function) is getattr(tex.TEXBackendBase, function)]
        for backend in (empty, derived, *lacking):
            for args, kwargs in (((), {}), (nones, {}), ((), {"nonsense": 1})):
                with pytest.raises(NotServedError, match=rf"^{function} not implemented by the backend {backend.NAME}.*: call tex\.[\w.]+, which"):
                    getattr(backend, function)(*args, **kwargs)


def test_a_function_of_ones_own_raises_like_the_others() -> None:
    @tex.declare("input")
    def twice(input):
        """Twice the input."""

    try:
        with pytest.raises(NotServedError, match="twice not implemented by the backend cpu"):
            registry.find("cpu").twice(X)  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match=r"torch's method twice: expected the parameters of twice\(input\), got a parameter x, which"):
            tex.implement(twice, backend="torch")(lambda backend, x: 2 * x)
        assert tex.coverage()["twice"]["torch"] is not None
        tex.implement(twice, backend="torch")(lambda backend, input: 2 * input)
        assert torch.equal(twice(X), 2 * X)
    finally:
        tex.undeclare(twice)


@pytest.mark.parametrize("backend", ["cpu", "torch", "xla", "nvidia"])
def test_what_implement_gave_a_backend_is_taken_back(backend: str) -> None:
    """Whether the backend has a method of its own, that of a base, or none."""
    cls = type(registry.find(backend))
    before, covered = dict(vars(cls)), tex.coverage()
    functions = [name for name in DECLARATIONS if callable(getattr(tex, name, None))]
    for name in functions:
        function = getattr(tex, name)
        with pytest.raises(ArgumentError, match=f"^function of unimplement: expected a function that {backend} was given by implement, got {name};"):
            tex.unimplement(function, backend=backend)
        for _ in range(2):
            tex.implement(function, backend=backend)(lambda backend, *args, **kwargs: "mine")
        assert vars(cls)[name] is not before.get(name)
        tex.unimplement(function, backend=backend)
        assert vars(cls).get(name) is before.get(name)
    assert dict(vars(cls)) == before and tex.coverage() == covered


def test_a_call_follows_what_is_implemented_and_taken_back() -> None:
    wanted = tex.gelu(X, None)
    tex.implement(tex.gelu, backend="cpu")(lambda backend, input, quantizer: input + 7)
    assert torch.equal(tex.gelu(X, None), X + 7)
    tex.unimplement(tex.gelu, backend="cpu")
    assert torch.equal(tex.gelu(X, None), wanted)


def test_what_is_implemented_may_leave_out_what_changes_no_result() -> None:
    tex.implement(tex.split_quantize, backend="torch")(lambda backend, tensor, split_sections, quantizer_list: [tensor + 7])
    try:
        with tex.set_backend("torch"):
            assert torch.equal(tex.split_quantize(X, [4], [None])[0], X + 7)
    finally:
        tex.unimplement(tex.split_quantize, backend="torch")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_call_that_is_under_way_when_its_backend_goes_is_handed_over(replaced: bool) -> None:
    """As where another thread takes the backend back, or puts another class in its place."""

    class Going(tex.TEXBackendBase):
        NAME, PRIORITY = "going", 300

        def gelu(self, input, quantizer):
            if replaced:
                tex.register_backend(type("Other", (tex.TEXBackendBase,), {"NAME": "going", "PRIORITY": 1}), replace=True)
            else:
                registry.unregister_backend("going")
            return tex.hand_over(self, "gelu", input, quantizer)

    wanted = tex.gelu(X, None)
    tex.register_backend(Going)
    try:
        assert torch.equal(tex.gelu(X, None), wanted)
    finally:
        if replaced:
            registry.unregister_backend("going")
    assert torch.equal(tex.gelu(X, None), wanted)


def test_the_backends_of_the_package_may_be_registered() -> None:
    for backend in registry.ordered():
        assert isinstance(admitted(type(backend)), type(backend))
        tex.register_backend(type(backend))  # again: the very same class
        assert registry.find(backend.NAME) is backend


def test_a_name_that_is_taken_is_refused_and_replaced_on_demand() -> None:
    first, second = _backend(relu=lambda self, input, quantizer: input + 1), _backend(relu=lambda self, input, quantizer: input + 2, PRIORITY=90)
    tex.register_backend(first)
    with pytest.raises(BackendError, match=r"the name 'hygon': expected one backend, got .*; choose another NAME, or pass replace=True"):
        tex.register_backend(type("Other", (second,), {"NAME": "HyGon"}))
    assert type(registry.find("hygon")) is first
    assert tex.register_backend(replace=True)(second) is second
    assert torch.equal(tex.relu(X, None), X + 2)


@pytest.mark.parametrize("replace", [False, True])
def test_the_reference_is_never_replaced_nor_forgotten(replace: bool) -> None:
    torch_ = registry.find("torch")
    with pytest.raises(BackendError, match=r"the name 'torch': expected one backend, got .*; choose another NAME\.$"):
        tex.register_backend(_backend("Torch"), replace=replace)
    with pytest.raises(BackendError, match="tex: expected one reference, got Hygon beside torch"):
        tex.register_backend(_backend(REFERENCE=True), replace=replace)
    with pytest.raises(BackendError, match="the reference 'torch'"):
        registry.unregister_backend("torch")
    assert registry.find("torch") is torch_


def _misspelt(name: str) -> list[str]:
    """A letter doubled, one left out, and two of them swapped; those that are names of functions themselves are left out."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    words = {name[:middle] + name[middle] + name[middle:], name[:middle] + name[middle + 1 :], swapped}
    return sorted(word for word in words if not hasattr(tex.TEXBackendBase, word) and not word.startswith("_"))


def test_a_misspelt_function_is_refused_with_the_nearest_name() -> None:
    """Of every declared function, as a method of any kind."""
    method = lambda self, *args, **kwargs: None  # noqa: E731
    for function in DECLARATIONS:
        words = _misspelt(function)
        assert words
        for word, value in zip(words, (method, staticmethod(method), classmethod(method)), strict=False):
            with pytest.raises(BackendError, match=rf"got Hygon\.{word} \(do you mean \w+\?\); begin a helper's name with an underscore") as refused:
                tex.register_backend(_backend(**{word: value}))
            near = re.search(r"mean (\w+)\?", str(refused.value))
            assert near is not None and _likeness(near[1], word) >= _likeness(function, word)
    assert "hygon" not in registry.registered()


def _likeness(a: str, b: str) -> float:
    return max(difflib.SequenceMatcher(None, a, b).ratio(), difflib.SequenceMatcher(None, b, a).ratio())


@pytest.mark.parametrize("word", ["is_avaliable", "unavailble", "suports", "lack"])
def test_a_misspelt_method_of_the_protocol_is_refused(word: str) -> None:
    with pytest.raises(BackendError, match=rf"got Hygon\.{word} \(do you mean (is_available|unavailable|supports|lacks)\?\)"):
        tex.register_backend(_backend(**{word: lambda self, *args: None}))


@pytest.mark.parametrize("word", ["DEVICE", "PRIORTY", "OWN_LAYOUT", "VENDORS"])
def test_a_misspelt_attribute_is_refused(word: str) -> None:
    with pytest.raises(BackendError, match=rf"got {word} \(do you mean (DEVICES|PRIORITY|OWN_LAYOUTS|VENDOR)\?\)"):
        tex.register_backend(_backend(**{word: 1}))


def test_helpers_are_private_or_named_and_other_attributes_are_ones_own() -> None:
    class Mixin:
        HELPERS = frozenset({"launch"})

        def launch(self) -> None: ...

        def _compile(self) -> None: ...

    class Settings: ...

    body = {"CACHE": {}, "calls": 0, "Settings": Settings, "gems": property(lambda self: None), "warm_up": lambda self: None}
    tex.register_backend(type("Own", (Mixin, tex.TEXBackendBase), {"NAME": "own", "HELPERS": frozenset({"warm_up"}), **body}))
    with pytest.raises(BackendError, match=r"got Mixin\.launch"):
        tex.register_backend(type("Own", (type("Mixin", (), {"launch": Mixin.launch}), tex.TEXBackendBase), {"NAME": "other"}))


_BAD_ATTRIBUTES = {
    "NAME": ("", None, 3, "a b", "a|b", "vendor:x", "a=b"),
    "VENDOR": (None, 3),
    "PRIORITY": ("high", None, float("nan")),
    "DEVICES": ("cuda", ["cpu"], {1}),
    "KIND": ("", "vendors", None),
}


@pytest.mark.parametrize(("attribute", "value"), [(name, value) for name, values in _BAD_ATTRIBUTES.items() for value in values])
def test_attributes_of_the_wrong_type_are_refused(attribute: str, value: object) -> None:
    with pytest.raises(BackendError, match=rf"^.*the backend Hygon: expected .*{attribute}.*, got "):
        tex.register_backend(type("Hygon", (tex.TEXBackendBase,), {"NAME": "hygon", attribute: value}))


@pytest.mark.parametrize("value", [3, int, object(), "hygon", registry])
def test_what_is_no_backend_is_refused(value: Any) -> None:
    with pytest.raises(BackendError, match="a backend: expected a subclass of tex.TEXBackendBase"):
        tex.register_backend(value)


def _with_signature(signature: inspect.Signature) -> Any:
    """A method of that signature, after ``self``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None: ...

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


def test_a_method_that_does_not_take_the_declared_call_is_refused() -> None:
    """Of every function: a parameter renamed, left out, added with and without a default, two swapped; the declared ones alone are taken, those that
    are idle or not."""
    for function in DECLARATIONS:
        _check_signatures(function)


def _check_signatures(function: str) -> None:
    declared = DECLARATIONS[function].signature
    given = list(declared.parameters.values())
    plain = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    extra = inspect.Parameter("nonsense", inspect.Parameter.KEYWORD_ONLY)
    end = next((i for i, p in enumerate(given) if p.kind is p.VAR_KEYWORD), len(given))
    wrong = {"added": [*given[:end], extra, *given[end:]], "added with a default": [*given[:end], extra.replace(default=1), *given[end:]]}
    if plain:
        first = given.index(plain[0])
        rest = [p.replace(default=None) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in given]
        wrong["renamed"] = [p.replace(name="nonsense") if i == first else p for i, p in enumerate(given)]
        idle = DECLARATIONS[function].idle
        if first_read := next((p for p in plain if p.name not in idle), None):
            first = given.index(first_read)
        if not any(p.kind is p.VAR_POSITIONAL for p in given):  # which would take it
            wrong["left out"] = [p for i, p in enumerate(given) if i != first]
        if len(plain) > 1:
            second = given.index(next(p for p in plain if p is not given[first]))
            rest[first], rest[second] = rest[second], rest[first]
            wrong["swapped"] = rest
    for case, parameters in wrong.items():
        with pytest.raises(BackendError, match=rf"^hygon's method {function}: expected the parameters of {function}\(.*, got ") as refused:
            tex.register_backend(_backend(**{function: _with_signature(declared.replace(parameters=parameters))}))
        if "added" in case or case == "renamed":
            assert "a parameter nonsense, which the function lacks" in str(refused.value), case
    for parameters in (given, [p.replace(default=None) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in given]):
        admitted(_backend(**{function: _with_signature(declared.replace(parameters=parameters))}))
    admitted(_backend(**{function: lambda self, *args, **kwargs: None}))
    read = [p for p in given if p.name not in DECLARATIONS[function].idle]
    admitted(_backend(**{function: _with_signature(declared.replace(parameters=read))}))


def test_methods_that_take_no_self_or_are_no_functions_are_refused() -> None:
    with pytest.raises(BackendError, match="got no parameter self"):
        tex.register_backend(_backend(get_cudnn_version=eval("lambda: 0")))
    with pytest.raises(BackendError, match="hygon's method relu: expected .*, got 3"):
        tex.register_backend(_backend(relu=3))


def test_a_function_of_an_instance_is_served() -> None:
    class Lazy(tex.TEXBackendBase):
        NAME, PRIORITY = "lazily", 300

        def __init__(self) -> None:
            self.relu = lambda input, quantizer: input * 0

    tex.register_backend(Lazy)
    assert tex.explain("relu", X, None).backend == "lazily" and torch.equal(tex.relu(X, None), X * 0)


@pytest.mark.parametrize("probe", ["unavailable", "is_available"])
def test_a_probe_that_raises_is_a_reason(probe: str) -> None:
    def raises(self: object) -> None:
        raise OSError("libhygon.so: cannot open")

    tex.register_backend(_backend(relu=lambda self, input, quantizer: input * 0, PRIORITY=300, **{probe: raises}))
    assert torch.equal(tex.relu(X, None), X.relu())
    assert ("hygon", "its probe raised OSError: libhygon.so: cannot open") in tex.explain("relu", X, None).others
    with pytest.raises(BackendError, match=r"Backend 'hygon' is not available here: its probe raised OSError: libhygon\.so"):
        tex.set_backend("hygon")


def test_an_answer_that_raises_names_the_backend_and_the_call() -> None:
    relu = tex.requires(lambda request: str(request["nonsense"]))(lambda self, input, quantizer: input * 0)
    tex.register_backend(_backend(relu=relu, PRIORITY=300))
    with pytest.raises(BackendError, match=r"the backend hygon asked for relu\(.*got KeyError: 'nonsense'"):
        tex.relu(X, None)


def test_a_forgotten_backend_that_the_policy_names_is_missed_by_name() -> None:
    tex.register_backend(_backend(relu=lambda self, input, quantizer: input * 0))
    with tex.set_backend("hygon"):
        registry.unregister_backend("hygon")
        for call in (lambda: tex.relu(X, None), tex.get_backend, tex.list_backends, lambda: tex.explain("relu", X, None)):
            with pytest.raises(BackendError, match=r"Backend 'hygon' not found\. Available backends: \["):
                call()
    assert torch.equal(tex.relu(X, None), X.relu())
    with pytest.raises(BackendError, match="Backend 'hygon' not found"):
        registry.unregister_backend("hygon")
