"""GPT of Megatron-core with its Transformer Engine layers: ``megatron_model.py RUNS``, a JSON list of ``Run``. Prints losses and products of each.

Each trains under Megatron's own data parallelism and distributed optimizer, with its sums of gradients in fp32. Halfway it is saved by Megatron's
distributed checkpoints, and another model of the same run goes on from there.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from counted import quantized_products
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
VOCABULARY, LENGTH, BATCH, STEPS = 128, 32, 4, 4
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


@dataclass
class Run:
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    experts: int | None = None
    tensor: int = 1
    expert: int = 1
    context: int = 1
    saved: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    """Of ``TransformerConfig``."""

    def config(self) -> TransformerConfig:
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
        parallel = {"tensor_model_parallel_size": self.tensor, "sequence_parallel": self.tensor > 1}
        parallel |= {"expert_model_parallel_size": self.expert, "context_parallel_size": self.context}
        moe: dict[str, Any] = {}
        if self.experts:
            moe = {"num_moe_experts": self.experts, "moe_router_topk": 2, "moe_grouped_gemm": True, "moe_permute_fusion": True}
            moe |= {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "aux_loss", "add_bias_linear": False}
        dtypes = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "gradient_accumulation_fusion": False}
        precision = {"fp8": self.fp8, "fp8_recipe": self.fp8_recipe} if self.fp8 else {}
        return TransformerConfig(**sizes, **parallel, **moe, **dtypes, **precision, attention_dropout=0.0, hidden_dropout=0.0, **self.more)


class Training:
    """A model and its optimizer, as Megatron's own training loop makes them."""

    def __init__(self, run: Run) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        torch.manual_seed(0)
        config = run.config()
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=run.experts, moe_grouped_gemm=bool(run.experts))
        sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
        model = GPTModel(config=config, transformer_layer_spec=spec, **sizes).cuda().bfloat16()
        how = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, how, model)
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, bf16=True, use_distributed_optimizer=True), [self.model])

    def step(self, tokens: torch.Tensor) -> float:
        whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(LENGTH).expand(len(tokens), -1)}
        batch = get_batch_on_this_cp_rank({name: value.contiguous() for name, value in whole.items()})
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.module.set_is_first_microbatch()
        loss = self.model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).float().mean()
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, op=torch.distributed.ReduceOp.AVG)
        return mean.item()

    def sharded_state(self, loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)}

    def load(self, directory: str) -> None:
        state = dist_checkpointing.load(self.sharded_state(True), directory)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def linears(model: torch.nn.Module) -> int:
    """Layers that multiply, by what each is."""
    ours = [module for module in model.modules() if type(module).__module__.startswith("megatron.core.extensions.transformer_engine")]
    return sum("Linear" in type(module).__name__ for module in ours)


def trained(run: Run) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": run.tensor, "expert_model_parallel_size": run.expert, "context_parallel_size": run.context}
    parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=1 if run.experts else None)
    data = parallel_state.get_data_parallel_rank()
    tokens = torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1 + data))
    with quantized_products() as products:
        training = Training(run)
        losses = [training.step(tokens[0]) for _ in range(STEPS // 2)]
        if run.saved:
            with tempfile.TemporaryDirectory() as own:
                directory = [own]
                torch.distributed.broadcast_object_list(directory)
                dist_checkpointing.save(training.sharded_state(False), directory[0])
                training = Training(run)
                training.load(directory[0])
                torch.distributed.barrier()
        losses += [training.step(tokens[0]) for _ in range(STEPS - STEPS // 2)]
    parallel_state.destroy_model_parallel()
    return {"losses": losses, "linears": linears(training.model), "products": len(products)}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    found = [trained(Run(**run)) for run in json.loads(sys.argv[1])]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
