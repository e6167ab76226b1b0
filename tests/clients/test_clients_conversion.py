"""The example that converts a checkpoint of Megatron's: without a GPU, and to the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_runs import ALONE, printed
from safetensors import safe_open

EXAMPLE = "../../../examples/megatron_to_llama.py"


@pytest.mark.client(
    "megatron-core",
    "transformers",
    feature="a checkpoint of a model with Transformer Engine layers, converted to a Llama ([the program](../examples/megatron_to_llama.py))",
    command=ALONE,
)
def test_a_checkpoint_of_megatron_becomes_a_llama(tmp_path: Path) -> None:
    """The logits of both, in fp32: sums of at most 128 products, in four linear layers of each of two layers, and the head's."""
    printed(ALONE, EXAMPLE, "--new", str(tmp_path / "checkpoint"))
    found = printed(ALONE, EXAMPLE, str(tmp_path / "checkpoint"), str(tmp_path / "llama"))
    assert found["largest difference"] / found["largest logit"] < 9 * 128 * 2**-24
    with safe_open(tmp_path / "llama" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 3 + 2 * 9 and not any("extra_state" in name for name in names)
