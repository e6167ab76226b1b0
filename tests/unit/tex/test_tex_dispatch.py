"""Choosing a backend: registration, policy, environment, reasons, recording."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.errors import ArgumentError, BackendError, KnobError, NotServedError
from fusible.tex.selection.dispatch import recording_whole
from fusible.tex.selection.registry import registry

X = torch.randn(4, 6)
NATIVE = "cpu" if cpp_extensions.available else "torch"
"""Who serves an activation of a torch tensor, unless something else is chosen."""


@pytest.fixture
def hygon() -> Iterator[type[tex.TEXBackendBase]]:
    """A vendor's backend that has one function, and refuses half precision."""

    @tex.register_backend
    class Hygon(tex.TEXBackendBase):
        NAME, VENDOR, PRIORITY = "hygon", "Hygon", 90
        calls = 0

        @tex.requires(lambda request: "reads fp32 alone" if request["input"][1] is not torch.float32 else None)
        def relu(self, input, quantizer):
            type(self).calls += 1
            return input + 100

    yield Hygon
    registry.unregister_backend("hygon")


def test_priority_decides_and_refusal_goes_to_the_next(hygon) -> None:
    assert torch.equal(tex.relu(X, None), X + 100)
    assert torch.equal(tex.relu(X.half(), None), X.half().relu())
    decision = tex.explain("relu", X.half(), None)
    assert decision.backend == NATIVE and ("hygon", "reads fp32 alone") in decision.others


def test_a_later_registration_is_seen_and_a_forgotten_one_is_gone() -> None:
    before = tex.relu(X, None)

    @tex.register_backend
    class Late(tex.TEXBackendBase):
        NAME, PRIORITY = "late", 500

        def relu(self, input, quantizer):
            return input * 0

    try:
        assert torch.equal(tex.relu(X, None), X * 0)
    finally:
        registry.unregister_backend("late")
    assert torch.equal(tex.relu(X, None), before)


def test_a_tie_of_priorities_never_goes_to_the_reference() -> None:
    @tex.register_backend
    class Tied(tex.TEXBackendBase):
        NAME, PRIORITY = "zzz", 0

        def relu(self, input, quantizer):
            return input * 0

    try:
        names = [backend.NAME for backend in registry.ordered()]
        assert names.index("zzz") < names.index("torch")
    finally:
        registry.unregister_backend("zzz")


def test_set_backend_takes_effect_at_once_and_is_undone_by_the_context(hygon) -> None:
    relu = tex.relu
    with tex.set_backend("TORCH") as backend:
        assert backend.name == "torch" and tex.get_backend() is backend
        assert torch.equal(relu(X, None), X.relu())
    assert torch.equal(relu(X, None), X + 100)


def test_a_forced_backend_lends_what_it_lacks_unless_strict(hygon) -> None:
    with tex.set_backend("hygon"):
        assert tex.explain("gelu", X, None).backend == NATIVE
    reason = "gelu not implemented .*torch: the policy gives gelu to hygon alone"
    with tex.set_backend("hygon", strict=True), pytest.raises(NotServedError, match=reason):
        tex.gelu(X, None)


def test_policy_of_single_functions(hygon) -> None:
    with tex.set_policy(relu="torch"):
        assert torch.equal(tex.relu(X, None), X.relu())
    with pytest.raises(ArgumentError, match="functions of tex"):
        tex.set_policy(no_such_function="torch")


@pytest.mark.parametrize("name", ["nothing", "absent"])
def test_an_unknown_or_unavailable_backend_is_refused_and_the_policy_stays(name: str) -> None:
    @tex.register_backend
    class Absent(tex.TEXBackendBase):
        NAME = "absent"

        def unavailable(self) -> str | None:
            return "its driver is missing"

    before = tex.get_policy()
    try:
        with pytest.raises(BackendError) as error:
            tex.set_backend(name)
        assert isinstance(error.value, RuntimeError) and isinstance(error.value, ValueError)
        assert ("not found" if name == "nothing" else "its driver is missing") in str(error.value)
        assert tex.get_policy() == before
    finally:
        registry.unregister_backend("absent")


def test_list_backends_says_what_there_is() -> None:
    rows = tex.list_backends()
    assert [row["name"] for row in rows][-1] == "torch" and sum(row["current"] for row in rows) == 1
    assert all({"name", "vendor", "priority", "available", "reason", "current"} == set(row) for row in rows)
    assert all(row["available"] == (row["reason"] is None) for row in rows)


def test_the_kernels_own_error_is_raised_once(hygon) -> None:
    def broken(self, input, quantizer):
        hygon.calls += 1
        raise ZeroDivisionError("mine")

    hygon.relu = broken
    registry.changed()
    with pytest.raises(ZeroDivisionError, match="mine"):
        tex.relu(X, None)
    assert hygon.calls == 1


def test_calls_by_keyword_and_wrong_calls() -> None:
    assert torch.equal(tex.relu(quantizer=None, input=X), X.relu())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'quantizer'"):
        tex.relu(X)
    with pytest.raises(TypeError):
        tex.relu(X, None, nonsense=1)


def test_record_lists_the_calls_of_every_thread() -> None:
    with tex.record() as calls:
        tex.relu(X, None)
        thread = threading.Thread(target=lambda: tex.silu(X, None))
        thread.start()
        thread.join()
    assert [(call.function, call.backend) for call in calls] == [("relu", NATIVE), ("silu", NATIVE)]
    tex.relu(X, None)
    assert len(calls) == 2


def test_a_stretch_that_fails_is_not_recorded() -> None:
    with tex.record() as calls:
        with pytest.raises(ZeroDivisionError), recording_whole():
            tex.relu(X, None)
            with recording_whole():
                tex.relu(X, None)
            raise ZeroDivisionError
        with recording_whole():
            tex.silu(X, None)
            assert not calls
        tex.gelu(X, None)
    assert [call.function for call in calls] == ["silu", "gelu"]


def test_an_unserved_call_lists_every_reason() -> None:
    with pytest.raises(NotServedError, match=r"relu not implemented for relu\(input=cpu:int64.*cpu: .*torch: serves float32"):
        tex.relu(torch.ones(2, 2, dtype=torch.int64), None)


def test_no_lock_probe_or_environment_read_on_the_hot_path(monkeypatch, hygon) -> None:
    tex.relu(X, None)

    def forbidden(*args, **kwargs):
        raise AssertionError("the hot path chose again")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "decide", forbidden)
        patch.setattr(registry, "_lock", None)
        patch.setattr("os.environ", None)
        assert torch.equal(tex.relu(X, None), X + 100)


def _run(code: str, **environment: str) -> str:
    import os

    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    return run.stdout + run.stderr


_ASK = "import torch; from fusible import tex; x = torch.randn(2, 2); tex.relu(x, None); print('BACKEND', tex.get_backend().name)"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TE_BACKEND": "torch"}, "BACKEND torch"),
        ({"TE_PLUGIN": "Torch"}, "BACKEND torch"),
        ({"TE_BACKEND": "hygon"}, "Backend 'hygon' not found. Available backends: ["),
        ({"TE_FL_DEBUG": "1"}, f"relu(input=cpu:float32, quantizer=None) is served by {NATIVE}"),
        ({"TE_FL_DEBUG": "perhaps"}, "the environment variable TE_FL_DEBUG: expected 1, true, yes, on, 0, false, no or off, got 'perhaps'"),
    ],
)
def test_environment(environment: dict[str, str], says: str) -> None:
    assert says in _run(_ASK, **environment)


def test_plugin_modules_register_at_first_use(tmp_path) -> None:
    (tmp_path / "vendor.py").write_text(
        "from fusible import tex\n\n"
        "class Vendor(tex.TEXBackendBase):\n    NAME, PRIORITY = 'vendor', 200\n    def relu(self, input, quantizer):\n        return input * 0\n\n"
        "def register(registry):\n    registry.register_backend(Vendor)\n"
    )
    import os

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    out = _run(_ASK + "; print(tex.explain('relu', x, None).backend)", TE_FL_PLUGIN_MODULES="vendor", PYTHONPATH=path)
    assert out.split()[-1] == "vendor", out


def test_a_wrong_knob_is_named() -> None:
    import os

    from fusible.knobs import TE_FL_STRICT

    os.environ["TE_FL_STRICT"] = "2"
    try:
        with pytest.raises(KnobError, match="TE_FL_STRICT"):
            TE_FL_STRICT.get()
    finally:
        del os.environ["TE_FL_STRICT"]


def test_the_other_name_is_the_same_module() -> None:
    import transformer_engine_fl_torch as other

    assert other is tex


@pytest.mark.parametrize("name", ["gellu", "prim.ad", "", None, 3])
def test_a_function_that_tex_lacks_is_named_in_one_sentence(name: object) -> None:
    backend = registry.find("torch")
    for ask, of in ((lambda: tex.explain(name, X, None), "explain"), (lambda: tex.hand_over(backend, name, X, None), "hand_over")):
        with pytest.raises(AttributeError, match=f"^function of {of}: expected a function's name in tex, got .*; pass one of tex"):
            ask()
