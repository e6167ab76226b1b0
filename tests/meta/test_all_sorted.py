"""``__all__``: in lexicographic order (that of ``sorted``), of names that exist, each with documentation."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import ROOT

PACKAGE = ROOT / "src" / "fusible"


def modules() -> list[str]:
    """Every module of the package, by name; running ``__main__`` would run the program."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


@pytest.fixture(scope="module")
def loaded() -> dict[str, ModuleType]:
    return {name: importlib.import_module(name) for name in modules()}


def test_every_all_is_sorted_and_names_what_exists(loaded: dict[str, ModuleType]) -> None:
    wrong = []
    for name, module in loaded.items():
        listed = getattr(module, "__all__", [])
        if listed != sorted(listed) or len(set(listed)) != len(listed):
            wrong.append(f"{name}: out of order: {[a for a, b in zip(listed, sorted(listed), strict=True) if a != b][:3]}")
        wrong += [f"{name}: no {item}" for item in listed if not hasattr(module, item)]
    assert not wrong


def test_every_module_says_what_it_is(loaded: dict[str, ModuleType]) -> None:
    assert not [name for name, module in loaded.items() if not module.__doc__ and Path(str(module.__file__)).read_text().strip()]


def test_every_public_class_and_function_is_documented(loaded: dict[str, ModuleType]) -> None:
    missing = set()
    for module in loaded.values():
        for item in getattr(module, "__all__", []):
            value = getattr(module, item, None)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            home = getattr(value, "__module__", "") or ""
            if home.startswith("fusible") and not _documented(value):
                missing.add(f"{home}.{value.__qualname__}")
    assert not missing, f"{len(missing)} without: {', '.join(sorted(missing))}"


def _documented(value: object) -> bool:
    """A class is documented by itself, or by a base of this package that it only fills in; the signature that ``dataclass`` writes is no text."""
    if not inspect.isclass(value):
        return bool(getattr(value, "__doc__", None))
    ours = [cls for cls in value.__mro__ if cls.__module__.startswith("fusible")]
    return any(doc and not doc.startswith(f"{cls.__name__}(") for cls in ours if (doc := vars(cls).get("__doc__")))
