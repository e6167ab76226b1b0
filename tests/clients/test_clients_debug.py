"""NVIDIA's debug tools look into its modules and change what they do, product by product."""

from __future__ import annotations

from typing import Any

import pytest
from client_runs import RECIPES, printed

COMMAND = "fusible run --device cpu --capability 10.0 train.py"
RUNS = (
    "none/bf16", "none/current", "statistics/current", "errors/current", "errors/mxfp8", "errors of 4 bits/nvfp4", "one product in bf16/current",
    "layer in bf16/delayed", "own scale/delayed", "as if quantized/block", "none/block", "dumped/nvfp4",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By feature and recipe, what a layer gives."""
    return printed(COMMAND, "debug_features.py", str(tmp_path_factory.mktemp("debug")), *RUNS)


@pytest.mark.client(
    "nvdlfw-inspect",
    "transformer_engine",
    feature="debug tools: statistics of tensors and of what 8 and 4 bits lose, dumps, layers and products in bf16, fake quantization",
    recipes=RECIPES.values(),
    command=COMMAND,
)
def test_features_change_what_they_name_and_nothing_else(runs: dict[str, Any]) -> None:
    plain, quantized = runs["none/bf16"], runs["none/current"]
    mixed, off, own, fake = (runs[name] for name in RUNS[6:10])
    assert mixed["y"] == plain["y"] != quantized["y"]
    assert (mixed["dx"], mixed["dw"]) == (quantized["dx"], quantized["dw"])
    assert all(off[part] == plain[part] for part in ("y", "dx", "dw"))
    # A scale from the tensor itself is what current scaling takes, and what delayed scaling takes at the second step of the same tensors.
    assert own["y"] == quantized["y"]
    # Values that were rounded to 8 bits and back, by a tensor's scale and not by blocks', are multiplied in bf16: the same sums but for roundings.
    largest = max(map(abs, quantized["y"]))
    assert max(abs(a - b) for a, b in zip(fake["y"], quantized["y"], strict=True)) < 2**-8 * largest
    assert fake["y"] != runs["none/block"]["y"] and fake["dx"] == runs["none/block"]["dx"]
    for name in ("statistics/current", "errors/current"):
        assert all(runs[name][part] == quantized[part] for part in ("y", "dx", "dw")), "to look at tensors changes nothing"


def test_what_is_logged_is_so(runs: dict[str, Any]) -> None:
    """The tools sum in bf16's precision and print four digits."""
    found, of_x = runs["statistics/current"]["logged"], runs["statistics/current"]["x"]
    for name, value in of_x.items():
        assert found[f"activation_{name}"] == pytest.approx(value, rel=2**-7, abs=5e-5), name
    errors = {name: runs[name]["logged"] for name in ("errors/current", "errors/mxfp8", "errors of 4 bits/nvfp4")}
    mean_square = of_x["std"] ** 2
    for name, prefix, unit in (("errors/current", "", 2**-4), ("errors/mxfp8", "", 2**-4), ("errors of 4 bits/nvfp4", "nvfp4_", 2**-2)):
        # Each value is off by at most half a unit in the last place, evenly spread: between a fiftieth and all of the square of that.
        assert unit**2 / 50 < errors[name][f"activation_{prefix}mse"] / mean_square < unit**2


def test_what_is_dumped_is_there(runs: dict[str, Any]) -> None:
    """Of both steps."""
    assert runs["dumped/nvfp4"]["dumps"] == ["layer_activation.pt"] * 2
