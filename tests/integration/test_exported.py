"""An inference pass written to a file runs in a process without torch, the module or its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fusible
from fusible import lazy
from fusible.errors import CheckpointError
from fusible.pytorch.export import export

WIDTH, TOKENS = 32, 16
_ELSEWHERE = """
import sys
import numpy as np
from fusible.lazy import Executable
run = Executable.load(sys.argv[1])
np.save(sys.argv[3], np.asarray(run(np.load(sys.argv[2]))))
assert "torch" not in sys.modules
"""


def _model() -> fusible.Sequential:
    torch.manual_seed(0)
    parts = [fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 64), fusible.GELU(), fusible.Linear(64, WIDTH)]
    return fusible.Sequential(*parts)


@pytest.mark.parametrize("recipe", [None, fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling()], ids=str)
def test_a_saved_pass_gives_the_same_numbers_elsewhere(recipe: fusible.Recipe | None, tmp_path: Path) -> None:
    model = _model()
    x = torch.randn(2, TOKENS, WIDTH)
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        model(x).square().sum().backward()  # delayed scaling has seen something
        model.compile("xla")
        with torch.no_grad():
            want = model(x).numpy()
        export(model, tmp_path / "program", x)
    np.save(tmp_path / "x.npy", x.numpy())
    command = [sys.executable, "-c", _ELSEWHERE, *(str(tmp_path / name) for name in ("program", "x.npy", "y.npy"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), want)


def test_exporting_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    model, x = _model(), torch.randn(TOKENS, WIDTH)
    before = model(x)
    export(model, tmp_path / "program", x)
    assert torch.equal(model(x), before) and model(x).requires_grad
    (tmp_path / "program").write_bytes((tmp_path / "program").read_bytes()[:-20])
    with pytest.raises(CheckpointError):
        lazy.Executable.load(tmp_path / "program")
