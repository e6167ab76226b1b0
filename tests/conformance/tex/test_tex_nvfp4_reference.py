"""NVFP4 bit for bit as the pure-torch reference in NVIDIA's Python package has it, where that is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fusible.quantized import NVFP4Quantizer

FOLDER = "transformer_engine.pytorch.custom_recipes"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> Any:
    """The reference's module, loaded from its file: the package that it lies in wants native libraries."""
    package = importlib.util.find_spec("transformer_engine")
    if package is None or not package.submodule_search_locations:
        pytest.skip("transformer_engine is not installed")
    folder = Path(package.submodule_search_locations[0]) / "pytorch" / "custom_recipes"
    former = dict(sys.modules)

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    try:
        for name in ("transformer_engine", "transformer_engine.pytorch", FOLDER, f"{FOLDER}.gemm", "transformer_engine.pytorch.quantized_tensor"):
            sys.modules[name] = ModuleType(name)
        sys.modules["transformer_engine.pytorch.quantized_tensor"].__dict__.update(QuantizedTensorStorage=object, Quantizer=Quantizer)
        sys.modules[f"{FOLDER}.gemm"].__dict__.update(MMParams=object, GEMMType=SimpleNamespace(FPROP=0, DGRAD=1, WGRAD=2))
        sys.modules[FOLDER].__dict__["gemm"] = sys.modules[f"{FOLDER}.gemm"]
        sys.modules[FOLDER].__dict__["reference_utils"] = load(f"{FOLDER}.reference_utils", folder / "reference_utils.py")
        return load(f"{FOLDER}.reference_nvfp4", folder / "reference_nvfp4.py")
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            sys.modules.pop(name)
        sys.modules.update({name: module for name, module in former.items() if name.startswith("transformer_engine")})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"with_2d_quantization": True},
    {"with_rht": True},
    {"with_rht": True, "with_random_sign_mask": False},
    {"row_scaled_nvfp4": True},
    *({"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": top} for mode in ("MAE", "MSE") for top in (448, 256)),
    {"nvfp4_use_4over6": True, "with_2d_quantization": True},
    {"nvfp4_use_4over6": True, "with_2d_quantization": True, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
    {"nvfp4_use_4over6": True, "row_scaled_nvfp4": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_codes_scales_and_amaxes(reference: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    transformed = options.get("with_rht", False)
    if transformed and dtype is not torch.bfloat16:
        pytest.skip("only bfloat16 is transformed")
    generator = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-4, 4, (192, 16), generator=generator).repeat_interleave(16, 1)
    x = (torch.randn(192, 256, generator=generator) * sizes).to(dtype)
    x[5:9], x[40, 16:32] = 0, 0
    ours = NVFP4Quantizer(**options, with_post_rht_amax=transformed)(x)
    known = {name: value for name, value in options.items() if name != "with_2d_quantization"}
    tile = (16, 16) if options.get("with_2d_quantization") else (1, 16)
    theirs = reference.NVFP4QuantizerRef(dtype=None, quant_tile_shape=tile, **known).quantize(x)
    assert torch.equal(ours._amax_rowwise, theirs.global_amax_row) and torch.equal(ours._amax_columnwise, theirs.global_amax_col)
    for way, data, scale in (("rowwise", theirs.data, theirs.scale), ("columnwise", theirs.data_t, theirs.scale_t)):
        lines, blocks = scale.shape
        assert torch.equal(getattr(ours, f"_{way}_scale_inv")[:lines, :blocks], scale.view(torch.uint8))
        codes = getattr(ours, f"_{way}_data")
        # The reference gives -0 the code of 0: compared are values.
        assert torch.equal(reference.cast_from_fp4x2(codes, torch.float32), reference.cast_from_fp4x2(data, torch.float32))
