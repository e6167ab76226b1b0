"""The package's own names: found by star-import, by ``dir``, and one by one."""

from __future__ import annotations

import pytest

import fusible
from fusible import pytorch


def test_public_names_are_those_of_the_pytorch_room() -> None:
    namespace: dict[str, object] = {}
    exec("from fusible import *", namespace)
    assert set(pytorch.__all__) <= set(namespace) and set(pytorch.__all__) <= set(dir(fusible))
    assert fusible.Linear is pytorch.Linear
    with pytest.raises(AttributeError, match="module 'fusible' has no attribute 'Liner'"):
        fusible.Liner  # noqa: B018
