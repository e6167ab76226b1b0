"""A causal model of transformers whose decoder layers become ``te.TransformerLayer``: ``decoder_layers.py MODEL MODES``, a JSON list.

Prints how far the logits of the two are apart in fp32, and losses and products of each mode.
"""

import json
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from client_recipes import autocast
from counted import quantized_products
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig

SIZE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "max_position_embeddings": 64}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZE, num_key_value_heads=2),
    "gemma": lambda: GemmaConfig(**SIZE, num_key_value_heads=1, head_dim=16, pad_token_id=0),
}
STEPS = 4


class DecoderLayer(te.TransformerLayer):
    """A decoder layer that transformers calls, with the weights of one of its own."""

    def __init__(self, config: Any, layer: torch.nn.Module) -> None:
        gemma = config.model_type == "gemma"
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            normalization="RMSNorm",
            zero_centered_gamma=gemma,
            activation="geglu" if gemma else "swiglu",
            bias=False,
            fuse_qkv_params=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            attn_input_format="bshd",
            params_dtype=layer.input_layernorm.weight.dtype,
        )
        self.rope = te.RotaryPositionEmbedding(config.head_dim)(max_seq_len=config.max_position_embeddings)
        attention, mlp = layer.self_attn, layer.mlp
        weights = {
            "self_attention.layernorm_qkv.layer_norm_weight": layer.input_layernorm.weight,
            "self_attention.layernorm_qkv.query_weight": attention.q_proj.weight,
            "self_attention.layernorm_qkv.key_weight": attention.k_proj.weight,
            "self_attention.layernorm_qkv.value_weight": attention.v_proj.weight,
            "self_attention.proj.weight": attention.o_proj.weight,
            "layernorm_mlp.layer_norm_weight": layer.post_attention_layernorm.weight,
            "layernorm_mlp.fc1_weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "layernorm_mlp.fc2_weight": mlp.down_proj.weight,
        }
        missing, unexpected = self.load_state_dict(weights, strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, rotary_pos_emb=self.rope)


def model_of(name: str, dtype: torch.dtype, replaced: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype).cuda()
    if replaced:
        layers = model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = DecoderLayer(model.config, layer)
    return model


def apart(name: str) -> float:
    """The largest difference of logits, over their largest size."""
    tokens = torch.randint(0, 128, (2, 32), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    with torch.no_grad():
        plain, replaced = (model_of(name, torch.float32, which)(input_ids=tokens).logits for which in (False, True))
    return ((plain - replaced).abs().max() / plain.abs().max()).item()


def trained(name: str, mode: str) -> dict[str, Any]:
    model = model_of(name, torch.bfloat16, True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 128, (8, 32), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    with quantized_products() as products:
        for _ in range(STEPS):
            with autocast(mode):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "linears": 4 * 2, "products": len(products)}


if __name__ == "__main__":
    name, modes = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"apart": apart(name), "runs": [trained(name, mode) for mode in modes]}))
