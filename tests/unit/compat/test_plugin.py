"""Fusible as the plugin that ``NVTE_PLUGIN`` names: what it puts where, and who answers NVIDIA's hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from te_names_hidden import restored

from fusible import compat, plugin, tex
from fusible.compat import nvidia_package
from fusible.compat.finder import Names
from fusible.compat.nvidia_package import PATCHES, TENSOR_PATCHES
from fusible.errors import ArgumentError, NotServedError
from fusible.plugin import hooks, patches
from fusible.tex.selection.registry import registry

NATIVE = "transformer_engine_torch"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with restored():
        yield


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    module = ModuleType(NATIVE)
    sys.modules[NATIVE] = module
    return module


def added() -> list[Names]:
    return [finder for finder in sys.meta_path if isinstance(finder, Names)]


def test_the_hooks_are_there_once_it_is_loaded_and_it_may_be_loaded_twice(native: ModuleType) -> None:
    assert not any(hasattr(tex, name) for name in hooks.HOOKS)
    before = len(added())
    plugin.load_plugins()
    plugin.load_plugins()
    assert sys.modules[NATIVE] is tex and len(added()) == before + 1
    assert importlib.import_module(f"{NATIVE}.enums") is tex.enums
    assert (tex.flash_attention, tex.get_attention_backend) == (hooks.flash_attention, hooks.get_attention_backend)
    assert not hooks.HOOKS.keys() & set(tex.__all__)


def test_compat_takes_the_names_that_the_plugin_left(native: ModuleType) -> None:
    plugin.load_plugins()
    compat.install(replace=True)
    try:
        assert importlib.import_module(NATIVE) is tex
    finally:
        compat.uninstall()
    assert sys.modules[NATIVE] is tex


def test_a_module_that_holds_the_native_one_is_told(native: ModuleType) -> None:
    holder = ModuleType("transformer_engine.pytorch.constants")
    holder.tex = native  # type: ignore[attr-defined]
    sys.modules[holder.__name__] = holder
    finders = list(sys.meta_path)
    with pytest.raises(ArgumentError, match="got transformer_engine.pytorch.constants; set NVTE_PLUGIN=fusible.plugin before"):
        plugin.load_plugins()
    assert sys.modules[NATIVE] is native and sys.meta_path == finders and not hasattr(tex, "flash_attention")


@pytest.mark.parametrize("available", [True, False])
def test_what_is_asked_of_the_device_is_answered_where_no_native_library_is(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.find("nvidia"), "unavailable", lambda: None if available else "no GPU")
    registry.changed()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Names)]
    patches.apply_patches()
    (names,) = added()
    assert names.patches.keys() == (TENSOR_PATCHES.keys() if available else PATCHES.keys() - {"transformer_engine.common"})
    assert not names.aliases and not names.packages


class Vendor(tex.TEXBackendBase):
    NAME = "hooked"
    VENDOR = "Hooked"
    PRIORITY = 500

    def get_attention_backend(self, attention_params: Any) -> Any:
        return None if attention_params == "nobody's" else ("vendor", attention_params)

    def get_flash_attention_class(self) -> Any:
        return SimpleNamespace


@pytest.fixture
def vendor() -> Iterator[None]:
    tex.register_backend(Vendor)
    yield
    if "hooked" in registry.registered():
        registry.unregister_backend("hooked")


@pytest.fixture
def theirs() -> None:
    """NVIDIA's modules of attention, as the package has them once it has asked for the hooks."""
    made = {
        "utils": {"_original_get_attention_backend": lambda params: ("NVIDIA", params)},
        "backends": {"FlashAttention": lambda scale, **options: ("NVIDIA", scale, options)},
    }
    for name, contained in made.items():
        module = ModuleType(f"{hooks._ATTENTION}.{name}")
        vars(module).update(contained)
        sys.modules[module.__name__] = module


@pytest.mark.usefixtures("vendor", "theirs")
def test_the_best_backend_that_has_a_say_answers_and_else_nvidia() -> None:
    assert hooks.get_attention_backend("params") == ("vendor", "params")
    assert hooks.get_attention_backend("nobody's") == ("NVIDIA", "nobody's")
    assert hooks.flash_attention(softmax_scale=0.5).softmax_scale == 0.5
    with tex.set_policy(tex.Policy(deny_vendors=frozenset({"hooked"}))):
        assert hooks.get_attention_backend("params") == ("NVIDIA", "params")
        assert hooks.flash_attention(0.5, attention_dropout=0.1) == ("NVIDIA", 0.5, {"attention_dropout": 0.1})
    with tex.set_backend("torch", strict=True):
        assert hooks.get_attention_backend("params") == ("NVIDIA", "params")
    registry.unregister_backend("hooked")
    assert hooks.get_attention_backend("params") == ("NVIDIA", "params")


@pytest.mark.parametrize(
    ("hook", "missing"), [(hooks.get_attention_backend, "utils._original_get_attention_backend"), (hooks.flash_attention, "backends.FlashAttention")]
)
def test_without_the_package_a_hook_says_what_is_missing(hook: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"{hooks._ATTENTION}.{missing.partition('.')[0]}", raising=False)
    with pytest.raises(NotServedError, match=f"a hook of fusible.plugin: expected .*{missing}, got none; set NVTE_PLUGIN"):
        hook(None)


def test_hooks_registered_one_by_one_are_asked() -> None:
    """As plugins of TransformerEngine-FL register them."""
    common = {"impl_id": "vendor.hooked", "kind": tex.BackendImplKind.VENDOR, "vendor": "Hooked", "priority": 500}
    registry.register_many(
        [
            tex.OpImpl(op_name="get_attention_backend", fn=lambda attention_params: ("registered", attention_params), **common),
            tex.OpImpl(op_name="get_flash_attention_class", fn=lambda: SimpleNamespace, **common),
        ]
    )
    try:
        assert hooks.get_attention_backend("params") == ("registered", "params")
        assert hooks.flash_attention(a=1).a == 1
    finally:
        registry.unregister_backend("hooked")


def test_another_plugin_is_called_too_and_one_that_fails_is_warned_of(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's loader does, where compat answers in its place."""
    called = []
    other: Any = ModuleType("vendor_plugin")
    other.load_plugins = lambda: called.append(True)
    monkeypatch.setitem(sys.modules, "vendor_plugin", other)
    nvidia_package._load_plugin(None)
    nvidia_package._load_plugin("vendor_plugin")
    assert called == [True]

    def fail() -> None:
        sys.modules[NATIVE] = other
        raise ValueError("not here")

    other.load_plugins = fail
    with pytest.warns(RuntimeWarning, match="NVTE_PLUGIN=vendor_plugin did not load, so that tex serves without it: not here"):
        nvidia_package._load_plugin("vendor_plugin")
    assert sys.modules[NATIVE] is native
