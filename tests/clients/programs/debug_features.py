"""A ``te.Linear`` under features of NVIDIA's debug tools, set by configurations as their users write them.

Run as ``debug_features.py FOLDER FEATURE/RECIPE ...`` it prints of each its second step's output, input's and weight's gradient, what plain torch
says of the input, and what the tools logged and dumped.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import torch
import transformer_engine
import transformer_engine.pytorch as te
import yaml
from transformer_engine.common import recipe

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
STATISTICS = {"tensors": ["activation", "gradient"], "freq": 1}
FEATURES = {
    "none": {"DisableFP8Layer": {}},
    "statistics": {"LogTensorStats": {**STATISTICS, "stats": ["min", "max", "mean", "std", "l1_norm"]}},
    "errors": {"LogFp8TensorStats": {**STATISTICS, "stats": ["underflows%", "mse"]}},
    "errors of 4 bits": {"LogNvfp4TensorStats": {**STATISTICS, "stats": ["underflows%", "mse"]}},
    "one product in bf16": {"DisableFP8GEMM": {"gemms": ["fprop"]}},
    "layer in bf16": {"DisableFP8Layer": {}},
    "own scale": {"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["activation", "weight"]}},
    "as if quantized": {"FakeQuant": {"quant_format": "FP8E4M3", "gemms": ["fprop"], "tensors": ["activation", "weight"]}},
    "dumped": {"DumpTensors": {"tensors": ["activation"], "high_precision_tensor": True, "quantized_tensor": True, "freq": 1}},
}


def configure(feature: str, folder: Path) -> None:
    chosen = {name: {"enabled": True, **options} for name, options in FEATURES[feature].items()}
    layers = {"layer_name_regex_pattern": "another" if feature == "none" else ".*"}
    section = {"enabled": True, "layers": layers, "transformer_engine": chosen}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "features.yaml").write_text(yaml.safe_dump({"chosen": section}))
    features = [str(Path(transformer_engine.__file__).parent / "debug" / "features")]
    debug_api.initialize(config_file=str(folder / "features.yaml"), feature_dirs=features, log_dir=str(folder), default_logging_enabled=True)


def logged(folder: Path) -> dict[str, float]:
    """The statistics of the first iteration."""
    (path,) = (folder / "nvdlfw_inspect_statistics_logs").iterdir()
    lines = re.findall(r"INFO - layer_(\S+)\s+iteration=0+\s+value=(\S+)", path.read_text())
    return {name: float(value) for name, value in lines}


def trained(feature: str, name: str, folder: Path) -> dict[str, Any]:
    configure(feature, folder)
    torch.manual_seed(0)
    layer = te.Linear(64, 128, bias=False, params_dtype=torch.bfloat16, device="cuda", name="layer")
    x = (20 * torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    dy = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = layer(x)
        y.backward(dy)
        debug_api.step()
    found = {key: value.detach().double().flatten().tolist() for key, value in {"y": y, "dx": x.grad, "dw": layer.weight.grad}.items()}
    wide = x.detach().double()
    statistics = {"min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std(), "l1_norm": wide.abs().sum()}
    dumps = sorted(path.name for path in folder.rglob("*.pt"))
    debug_api.end_debug()
    return {**found, "x": {key: value.item() for key, value in statistics.items()}, "logged": logged(folder), "dumps": dumps}


def main(folder: Path, *runs: str) -> None:
    print(json.dumps({run: trained(*run.split("/"), folder / run.replace("/", " ")) for run in runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
