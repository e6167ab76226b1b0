"""What is answered around the modules of NVIDIA's package: on a stand-in for it, of which everything is seen."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusible import compat, knobs, tex

SOURCES = {
    "__init__.py": "import transformer_engine.common\n",
    "common/__init__.py": """
import os
building = os.environ.get("NVTE_PROJECT_BUILDING")

def load_framework_extension(framework):
    raise FileNotFoundError("Could not find shared object file for " + framework)
""",
    "pytorch/__init__.py": "",
    "pytorch/jit.py": "import os\ncompiled = os.environ.get('NVTE_TORCH_COMPILE')\n",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in SOURCES.items():
        path = tmp_path / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("NVTE_TORCH_COMPILE", raising=False)
    before = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    for name in before:
        del sys.modules[name]
    yield
    compat.uninstall()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("stand_in")
def test_no_native_library_is_loaded_and_the_extension_is_tex() -> None:
    compat.install()
    common = importlib.import_module("transformer_engine.common")
    assert common.building == "1" and "NVTE_PROJECT_BUILDING" not in os.environ
    assert "transformer_engine_torch" not in sys.modules
    common.load_framework_extension("torch")
    assert sys.modules["transformer_engine_torch"] is tex
    with pytest.raises(ImportError, match="Could not find shared object file for jax"):
        common.load_framework_extension("jax")


@pytest.mark.usefixtures("stand_in")
def test_what_is_loaded_already_is_answered_at_once() -> None:
    common = importlib.import_module("transformer_engine.common")
    with pytest.raises(FileNotFoundError):
        common.load_framework_extension("torch")
    compat.install()
    common.load_framework_extension("torch")
    assert sys.modules["transformer_engine_torch"] is tex


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("wanted", "seen"), [(None, "0"), ("1", "1")])
def test_small_functions_are_compiled_on_demand_alone(monkeypatch: pytest.MonkeyPatch, wanted: str | None, seen: str) -> None:
    if wanted is not None:
        monkeypatch.setenv("NVTE_TORCH_COMPILE", wanted)
    compat.install()
    assert importlib.import_module("transformer_engine.pytorch.jit").compiled == seen
    assert os.environ.get("NVTE_TORCH_COMPILE") == wanted


@pytest.mark.usefixtures("stand_in")
def test_a_module_keeps_what_its_loader_tells() -> None:
    compat.install()
    common = importlib.import_module("transformer_engine.common")
    assert common.__spec__ is not None and common.__spec__.loader is not None
    assert "load_framework_extension" in common.__spec__.loader.get_source("transformer_engine.common")  # pyright: ignore[reportAttributeAccessIssue]


def test_a_setting_holds_while_it_is_open_and_where_nothing_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIBLE_TEST_SET", "before")
    monkeypatch.delenv("FUSIBLE_TEST_UNSET", raising=False)
    with pytest.raises(KeyError), knobs.setting(FUSIBLE_TEST_SET="within", FUSIBLE_TEST_UNSET="within"):
        assert (os.environ["FUSIBLE_TEST_SET"], os.environ["FUSIBLE_TEST_UNSET"]) == ("before", "within")
        raise KeyError
    assert os.environ["FUSIBLE_TEST_SET"] == "before" and "FUSIBLE_TEST_UNSET" not in os.environ
