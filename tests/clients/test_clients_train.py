"""Frameworks that know Transformer Engine, as their users install them, under ``fusible run --device cpu``: they train, in 8 bits for real."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client_runs import ALONE, LAUNCHED, RECIPES, TWO_LAUNCHED, apart, check_quantized, fall, printed

MODES = {"delayed": "delayed (HYBRID)", "e4m3": "delayed (E4M3)", "mxfp8": "MXFP8"}
"""By what the program calls it, what Accelerate's ``TERecipeKwargs`` ask for."""


@pytest.fixture(scope="module")
def in_bf16() -> dict[str, dict[str, Any]]:
    """By model, what it comes to in bf16: made once."""
    return {}


MODELS = ["llama", "gpt2", "qwen3", "mixtral"]


@pytest.mark.client(
    "accelerate",
    "transformers",
    feature='`mixed_precision="fp8"`, `TERecipeKwargs`: Llama, GPT-2, Qwen3, Mixtral',
    recipes=MODES.values(),
    command=ALONE,
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_accelerate_trains_models_of_transformers(model: str, mode: str, in_bf16: dict[str, dict[str, Any]]) -> None:
    if model not in in_bf16:
        in_bf16[model] = printed(ALONE, "accelerate_model.py", model, "bf16")
    check_quantized(printed(ALONE, "accelerate_model.py", model, mode), in_bf16[model])


@pytest.mark.client("accelerate", "transformers", feature="two processes, data parallel", recipes=["delayed (HYBRID)"], command=TWO_LAUNCHED)
def test_two_processes_of_accelerate_train() -> None:
    plain = printed(TWO_LAUNCHED.replace("fp8", "bf16"), "accelerate_model.py", "llama", "bf16")
    check_quantized(printed(TWO_LAUNCHED, "accelerate_model.py", "llama", "delayed"), plain)


@pytest.mark.client(
    "transformers", "accelerate", feature="`Trainer`, and its resume from a checkpoint", recipes=["delayed (HYBRID)", "MXFP8"], command=LAUNCHED
)
def test_the_trainer_of_transformers_resumes() -> None:
    """Another model goes on from a checkpoint: with the very numbers, but for delayed scaling, whose scales the Trainer does not put into a model
    that Accelerate has yet to convert."""
    plain = printed(LAUNCHED.replace("fp8", "bf16"), "trainer_model.py")
    half = len(plain["losses"]) // 2
    assert plain["linears"] == plain["products"] == 0 and plain["resumed"] == plain["losses"][half:]
    for environment in ({}, {"ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "true"}):
        found = printed(LAUNCHED, "trainer_model.py", **environment)
        assert found["products"] == 3 * found["linears"] * (len(found["losses"]) + len(found["resumed"]))
        assert 2 * fall(found["losses"]) > fall(plain["losses"]) > 0 and apart(found["losses"], plain["losses"]) < 0.03
        if environment:
            assert found["resumed"] == found["losses"][half:]
        assert apart(found["resumed"], found["losses"][half:]) < 0.03


@pytest.mark.client(
    "lightning", feature='`Trainer`: `accelerator="gpu"` or `"auto"`, `precision="transformer-engine"`', recipes=["delayed"], command=ALONE
)
def test_lightning_trains_with_its_plugin() -> None:
    plain = printed(ALONE, "lightning_model.py", "auto", "bf16-mixed")
    check_quantized(printed(ALONE, "lightning_model.py", "gpu", "transformer-engine"), plain, first=1)


@pytest.mark.client("lightning", feature="`Fabric` with `TransformerEnginePrecision`", recipes=RECIPES.values(), command=ALONE)
def test_fabric_trains_with_its_plugin() -> None:
    plain, *found = printed(ALONE, "fabric_model.py", json.dumps(["bf16", *RECIPES]))
    for run in found:
        check_quantized(run, plain, first=1)


WITHOUT = "fusible run --device cpu --replace-package train.py"
"""NVIDIA's package is as if it were not there: its modules are Fusible's."""


@pytest.mark.client(
    "accelerate", "transformers", feature="without NVIDIA's package: Llama, GPT-2", recipes=["delayed (HYBRID)", "MXFP8"], command=WITHOUT
)
@pytest.mark.parametrize("mode", ["delayed", "mxfp8"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_accelerate_trains_without_nvidias_package(model: str, mode: str) -> None:
    plain = printed(WITHOUT, "accelerate_model.py", model, "bf16")
    check_quantized(printed(WITHOUT, "accelerate_model.py", model, mode), plain)


@pytest.mark.client("lightning", feature="`Trainer`, without NVIDIA's package", recipes=["delayed"], command=WITHOUT)
def test_lightning_trains_without_nvidias_package() -> None:
    plain = printed(WITHOUT, "lightning_model.py", "auto", "bf16-mixed")
    check_quantized(printed(WITHOUT, "lightning_model.py", "gpu", "transformer-engine"), plain, first=1)
