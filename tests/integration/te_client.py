"""NVIDIA's Python package as a client of ``fusible.tex``: how tests load it, its recipes and their precision."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusible import compat

__all__ = ["EPSILON", "EPSILON_OF_QUANTIZER", "QUANTIZERS", "RECIPES_OF_CLIENT", "package", "package_on", "recipe_for", "relative_error"]

EPSILON = {"bf16": 2.0**-8, "delayed": 2.0**-3, "current": 2.0**-3, "block": 2.0**-4, "mxfp8": 2.0**-4, "nvfp4": 2.0**-2 + 2.0**-4}
"""By recipe: the largest relative error of rounding an operand, forward or backward: half a unit of E5M2 for the hybrid recipes' gradients, of E4M3
for the others, of E2M1 and of its E4M3 scale for NVFP4."""

EPSILON_OF_QUANTIZER = {"delayed": 2.0**-4, "current": 2.0**-4, "block": 2.0**-4, "mxfp8": 2.0**-4, "nvfp4": 2.0**-2 + 2.0**-4}
"""By quantizer: the largest relative error of a value: half a unit of E4M3, and of E2M1 beside its scale's."""

QUANTIZERS: dict[str, Callable[..., Any]] = {
    "delayed": lambda te: te.Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), te.DType.kFloat8E4M3),
    "current": lambda te: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cuda"),
    "block": lambda te: te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda te: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": lambda te: te.NVFP4Quantizer(),
}
"""By name, what makes one of each quantizer of the package, given that."""

_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
RECIPES_OF_CLIENT = tuple(_RECIPES)
_AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


@contextmanager
def package() -> Iterator[Any]:
    """``transformer_engine.pytorch`` on a CPU; the test is skipped where the package is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("NVIDIA's Python package is not installed")
    compat.install()
    try:
        with compat.cuda_on_cpu():
            yield importlib.import_module("transformer_engine.pytorch")
    finally:
        compat.uninstall()


@contextmanager
def package_on(capability: tuple[int, int]) -> Iterator[Any]:
    """``package``, on a device of that capability. The package asks once what device there is."""
    with package() as te, compat.cuda_on_cpu(capability=capability):
        asked = importlib.import_module("transformer_engine.pytorch.utils")._get_device_compute_capability
        asked.cache_clear()
        try:
            yield te
        finally:
            asked.cache_clear()


def recipe_for(te: Any, name: str, **options: Any) -> Any:
    """The recipe of a name (None for bf16), which the package must say is available."""
    if name == "bf16":
        return None
    available, reason = getattr(te, _AVAILABLE[name])(return_reason=True)
    assert available, reason
    return getattr(importlib.import_module("transformer_engine.common.recipe"), _RECIPES[name])(**options)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``|found - expected| / |expected|`` in the Frobenius norm, of the values that quantized tensors stand for."""
    x, y = (t.double() if type(t) in (torch.Tensor, torch.nn.Parameter) else t.dequantize().double() for t in (found, expected))
    return ((x - y).norm() / y.norm()).item()
