"""Plugins: each loads or is remembered with its reason, whatever it raises; and those of TransformerEngine-FL's protocol."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.errors import BackendError, NotServedError
from fusible.tex.interface.declare import Request
from fusible.tex.selection import plugins
from fusible.tex.selection.registry import Registry, registry

X = torch.randn(4, 6)
_RELU = Request("relu", (("input", ("cpu", torch.float32)), ("quantizer", None)))

_GOOD = """
from fusible import tex

class Vendor(tex.TEXBackendBase):
    NAME, PRIORITY = {name!r}, 200
    def relu(self, input, quantizer):
        return input * 0

def register(registry):
    registry.register_backend(Vendor)
"""

_BROKEN = {
    "ImportError": ("import no_such_library_of_a_vendor", "ModuleNotFoundError: No module named 'no_such_library_of_a_vendor'"),
    "OSError": ("raise OSError('libhygon.so: cannot open')", "OSError: libhygon.so: cannot open"),
    "SystemExit": ("raise SystemExit(3)", "SystemExit: 3"),
    "SyntaxError": ("def register(", "SyntaxError"),
    "AssertionError": ("assert False, 'no device'", "AssertionError: no device"),
    "no function": ("x = 1", ": expected a function register(registry)"),
    "no callable": ("register = 3", ": expected a function register(registry)"),
    "in register": ("def register(registry):\n    raise RuntimeError('too old')", "RuntimeError: too old"),
    "wrong signature": ("def register():\n    pass", "TypeError: register() takes 0 positional arguments"),
    "halfway": (_GOOD.format(name="halfway") + "    raise RuntimeError('then it failed')", "RuntimeError: then it failed"),
    "misspelt": (_GOOD.format(name="misspelt").replace("def relu", "def rellu"), r"Vendor.rellu (do you mean relu?)"),
    "taken": (_GOOD.format(name="torch"), "the name 'torch': expected one backend"),
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """A registry that has loaded no plugin yet, with a folder of plugins on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Registry()
    made.put_registered(registry.registered())
    yield made
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def _write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def _silu(input: Any, quantizer: Any) -> Any:
    return input


@pytest.mark.parametrize("case", _BROKEN)
@pytest.mark.parametrize("form", ["module", "entry point"])
def test_a_plugin_that_fails_is_remembered_and_the_others_load(
    fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, form: str
) -> None:
    text, reason = _BROKEN[case]
    _write(tmp_path, broken_plugin=text, good_plugin=_GOOD.format(name="good"), late_plugin=_GOOD.format(name="late").replace("200", "100"))
    if form == "module":
        monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "good_plugin, broken_plugin ,,late_plugin")
        plugin = "the plugin broken_plugin of TE_FL_PLUGIN_MODULES"
    else:
        entries = [importlib.metadata.EntryPoint(name, f"{name}_plugin", plugins.GROUP) for name in ("broken", "good", "late")]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == plugins.GROUP else [])
        plugin = "the plugin broken = broken_plugin"
    with pytest.warns(RuntimeWarning, match=f"^{plugin} did not load, so that other backends serve: ") as warned:
        assert fresh.decide(_RELU).backend == "good"
    assert len(warned) == 1
    assert list(fresh.failed_plugins()) == [plugin] and reason in fresh.failed_plugins()[plugin]
    names = {backend.NAME for backend in fresh.ordered()}
    assert {"good", "late"} <= names and not names & {"halfway", "misspelt"} and not fresh.find("torch").REFERENCE == 0
    decision = fresh.decide(_RELU)  # the second time nothing is loaded, warned of or forgotten
    assert f"{plugin} did not load: " in str(decision) and reason in str(decision)
    for call in (lambda: fresh.find("broken"), lambda: fresh.choose(Request("init_nvshmem_backend", (("process_group", None),)))):
        with pytest.raises((BackendError, NotServedError), match="did not load") as refused:
            call()
        assert plugin in str(refused.value) and reason in str(refused.value)


def test_an_interrupt_while_plugins_load_leaves_them_to_the_next_call(fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, first_plugin=_GOOD.format(name="first"), slow_plugin="interrupted = []\n" + _GOOD.format(name="slow"))
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "first_plugin,slow_plugin")
    found = plugins._found
    monkeypatch.setattr(plugins, "_found", lambda: [(name, find if "first" in name else _interrupt) for name, find in found()])
    with pytest.raises(KeyboardInterrupt):
        fresh.decide(_RELU)
    monkeypatch.setattr(plugins, "_found", found)
    assert {"first", "slow"} <= {backend.NAME for backend in fresh.ordered()} and not fresh.failed_plugins()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_plugin_may_use_tex_while_it_loads(fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = _GOOD.format(name="uses") + "    registry.ordered()\n    assert registry.current().NAME == 'uses'\n"
    _write(tmp_path, uses_plugin=uses, other_plugin=_GOOD.format(name="other").replace("200", "150"))
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "uses_plugin,other_plugin")
    assert fresh.decide(_RELU).backend == "uses" and fresh.find("other") and not fresh.failed_plugins()


def test_a_module_that_another_thread_imports_meanwhile_does_not_block(fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread imports the plugin, which registers at import; another chooses, and so waits for that import: neither holds what the other needs."""
    _write(tmp_path, slow_plugin="import builtins\nbuiltins.fusible_test_step()\n" + _GOOD.format(name="slow"))
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "slow_plugin")
    inside = threading.Event()

    def step() -> None:
        inside.set()
        chooser.start()
        chooser.join(0.3)  # it waits for this import by now
        fresh.register_backend(type("Own", (tex.TEXBackendBase,), {"NAME": "at-import"}))

    monkeypatch.setattr("builtins.fusible_test_step", step, raising=False)
    chosen: list[str | None] = []
    chooser = threading.Thread(target=lambda: chosen.append(fresh.decide(_RELU).backend), daemon=True)
    importer = threading.Thread(target=lambda: __import__("slow_plugin"), daemon=True)
    importer.start()
    importer.join(60)
    chooser.join(60)
    assert inside.is_set() and not importer.is_alive() and not chooser.is_alive() and chosen == ["slow"]


def test_info_and_explain_show_a_plugin_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as a user meets it: the warning, the table, and the call that is served all the same."""
    _write(tmp_path, broken_plugin=_BROKEN["OSError"][0])
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "broken_plugin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = """
import json, torch
from fusible import tex
from fusible.cli.info import collect, show
from fusible.cli.console import make_console
facts = collect()
x = torch.ones(2, 2)
print(json.dumps([facts["backends"], str(tex.explain("relu", x, None)), tex.relu(x, None).tolist()]))
show(facts, make_console())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, *shown = run.stdout.splitlines()
    backends, explained, result = json.loads(first)
    says = "the plugin broken_plugin of TE_FL_PLUGIN_MODULES did not load: OSError: libhygon.so: cannot open"
    assert backends["failed"] == {says.split(" did not")[0]: "OSError: libhygon.so: cannot open"} and backends["error"] is None
    assert says in explained and result == [[1.0, 1.0]] * 2
    assert "OSError:libhygon.so:cannotopen" in "".join(shown).replace(" ", "")
    assert run.stderr.count("RuntimeWarning: the plugin broken_plugin") == 1


def _implementation(op: str = "relu", fn: Callable[..., Any] = lambda input, quantizer: input + 7, **fields: Any) -> tex.OpImpl:
    given = {"impl_id": "vendor.hygon", "kind": tex.BackendImplKind.VENDOR, "vendor": "HYGON", "priority": tex.BackendPriority.VENDOR, **fields}
    return tex.OpImpl(op_name=op, fn=fn, **given)


def test_functions_registered_one_by_one_are_a_backend(fresh: Registry) -> None:
    fresh.register_many(
        [
            _implementation(),
            _implementation("gelu", lambda input, quantizer: input + 8, supported_dtypes=frozenset({"bfloat16"})),
            _implementation("get_attention_backend", lambda *args: None),
            _implementation(impl_id="reference.slow", kind="reference", vendor=None, priority=10),
            SimpleNamespace(op_name="silu", impl_id="default.gems", kind=SimpleNamespace(value="flagos"), fn=_silu, priority=150),
        ]
    )
    hygon = fresh.find("hygon")
    assert (hygon.NAME, hygon.VENDOR, hygon.priority, hygon.KIND) == ("hygon", "HYGON", 100, "vendor")
    assert fresh.choose(_RELU) is hygon and torch.equal(hygon.relu(X, None), X + 7)
    assert ("hygon", "serves bfloat16, and input is float32") in fresh.decide(Request("gelu", _RELU.kinds)).others
    assert fresh.choose(Request("gelu", (("input", ("cpu", torch.bfloat16)), ("quantizer", None)))) is hygon
    for words, served in {
        "relu=impl:reference.slow": "reference.slow",
        "relu=vendor:hygon": "hygon",
        "relu=reference": "reference.slow",
        "silu=default;relu=torch": "torch",
    }.items():
        orders = dict(part.split("=") for part in words.split(";"))
        fresh.put_policy(lambda _, orders=orders: tex.Policy(per_function=orders))
        assert fresh.choose(_RELU).NAME == served
    assert fresh.choose(Request("silu", _RELU.kinds)).NAME == "default.gems"


def test_an_implementation_that_says_it_is_not_available_is_not() -> None:
    def relu(input: Any, quantizer: Any) -> Any:
        return input

    relu._is_available = lambda: False  # type: ignore[attr-defined]
    made = Registry()
    made.put_registered(registry.registered())
    made.register_impl(_implementation(fn=relu))
    assert ("hygon", "its is_available() is false") in made.decide(_RELU).others
    made.register_impl(_implementation(impl_id="vendor.new", min_arch="sm_9999"))
    assert made.decide(_RELU).backend not in ("hygon", "new")


_REFUSED: dict[str, tuple[Any, str]] = {
    "no list": (3, "register_many: expected a list of OpImpl"),
    "no implementation": ([object()], "objects with op_name, impl_id, kind and fn"),
    "a misspelt function": (
        [_implementation("rellu")],
        r"the implementation vendor.hygon: expected functions of tex, got rellu \(do you mean relu\?\)",
    ),
    "no function": ([_implementation(fn=3)], "the implementation vendor.hygon: expected a function, got 3"),  # type: ignore[arg-type]
    "another signature": ([_implementation(fn=lambda input, quantizer, out: input)], "a parameter out, which the function lacks"),
    "no vendor": ([_implementation(vendor=None)], "the implementation vendor.hygon: expected a vendor"),
    "another kind": ([_implementation(kind="native")], "a kind of flagos, vendor or reference"),
    "two of a function": ([_implementation(), _implementation()], "the implementations vendor.hygon: expected one implementation of a function"),
    "two vendors": ([_implementation(), _implementation("gelu", vendor="Other")], "the implementations vendor.hygon: expected one vendor"),
    "a taken name": ([_implementation("gelu", impl_id="vendor.new"), _implementation(impl_id="vendor.cpu")], "the name 'cpu': expected one backend"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_register_many_refuses_registers_nothing(fresh: Registry, case: str) -> None:
    given, says = _REFUSED[case]
    before = fresh.registered()
    with pytest.raises(BackendError, match=says):
        fresh.register_many(given)
    assert fresh.registered() == before
    assert before["cpu"] is registry.find("cpu")


def test_a_plugin_of_the_other_protocol_loads(fresh: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(
        tmp_path,
        fl_plugin="from fusible.tex import BackendImplKind, OpImpl\n\n"
        "def te_fl_register(registry):\n    registry.register_many([OpImpl('relu', 'vendor.fl', BackendImplKind.VENDOR, "
        "lambda input, quantizer: input * 0, vendor='FL', priority=200)])\n",
    )
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "fl_plugin")
    assert fresh.decide(_RELU).backend == "fl"
