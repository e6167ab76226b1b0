"""``fusible.convert`` on families whose blocks have two or three linear layers, one activation and parameters of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_families import HEADS, INNER, LAYERS, WIDTH, WORDS, transformers

import fusible

_TEXT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": INNER, "max_position_embeddings": 64}
_STATES = {"state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
_IMAGE = {"hidden_sizes": [16, 24, 32, WIDTH], "depths": [1, 1, 1, 1]}
_FALCON = {"head_dim": 16, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 8}
_BAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8, "attn_layer_indices": [1]}
_ZAMBA = {"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_headdim": WIDTH, "mamba_ngroups": 1, "chunk_size": 8, "attention_head_dim": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "ConvNext": {**_IMAGE, "layer_scale_init_value": 0.5},
    "DINOv3ConvNext": {**_IMAGE, "layer_scale_init_value": 0.5},
    "Mamba2": {**_TEXT, **_STATES, "num_heads": 8, "head_dim": 16},
    "FalconH1": {**_TEXT, **_ATTENTION, **_FALCON},
    "Bamba": {**_TEXT, **_ATTENTION, **_BAMBA},
    "Zamba2": {**_TEXT, **_ATTENTION, **_ZAMBA, "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": HEADS, "num_mem_blocks": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_with_parameters_of_their_own_compute_as_before(name: str) -> None:
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**FAMILIES[name])).eval()
    x = torch.randn(2, 3, 64, 64) if "depths" in FAMILIES[name] else torch.randint(3, WORDS, (2, 12))
    with torch.no_grad():
        reference = model(x)[0]
        for recipe in (None, fusible.HighPrecision("float32")):
            y = fusible.convert(model, recipe, keep_high_precision=())(x)[0]
            assert any(layer.kind == "linear" for layer in fusible.conversion_report(model).converted)
            fusible.convert(model, undo=True)
            assert (y - reference).abs().max() < 1e-5 * reference.abs().max().clamp_min(1.0)  # sums of up to 128 terms in another order: 128 * 2^-24
