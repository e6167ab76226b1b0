"""Programs of the kind that stand beside Transformer Engine as its examples, written for it and for a GPU: they run as they are."""

from __future__ import annotations

import json

import pytest
from client_runs import ALONE, RECIPES, check_quantized, printed

MODES = ["bf16", *RECIPES]
OF_ONNX = {name: RECIPES[name] for name in ("delayed", "current", "mxfp8")}
"""The recipes that NVIDIA's package exports."""


@pytest.mark.client(
    "torch",
    "transformer_engine",
    feature="a classifier of images: `te.Linear`, training and inference, pinned loaders",
    recipes=["delayed"],
    command=ALONE,
)
def test_a_classifier_of_digits_trains_and_infers() -> None:
    plain = printed(ALONE, "digits_classifier.py", "--use-te")
    found = printed(ALONE, "digits_classifier.py", "--use-te", "--use-fp8", "--use-fp8-infer")
    assert plain["inference"] == 0
    check_quantized(found, plain)
    assert found["inference"] == found["linears"] * 2, "two batches"
    assert min(found["accuracy"], plain["accuracy"]) > 0.9
    without = printed(ALONE, "digits_classifier.py")
    assert without["linears"] == without["products"] == 0 and without["accuracy"] > 0.9


@pytest.mark.client(
    "torch",
    "transformer_engine",
    feature="a primer: `Linear`, `LayerNormLinear`, `LayerNormMLP`, `TransformerLayer`, micro batches that share 8-bit weights",
    recipes=RECIPES.values(),
    command=ALONE,
)
def test_a_primer_trains_each_module() -> None:
    plain, *found = printed(ALONE, "fp8_primer.py", json.dumps(MODES))
    for runs in found:
        for name, run in runs.items():
            check_quantized(run, plain[name])


@pytest.mark.client(
    "transformers",
    "transformer_engine",
    feature="Llama and Gemma whose decoder layer becomes a `te.TransformerLayer`",
    recipes=RECIPES.values(),
    command=ALONE,
)
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_model_of_transformers_takes_a_layer_of_nvidias(model: str) -> None:
    """In fp32 the logits are those of transformers' own layers: each sums at most 128 products, twice in each of eight linear layers."""
    found = printed(ALONE, "decoder_layers.py", model, json.dumps(MODES))
    assert found["apart"] < 2 * 8 * 128 * 2**-24
    plain, *runs = found["runs"]
    for run in runs:
        check_quantized(run, plain)


@pytest.mark.client(
    "torch",
    "transformer_engine",
    feature="`quantized_model_init`, `FusedAdam` with master weights, `te.checkpoint`",
    recipes=RECIPES.values(),
    command=ALONE,
)
def test_quantized_weights_train_with_recomputed_activations() -> None:
    found = printed(ALONE, "quantized_weights.py", json.dumps(MODES))
    plain, *runs = found["runs"]
    assert plain["plain"]["quantized"] == 0 and plain["recomputed"]["losses"] == plain["plain"]["losses"]
    for run in runs:
        assert run["plain"]["quantized"] == run["plain"]["linears"]
        check_quantized(run["plain"], plain["plain"])
        check_quantized(run["recomputed"], plain["recomputed"], products=4)
        assert run["recomputed"]["losses"] == run["plain"]["losses"]


@pytest.mark.client(
    "torch",
    "transformer_engine",
    feature="ONNX export: `onnx_export`, `torch.onnx.export(..., custom_translation_table=te_translation_table)`",
    recipes=OF_ONNX.values(),
    command=ALONE,
)
def test_modules_are_exported_to_onnx() -> None:
    """What the file comes to is what the modules do: quantized tensors are the very same, and sums of at most 128 products in fp32, in four layers.
    In 8 bits each of the four quantizes its input and its weight."""
    plain, *found = printed(ALONE, "onnx_export.py", json.dumps(["bf16", *OF_ONNX]))
    assert plain["quantized"] == 0 and all(run["quantized"] == 2 * 4 for run in found)
    assert all(run["apart"] < 4 * 128 * 2**-24 for run in (plain, *found))


@pytest.mark.client("torch", "transformer_engine", feature="`FusedAdam`, `FusedSGD`: torch's numbers", command=ALONE)
def test_fused_optimizers_step_as_torchs() -> None:
    adam, of_torch, sgd, of_torch_sgd = printed(ALONE, "quantized_weights.py", "[]")["optimizers"]
    assert adam == pytest.approx(of_torch, rel=8 * 2**-24, abs=8 * 2**-24) and sgd == pytest.approx(of_torch_sgd, rel=8 * 2**-24, abs=8 * 2**-24)
