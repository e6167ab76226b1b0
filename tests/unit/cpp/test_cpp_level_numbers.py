"""Which families of kernels give the same bits at every level of instructions, and how far the others lie apart."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusible import cpp_extensions as native

SCRIPT = Path(__file__).with_name("level_numbers.py")
EVERYWHERE = {"relu", "drelu", "srelu", "dsrelu", "cast", "dequantize", "l2norm"}
"""The same bits at every level: one rounding of exact arithmetic, or sums in double."""

SUMS = {"layernorm", "layernorm mu", "layernorm rsigma", "layernorm_bwd", "layernorm dgamma", "rmsnorm", "rmsnorm_bwd", "softmax"}
SUMS |= {"attention O", "attention Stats"}
"""Sums over a vector's lanes, as many as the level has."""

BOUND = 16 * 2.0**-24
"""Of the largest result: a few roundings of fp32, in another order."""


def numbers(level: str, tmp_path: Path) -> dict[str, Any]:
    target = tmp_path / f"{level}.npz"
    done = subprocess.run([sys.executable, SCRIPT, target], env={**os.environ, "FUSIBLE_CPU_LEVEL": level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(target))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="one level")
def test_what_levels_agree_in_and_how_far_they_lie_apart(tmp_path: Path) -> None:
    if "avx512" not in native.usable_levels():
        pytest.skip(f"levels are compared with AVX-512, and this machine has {native.usable_levels()}")
    best, avx2, generic = (numbers(level, tmp_path) for level in ("avx512", "avx2", "generic"))
    apart = 0
    for name, wanted in best.items():
        scale = np.abs(wanted).max()
        for other, same in ((avx2, name not in SUMS), (generic, name in EVERYWHERE)):
            if same:
                assert np.array_equal(wanted, other[name]), name
            else:
                assert np.abs(wanted - other[name]).max() <= BOUND * scale, name
                apart += not np.array_equal(wanted, other[name])
    assert apart > 10  # the levels were others
