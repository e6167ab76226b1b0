"""The names of Transformer Engine's kernels lead to ``fusible.tex`` while they are installed, and only where nothing else has them."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from te_names_hidden import hide

import fusible
from fusible import compat, tex
from fusible.compat import finder
from fusible.compat.clients import CLIENTS
from fusible.errors import ArgumentError
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection import management

FUNCTIONS = [name for name in DECLARATIONS if not name.startswith("prim_")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hide(monkeypatch)
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name",
    [
        "transformer_engine_torch",
        "transformer_engine_fl_torch",
        "transformer_engine.plugins.tex",
        "transformer_engine.plugins.transformer_engine_fl_torch",
    ],
)
def test_the_names_are_tex_itself(name: str) -> None:
    module = importlib.import_module(name)
    assert module is tex
    assert importlib.util.find_spec(name) is not None
    star: dict[str, object] = {}
    exec(f"from {name} import *", star)
    assert set(FUNCTIONS) <= star.keys() and set(FUNCTIONS) <= vars(module).keys()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["transformer_engine_fl_torch", "transformer_engine.plugins.transformer_engine_fl_torch"])
def test_a_star_brings_tex_and_what_chooses_a_backend(name: str) -> None:
    star: dict[str, Any] = {}
    exec(f"from {name} import *", star)
    assert star["tex"] is tex and star["tex"].rmsnorm_fwd is star["rmsnorm_fwd"]
    x = torch.randn(4, 8)
    with star["set_backend"]("torch"):
        assert star["get_backend"]().name == "torch"
        y, nothing, rsigma = star["tex"].rmsnorm_fwd(x, torch.ones(8), 1e-5, None, None, torch.float32, 0, False)
    torch.testing.assert_close(y, x * rsigma[:, None])
    assert nothing is None and {"name", "vendor", "priority", "available"} <= star["list_backends"]()[0].keys()


@pytest.mark.usefixtures("installed")
def test_a_module_of_backends_is_the_same_by_both_names() -> None:
    from transformer_engine.plugins.tex_interface.backends import flaggems

    assert flaggems is importlib.import_module("fusible.tex.backends.flaggems")


@pytest.mark.usefixtures("installed")
def test_the_interface_is_found_in_its_parts() -> None:
    from transformer_engine.plugins import tex_interface
    from transformer_engine.plugins.tex_interface import backends, base, registry

    assert base.TEXBackendBase is tex.TEXBackendBase and registry is management and backends is tex.backends
    assert tex_interface.TEXBackendBase is tex.TEXBackendBase and tex_interface.register_backend is tex.register_backend


@pytest.mark.usefixtures("installed")
def test_another_name_leaves_the_module_as_it_was() -> None:
    registry = tex.registry
    importlib.import_module("transformer_engine_torch")
    importlib.import_module("transformer_engine.plugins.tex_interface.registry")
    assert tex.registry is registry and fusible.tex is tex
    assert tex.__spec__ is not None and tex.__spec__.name == "fusible.tex" and tex.__name__ == "fusible.tex"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["transformer_engine_torch", "transformer_engine_fl_torch"])
def test_a_submodule_is_not_loaded_twice(name: str) -> None:
    importlib.import_module(name)
    assert importlib.import_module(f"{name}.enums") is tex.enums
    assert importlib.import_module(f"{name}.registry").registry is tex.registry


def test_the_package_of_its_own_needs_no_install() -> None:
    assert not compat.installed()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine_fl_torch"]:
        del sys.modules[name]
    module = importlib.import_module("transformer_engine_fl_torch")
    assert module is tex and importlib.util.find_spec("transformer_engine_fl_torch") is not None
    assert importlib.import_module("transformer_engine_fl_torch.enums") is tex.enums
    assert importlib.import_module("transformer_engine_fl_torch.registry").registry is tex.registry
    assert importlib.import_module("transformer_engine_fl_torch.grouped_mlp_experimental") is tex.grouped_mlp_experimental


@pytest.mark.usefixtures("installed")
def test_enumerations_are_pickled_and_found_by_both_names() -> None:
    assert pickle.loads(pickle.dumps(tex.DType.kBFloat16)) is tex.DType.kBFloat16
    assert pickle.loads(b"ctransformer_engine_torch\nDType\n.") is tex.DType


def test_the_grouped_mlp_is_a_submodule() -> None:
    from fusible.tex import grouped_mlp_experimental

    assert grouped_mlp_experimental is importlib.import_module("fusible.tex.grouped_mlp_experimental") is tex.grouped_mlp_experimental
    expected = {"swizzle_scales_and_pack_ptrs_for_discrete_weights"} & DECLARATIONS.keys()
    assert set(grouped_mlp_experimental.__all__) == expected and all(hasattr(grouped_mlp_experimental, name) for name in expected)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    hide(monkeypatch)
    path, modules = list(sys.meta_path), set(sys.modules)
    assert not compat.installed()
    compat.install()
    compat.install()
    assert compat.installed() and len(sys.meta_path) == len(path) + 1
    for name in ("transformer_engine_torch", "transformer_engine.plugins.tex_interface.base"):
        importlib.import_module(name)
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == path and not compat.installed()
    assert {name for name in sys.modules if name.startswith("transformer_engine")} <= modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine_torch")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path that stands for an installation; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    compat.uninstall()
    for name in [name for name in sys.modules if name.startswith("transformer_engine") and sys.modules[name] is not before.get(name)]:
        del sys.modules[name]


def test_an_installed_extension_keeps_its_name(native: Path) -> None:
    (native / "transformer_engine_torch.py").write_text("real = True\n")
    compat.install()
    assert importlib.import_module("transformer_engine_torch").real
    around = next(found for found in sys.meta_path if isinstance(found, finder.Names)).patches
    assert around == CLIENTS  # NVIDIA's package runs on its own kernels


def test_an_installed_extension_is_replaced_on_demand(native: Path) -> None:
    (native / "transformer_engine_torch.py").write_text("real = True\n")
    compat.install(replace=True)
    assert importlib.import_module("transformer_engine_torch") is tex


def test_an_extension_within_the_package_counts(native: Path) -> None:
    (native / "transformer_engine" / "wheel_lib").mkdir(parents=True)
    (native / "transformer_engine" / "__init__.py").touch()
    (native / "transformer_engine" / "wheel_lib" / "transformer_engine_torch.cpython-311.so").touch()
    compat.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine_torch")


def test_an_installed_plugin_keeps_its_name(native: Path) -> None:
    (native / "transformer_engine" / "plugins").mkdir(parents=True)
    (native / "transformer_engine" / "__init__.py").touch()
    (native / "transformer_engine" / "plugins" / "__init__.py").touch()
    (native / "transformer_engine" / "plugins" / "tex.py").write_text("real = True\n")
    compat.install()
    assert importlib.import_module("transformer_engine.plugins.tex").real
    assert importlib.import_module("transformer_engine.plugins.transformer_engine_fl_torch") is tex


def test_an_extension_in_use_is_not_replaced(native: Path) -> None:
    (native / "transformer_engine_torch.py").write_text("real = True\n")
    importlib.import_module("transformer_engine_torch")
    with pytest.raises(ArgumentError, match="the modules imported so far: expected no transformer_engine_torch"):
        compat.install(replace=True)
    assert not compat.installed()


@pytest.mark.parametrize("name", ["tripy", "nvtripy"])
def test_tripy_is_the_lazy_compiler_when_asked_for(name: str) -> None:
    from fusible import lazy

    compat.install()
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        compat.install(tripy=True)
        assert importlib.import_module(name) is lazy
        assert importlib.import_module(f"{name}.dtypes") is lazy.dtypes
    finally:
        compat.uninstall()
    assert not any(module.split(".")[0] == name for module in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
