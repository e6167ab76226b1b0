"""NVIDIA's package binds names of ``transformer_engine_torch`` when it is imported. Whatever comes first, its import, ours or the choice of a
backend, the same is computed by the same backends, and what cannot be says so."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from te_client import package
from te_source import LACKING, early

from fusible import tex
from fusible.errors import expected
from fusible.tex.interface.declare import DECLARATIONS

HERE = Path(__file__).parent
ORDERS = ["install,choose,load", "install,load,choose", "choose,install,load", "attempt,install,load,choose", "install,load,again,choose"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="NVIDIA's Python package is not installed")


def run(*words: str, **environment: str) -> Any:
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *words], env=known, cwd=HERE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_order_computes_the_same_by_the_same_backends() -> None:
    found = {order: run("te_orders.py", order) for order in ORDERS}
    first = found[ORDERS[0]]
    assert {backend for _, backend in first["calls"]} == {"torch"} and len(first["calls"]) > 8
    assert all(loss > 0 for loss in first["losses"])
    assert found == dict.fromkeys(ORDERS, first)


def test_what_the_package_binds_when_it_is_imported_is_tex_itself() -> None:
    """A function of tex chooses when it is called, so who holds it is served by whatever is in force then."""
    found = list(early())
    by_name = {(module, name) for module, name, where in found if ":" not in where}
    with package():
        loaded = {module: vars(sys.modules[module]) for module, _, _ in found if module in sys.modules}
        held = {(module, name): loaded[module][name] for module, name in by_name if module in loaded}
        assert {of: value for of, value in held.items() if value is not getattr(tex, of[1])} == {}
        assert {module for module, names in loaded.items() if names.get("tex", tex) is not tex} == set()
    assert len(held) > 20 and len(loaded) > 8, (sorted(held), sorted(loaded))


def test_a_backend_set_or_registered_after_the_import_serves_what_was_bound_before() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    with package():
        held = importlib.import_module("transformer_engine.pytorch.ops.basic.rmsnorm").rmsnorm_fwd
        call = (x, weight, 1e-5, None, None, torch.float32, 0, False)
        expected = held(*call)[0]
        for backend in ("torch", "cpu"):
            if tex.coverage()["rmsnorm_fwd"][backend] is None:
                with tex.set_backend(backend), tex.record() as calls:
                    torch.testing.assert_close(held(*call)[0], expected)
                assert [call.backend for call in calls] == [backend]

        class Later(tex.TEXBackendBase):
            NAME = "later"
            PRIORITY = 1000

            def rmsnorm_fwd(self, *arguments: Any) -> Any:
                return [arguments[0], None, None]

        tex.register_backend(Later)
        try:
            assert held(*call)[0] is call[0]
        finally:
            tex.registry.unregister_backend("later")
        assert torch.equal(held(*call)[0], expected)


def test_what_is_bound_early_is_functions_classes_and_enumerations() -> None:
    """No value that a call of tex gave: such a one would be that of the backend in force at the import."""
    kinds = {name for _, name, _ in early()} - LACKING
    assert {name for name in kinds if name not in DECLARATIONS} <= {*tex.enums.__all__, *tex.classes.__all__}


@pytest.mark.slow
def test_the_package_loads_tex_as_its_plugin(tmp_path: Path) -> None:
    """By NVIDIA's own loader, over a stand-in for the native library."""
    found = run("te_native.py", str(tmp_path), NVTE_PLUGIN="fusible.plugin", NVTE_PROJECT_BUILDING="1", NVTE_TORCH_COMPILE="0")
    assert all(found[name] for name in ("served", "aside", "submodule", "hooks", "same")), found
    assert {"generic_gemm", "quantize"} <= set(found["quantized"])
    assert found["vendor"] == {"asked": 2, "made": 2} and found["without"] == found["vendor"]
    what = "no module of transformer_engine that has imported transformer_engine_torch"
    do = "set NVTE_PLUGIN=fusible.plugin before transformer_engine is imported"
    assert found["late"] == expected(what, of="load_plugins", got="transformer_engine.pytorch.constants", do=do)
