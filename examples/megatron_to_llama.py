"""A checkpoint of Megatron-core, of a model with its Transformer Engine layers, as a Llama of transformers; no GPU is asked for.

    fusible run --device cpu examples/megatron_to_llama.py --new checkpoint          # a small model from a seed, saved by Megatron
    fusible run --device cpu examples/megatron_to_llama.py checkpoint llama          # reads it, writes llama/model.safetensors, compares the logits

``SHAPE`` is the model's; put yours there. It is a dense decoder with RMSNorm, SwiGLU, rotary positions and grouped queries, without biases,
whose weights Megatron names and stores in its own order.
"""

import argparse
import json
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
DTYPE = torch.float32
"""Of the checkpoint's weights."""


def megatron_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=SHAPE.num_hidden_layers,
        hidden_size=SHAPE.hidden_size,
        ffn_hidden_size=SHAPE.intermediate_size,
        num_attention_heads=SHAPE.num_attention_heads,
        num_query_groups=SHAPE.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=SHAPE.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPE,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=SHAPE.vocab_size,
        max_sequence_length=SHAPE.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=SHAPE.tie_word_embeddings,
    )
    return model.cuda().eval()


def apart(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, each [its width, hidden]: Megatron stores them group by group, the group's queries before its key and value."""
    groups, size = SHAPE.num_key_value_heads, SHAPE.head_dim
    by_group = qkv.view(groups, -1, size, qkv.shape[-1])
    queries, keys, values = by_group.split([SHAPE.num_attention_heads // groups, 1, 1], dim=1)
    return tuple(part.reshape(-1, qkv.shape[-1]) for part in (queries, keys, values))


def converted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's weights by the names of transformers."""
    found = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
        "lm_head.weight": weights["output_layer.weight"],
    }
    for index in range(SHAPE.num_hidden_layers):
        one, other = f"decoder.layers.{index}.", f"model.layers.{index}."
        query, key, value = apart(weights[one + "self_attention.linear_qkv.weight"])
        gate, up = weights[one + "mlp.linear_fc1.weight"].chunk(2)
        layer = {
            "input_layernorm": weights[one + "self_attention.linear_qkv.layer_norm_weight"],
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": weights[one + "self_attention.linear_proj.weight"],
            "post_attention_layernorm": weights[one + "mlp.linear_fc1.layer_norm_weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": weights[one + "mlp.linear_fc2.weight"],
        }
        found |= {f"{other}{name}.weight": weight for name, weight in layer.items()}
    return {name: weight.detach().clone() for name, weight in found.items()}


@torch.no_grad()
def logits_of_both(model: GPTModel, directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some tokens, by Megatron's model and by the one that transformers reads from ``directory``: [1, tokens, vocabulary] each."""
    tokens = torch.randint(0, SHAPE.vocab_size, (1, SHAPE.max_position_embeddings), generator=torch.Generator().manual_seed(2)).cuda()
    by_megatron = model(tokens, torch.arange(tokens.shape[1]).cuda()[None], None)
    return by_megatron, LlamaForCausalLM.from_pretrained(directory, dtype=DTYPE)(input_ids=tokens).logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--new", action="store_true", help="save a model from a seed to the checkpoint, and do no more")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path("llama"))
    options = parser.parse_args()
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model = megatron_model()
    if options.new:
        options.checkpoint.mkdir(parents=True)
        for name, weight in model.named_parameters():
            if "layer_norm_weight" in name or "layernorm" in name:
                torch.nn.init.normal_(weight, 1.0, 0.1)  # as after training: of ones, every mistake would give the same
        dist_checkpointing.save(model.sharded_state_dict(), options.checkpoint)
    else:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(options.checkpoint)))
        llama = LlamaForCausalLM(SHAPE).to(DTYPE)
        llama.load_state_dict(converted(model.state_dict()))
        llama.save_pretrained(options.out)
        one, other = logits_of_both(model, options.out)
        print(json.dumps({"largest logit": one.abs().max().item(), "largest difference": (one - other).abs().max().item()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
