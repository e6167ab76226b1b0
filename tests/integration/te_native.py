"""NVIDIA's own loader with a stand-in for its native library, and ``NVTE_PLUGIN=fusible.plugin``; prints what came of it.

``python te_native.py FOLDER``: an empty folder, for the stand-in.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fusible import compat, tex

STAND_IN = """
from fusible import tex as _tex
globals().update({name: getattr(_tex, name) for name in _tex.__all__})
"""
"""What is loaded as the native library: another module with the same names."""

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def load(folder: Path) -> Any:
    file = folder / "native.py"
    file.write_text(STAND_IN)
    common: Any = importlib.import_module("transformer_engine.common")
    common._get_shared_object_file = lambda framework: file
    return importlib.import_module("transformer_engine.pytorch")


class Flash(torch.nn.Module):
    """A vendor's attention, which notes its calls."""

    made: list[dict[str, Any]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.made.append(options)


class HookedBackend(tex.TEXBackendBase):
    NAME = "hooked"
    PRIORITY = 500
    asked: list[Any] = []

    def get_flash_attention_class(self) -> Any:
        return Flash

    def get_attention_backend(self, attention_params: Any) -> Any:
        self.asked.append(attention_params)
        return None  # NVIDIA's own decides


def attend(te: Any, tokens: int) -> torch.Tensor:
    """The package asks once for problems that are alike, one after the other, and so not for the second of the same number of tokens."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, 2, 4, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return te.DotProductAttention(4, 16, attn_mask_type="no_mask")(q, k, v)


def run(folder: Path) -> dict[str, Any]:
    te = load(folder)
    found: dict[str, Any] = {
        "served": sys.modules["transformer_engine_torch"] is tex,
        "aside": getattr(sys.modules["transformer_engine_torch_nv"], "__file__", None) == str(folder / "native.py"),
        "submodule": importlib.import_module("transformer_engine_torch.enums") is tex.enums,
    }
    module = sys.modules[f"{ATTENTION}.dot_product_attention"]
    hooks = importlib.import_module("fusible.plugin.hooks")
    found["hooks"] = module.FlashAttention is hooks.flash_attention and module.dpa_utils.get_attention_backend is hooks.get_attention_backend
    native = attend(te, 8)
    linear = te.Linear(32, 32)
    with te.autocast(recipe=importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()), tex.record() as calls:
        y = linear(torch.randn(16, 32, device="cuda"))
    y.sum().backward()
    found["quantized"] = sorted({call.function for call in calls})
    tex.register_backend(HookedBackend)
    attend(te, 16)
    found["same"] = torch.equal(attend(te, 8), native)
    found["vendor"] = {"asked": len(HookedBackend.asked), "made": len(Flash.made)}
    tex.registry.unregister_backend("hooked")
    attend(te, 16)
    found["without"] = {"asked": len(HookedBackend.asked), "made": len(Flash.made)}
    found["late"] = late()
    return found


def late() -> str:
    """What the plugin says once the package holds another module."""
    other: Any = sys.modules["transformer_engine_torch_nv"]
    sys.modules["transformer_engine_torch"] = other
    sys.modules["transformer_engine.pytorch.constants"].tex = other
    try:
        importlib.import_module("fusible.plugin").load_plugins()
    except ValueError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    with compat.cuda_on_cpu():
        print(json.dumps(run(Path(sys.argv[1]))))
