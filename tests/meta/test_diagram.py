"""The diagram of imports is the one that the source gives."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_imports", ROOT / "docs" / "draw_imports.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagram_is_current(drawing: ModuleType) -> None:
    assert drawing.DIAGRAM.read_text() == drawing.draw(), "docs/import_diagram.svg is out of date: make diagram"


def test_every_room_is_in_it(drawing: ModuleType) -> None:
    rooms = {path.stem for path in drawing.SOURCE.iterdir() if not path.name.startswith("__") and path.suffix in ("", ".py")}
    assert rooms <= set(drawing.ROOMS)


def test_arcs_point_downwards_but_for_registration(drawing: ModuleType) -> None:
    order = list(drawing.ROOMS)
    upwards = {(here, there) for here, there in drawing.edges() if order.index(here) > order.index(there)}
    assert upwards <= {("tex", "tex.backends")}
