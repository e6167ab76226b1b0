"""What is done in each process of a group by a model that its processes share: for ``test_layouts``."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import layout_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layout_models import Dimensions, along_tp, mesh_of
from message_jobs import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import fusible
from fusible.distributed import gather_stages, gather_tensors, load_sharded, local_batch, materialize, parallelize, save_sharded, split_stages
from fusible.errors import ArgumentError, CheckpointError, DTypeError, FusibleError, NotServedError, ShapeError
from fusible.pytorch import ops as te_ops
from fusible.quantized import Recipe

Result = dict[str, Any]


def _told(trained: models.Trained) -> Result:
    return {"losses": torch.tensor(trained.losses), "gradients": trained.gradients, "parameters": trained.parameters}


def trained(kind: str, recipe: str, sequence: bool, steps: int, rank: int) -> Result:
    gpt = parallelize(models.model(kind), along_tp(), sequence_parallel=sequence)
    assert all(isinstance(p, DTensor) for p in gpt.parameters())
    return _told(models.train(gpt, models.RECIPES[recipe], steps))


def trained_on_shared_logits(kind: str, sequence: bool, steps: int, rank: int) -> Result:
    mesh = along_tp()
    gpt = parallelize(models.model(kind), mesh, sequence_parallel=sequence, shared_output=True)
    loss = fusible.CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, group=mesh.get_group())
    with torch.no_grad():
        assert gpt(next(models.batches(1))[0]).shape[-1] == models.VOCABULARY // mesh.size()
    return _told(models.train(gpt, None, steps, loss))


def trained_in_parts(dimensions: Dimensions, kind: str, recipe: str, sequence: bool, way: str, by_block: bool, steps: int, rank: int) -> Result:
    """On a mesh: along ``tp``, ``ep`` and ``cp`` by ``parallelize``, and along all but the first two by ``fully_shard``, of the model or
    (``by_block``) of each of its blocks too."""
    mesh = mesh_of(*dimensions)
    gpt = parallelize(models.model(kind), mesh, sequence_parallel=sequence, context_parallel=way)
    names = tuple(name for name, _ in dimensions if name not in ("tp", "ep"))
    if names:
        shards = mesh[names]._flatten() if len(names) > 1 else mesh[names[0]]
        for block in list(gpt.body)[: 2 * models.LAYERS] if by_block else ():
            fully_shard(block, mesh=shards)
        fully_shard(gpt, mesh=shards)
    result = models.train(gpt, models.RECIPES[recipe], steps, mesh=mesh)
    losses = torch.tensor(result.losses)
    dist.all_reduce(losses)
    result.losses = (losses / dist.get_world_size()).tolist()
    return _told(result)


class Stage(nn.Module):
    """A stage of the GPT, with the embedding where it is the first."""

    def __init__(self, embedding: nn.Module | None, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body = embedding, body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x if self.embedding is None else self.embedding(x))  # type: ignore[no-any-return]


def staged(dimensions: Dimensions, cuts: Any, recipe: str, rank: int) -> Result:
    """A step of PyTorch's own pipeline of processes, of as many micro-batches as sequences: what of the gradients is this process's, by name; and the
    bytes that it hands on to other stages."""
    mesh, gpt = mesh_of(*dimensions), models.model("mha")
    along = mesh["pp"]
    place, count = along.get_local_rank(), along.size()
    stages = split_stages(gpt.body, cuts)
    part = parallelize(Stage(gpt.embedding if place == 0 else None, stages[place]), mesh)
    stage = PipelineStage(part, place, count, torch.device("cpu"), group=along.get_group())
    schedule = Schedule1F1B(stage, models.BATCH, loss_fn=lambda y, target: nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()))
    text, following = next(models.batches(1))
    losses: list[torch.Tensor] = []
    with fusible.autocast(enabled=models.RECIPES[recipe] is not None, recipe=models.RECIPES[recipe]), counted() as sent:
        schedule.step(*([text] if place == 0 else []), **({"target": following, "losses": losses} if place == count - 1 else {}))
    gradients = gather_tensors(part, {name: p.grad for name, p in part.named_parameters() if p.grad is not None})
    to_stages = sum(nbytes * times for (of, nbytes), times in sent.items() if of == "ring_shift")
    return {"losses": torch.stack(losses).detach() if losses else torch.empty(0), "gradients": gradients, "sent": to_stages}


def experts_without_tokens(rank: int) -> None:
    """Tokens that all go to the first expert, which one process has: the others' have none, and gradients of 0."""
    gpt = parallelize(models.model("moe"), mesh_of(("ep", dist.get_world_size())))
    experts = next(module for module in gpt.modules() if isinstance(module, fusible.MixtureOfExperts))
    x = torch.randn(3, models.HIDDEN, requires_grad=True)
    for recipe in models.RECIPES.values():
        with torch.no_grad(), fusible.autocast(enabled=recipe is not None, recipe=recipe):
            experts.router_weight.zero_()  # of equal logits the first is the largest
            y = experts(x)
        assert y.shape == x.shape and y.isfinite().all()
    experts(x).sum().backward()
    own = models.whole(experts.down_weight.grad).flatten(1).any(1)  # type: ignore[arg-type]
    assert own.tolist() == [True] * models.TOP_K + [False] * (models.EXPERTS - models.TOP_K)


def experts_chosen_by_sigmoids(rank: int) -> None:
    """With a bias, which every process has whole, and in groups: of the same tokens in all processes, y and the gradients of one."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    options: dict[str, Any] = {"score_function": "sigmoid", "expert_bias": True, "groups": 4, "top_groups": 2, "scaling_factor": 2.5}
    whole = fusible.Sequential(fusible.MixtureOfExperts(models.HIDDEN, models.HIDDEN, 8, 4, **options))
    whole[0].expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))  # type: ignore[union-attr, operator]  # pyright: ignore
    model = parallelize(deepcopy(whole), mesh_of(("ep", world)))
    assert type(dict(model.named_buffers())["0.expert_bias"]) is torch.Tensor
    x = torch.randn(9, models.HIDDEN, requires_grad=True)
    y, wanted = model(x), whole(x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    wanted.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(models.whole(ours.grad), theirs.grad, rtol=1e-5, atol=1e-4, msg=name)  # type: ignore[arg-type]


def generates(kind: str, rank: int) -> Result:
    """Tokens one by one, from a cache that holds the heads of this process."""
    gpt, text = parallelize(models.model(kind), along_tp()), next(models.batches(1))[0][:1, :6]
    cache_, logits = fusible.KVCache(1, models.TOKENS, dtype=torch.float32), []
    with torch.no_grad():
        for place in range(text.shape[1]):
            one = torch.ones(1, dtype=torch.int32)
            logits.append(gpt.body(gpt.embedding(text[0, place : place + 1]), one, cache_))
            cache_.advance(one)
        whole = gpt(text)[0]
    return {"one by one": torch.cat(logits), "whole": whole}


def scales_stay(rank: int) -> None:
    """A model that has run under delayed scaling goes on with its scales when it is laid out."""
    gpt, recipe = models.model("mha"), fusible.DelayedScaling()
    models.train(gpt, recipe, 2)
    before = gpt.body.pipeline(0).scaling.current
    parallelize(gpt, along_tp(), sequence_parallel=True)
    after = gpt.body.pipeline(0).scaling.current
    assert before is not None and after is not None
    shift = 1  # of the positions: the first op scatters the rows
    for then, now in ((before.forward, after.forward), (before.backward, after.backward)):
        assert [f"{int(slot.split('.')[0]) + shift}.{slot.split('.')[1]}" for slot in then.slots] == list(now.slots)
        assert torch.equal(then.scale, now.scale) and torch.equal(then.amax_history, now.amax_history)


def experts_have_the_scales_of_one_process(dimensions: Dimensions, sequence: bool, rank: int) -> None:
    """Each its own, whichever process computes it: by expert, the scales of the second step, which follow from the amaxes of the first."""
    mesh = mesh_of(*dimensions)
    alone, shared = models.model("moe"), parallelize(models.model("moe"), mesh, sequence_parallel=sequence)
    found: list[dict[str, torch.Tensor]] = []
    for gpt, of in ((alone, None), (shared, mesh)):
        models.train(gpt, fusible.DelayedScaling(), 2, mesh=of)
        state = gpt.body.pipeline(0).scaling.current
        assert state is not None
        scales: dict[str, list[torch.Tensor]] = {}
        for slot, scale in zip(state.forward.slots, state.forward.scale, strict=True):
            name = slot.partition(".")[2]
            if name[-1].isdigit():  # an expert's: positions in the list are others where rows are shared out
                scales.setdefault(name, []).append(scale)
        found.append({name: torch.stack(of_blocks) for name, of_blocks in scales.items()})
    assert len(found[0]) == 2 * models.EXPERTS and found[0].keys() == found[1].keys()
    for name, of_blocks in found[0].items():
        torch.testing.assert_close(found[1][name], of_blocks, rtol=1e-2, atol=0, msg=name)


def a_copy_trains_as_its_model_does(rank: int) -> None:
    """``copy.deepcopy``, as averages of weights are begun: with shares, groups and scales of its own."""
    gpt, recipe = parallelize(models.model("mha"), along_tp(), sequence_parallel=True), fusible.DelayedScaling()
    models.train(gpt, recipe, 2)
    gpt.zero_grad()  # torch copies no gradient that is a DTensor
    copy = deepcopy(gpt)
    first, second = (models.train(each, recipe, 2) for each in (gpt, copy))
    assert first.losses == second.losses
    assert all(torch.equal(value, second.parameters[name]) for name, value in first.parameters.items())


def a_compiler_calls_it_as_it_is(rank: int) -> None:
    """``torch.compile`` breaks its graph around the pipeline; the whole-program compiler refuses in one sentence."""
    gpt = parallelize(models.model("mha"), along_tp())
    text, _ = next(models.batches(1))
    compiled = torch.compile(gpt.body, backend="aot_eager")
    x = gpt.embedding(text).detach()
    assert torch.equal(compiled(x), gpt.body(x))
    gpt.body.compile("xla")
    with pytest.raises(NotServedError, match="compiles programs of one process"):
        gpt.body(x)


def checkpoints_of_pytorch(folder: str, rank: int) -> None:
    """``torch.distributed.checkpoint`` writes the shares, and reads them into a model that has other values."""
    saved, read = (parallelize(models.model("gqa"), along_tp()) for _ in range(2))
    models.train(saved, None, 1)
    path = f"{folder}/{dist.get_world_size()}"
    dcp.save(saved.state_dict(), checkpoint_id=path)
    state = read.state_dict()
    dcp.load(state, checkpoint_id=path)
    read.load_state_dict(state)
    for (name, p), q in zip(saved.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(models.whole(p), models.whole(q)), name


def _laid_out(layout: Dimensions, kind: str, seed: int) -> models.GPT:
    """Along ``tp`` processes share out the rows of a mixture's model, so that they share out its experts."""
    torch.manual_seed(seed)
    gpt = models.GPT(kind)
    if not layout:
        return gpt
    mesh = mesh_of(*layout)
    parallelize(gpt, mesh, sequence_parallel=kind == "moe")
    if mesh.mesh_dim_names[0] == "dp_shard":
        fully_shard(gpt, mesh=mesh["dp_shard"])
    return gpt


def _moments_of(gpt: models.GPT, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: {name: optimizer.state[p][kind] for name, p in gpt.named_parameters()} for kind in ("step", "exp_avg", "exp_avg_sq")}


def _with_moments(gpt: models.GPT, seed: int, recipe: Recipe | None = None) -> tuple[models.GPT, dict[str, dict[str, torch.Tensor]]]:
    """After a step that gives every element of the parameters and moments a value of its own."""
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, models.VOCABULARY, (models.BATCH, models.TOKENS), generator=generator)
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        gpt(text).square().mean().backward()
    optimizer.step()
    return gpt, _moments_of(gpt, optimizer)


def _everything(gpt: models.GPT, moments: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    kinds = {"": gpt.state_dict(), **{f".{kind}": held for kind, held in moments.items()}}
    return {f"{name}{kind}": whole for kind, held in kinds.items() for name, whole in gather_tensors(gpt, held).items()}


def shards_of_every_layout(folder: str, rank: int) -> None:
    """What a layout has saved every other loads to the bit: parameters, scales (into models that have none yet) and moments. No process has written
    more than its share of the bytes, but for how evenly torch gives out what several have alike; and torch's own reader puts the same together in one
    process."""
    size = dist.get_world_size()
    layouts: list[Dimensions] = [(), (("tp", size),), (("dp_shard", size),)]
    layouts += [(("dp_shard", 2), ("tp", 2))] if size == 4 else []
    of_experts: list[Dimensions] = [*layouts, (("ep", size),)]
    of_experts += [(("ep", 2), ("tp", 2)), (("dp_shard", 2), ("ep", 2))] if size == 4 else []
    for kind, ways in (("mha", layouts), ("gqa", layouts), ("moe", of_experts)):
        for number, of in enumerate(ways):
            saved, moments = _with_moments(_laid_out(of, kind, number), number, fusible.DelayedScaling())
            wanted = _everything(saved, moments)
            path = Path(folder) / f"{size} {kind} {number}"
            written = save_sharded(path, saved, saved.state_dict(), moments)
            own = sum((path / name).stat().st_size for name in written)
            whole = sum(tensor.nbytes for tensor in wanted.values())
            assert own <= (1.4 if kind == "moe" else 1.2) * whole / size + 2**16, f"{own} of {whole} bytes"
            dist.barrier()
            for into in ways:
                read, others = _with_moments(_laid_out(into, kind, 10), 10)
                state = read.state_dict()
                load_sharded(path, read, state, others)
                read.load_state_dict(state)
                found = _everything(read, others)
                assert found.keys() == wanted.keys()
                differ = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
                assert not differ, f"{of} into {into}: {differ}"
            plain = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
            dcp.load(plain, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
            assert all(torch.equal(plain[name], tensor) for name, tensor in wanted.items())
    _shards_that_do_not_fit(path, *_with_moments(_laid_out((), kind, 10), 10))


def _shards_that_do_not_fit(path: Path, model: models.GPT, moments: dict[str, dict[str, torch.Tensor]]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"the shards in .*: expected the tensor embedding.weight.other, got none; load what was saved of this model"
    ):
        load_sharded(path, model, model.state_dict(), {"other": moments["exp_avg"]})
    with pytest.raises(CheckpointError, match=r"body.4.bias in .*: expected \[3\], got \[64\]; load what was saved of this model"):
        load_sharded(path, model, {"body.4.bias": torch.zeros(3)})
    shard = min(path.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        shard.rename(f"{shard}.lost")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"expected all of it, got \d+ elements less; use a whole checkpoint|expected the tensor .*, got none"):
        load_sharded(path, model, model.state_dict(), moments)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "a refused call has read something"


def stages_have_what_their_model_had(rank: int) -> None:
    """To the bit, of a model that has run under delayed scaling. A foreign module cuts its pipeline in two, and the stages begin inside of these and
    beside them; on four processes the foreign module is a stage, and so is the norm."""
    blocks = list(models.model("mha").body)
    model = fusible.Sequential(*blocks[:2], nn.Identity(), *blocks[2:])
    for _ in range(2):
        with fusible.autocast(recipe=fusible.DelayedScaling()):
            model(torch.randn(2, models.TOKENS, models.HIDDEN)).square().mean().backward()
    wanted = model.state_dict()
    assert {"scaling_state.0", "scaling_state.1"} < wanted.keys()
    size = dist.get_world_size()
    for first in range(1, len(model) - size + 2):
        stage = split_stages(model, [*range(first, first + size - 1)])[rank]
        found = gather_stages(stage, stage.state_dict(), None)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), first


_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
_SIZES["max_position_embeddings"] = 64
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 16},
    "phi": {},
    "mixtral": {"num_key_value_heads": 4, "num_local_experts": 4},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "bert": {"architectures": ["BertModel"]},
    "tied llama": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "tied mixtral": {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64},
}


def models_of_families(rank: int) -> None:
    """Models as ``from_config`` and ``from_pretrained`` give them, whole; those with experts along ``ep``, too."""
    text = torch.randint(512, (4, 12), generator=torch.Generator().manual_seed(0))
    for name, more in _CONFIGS.items():
        config = {"model_type": name, **_SIZES, **more}
        for mesh in (along_tp(), mesh_of(("ep", dist.get_world_size()))):
            if "ep" in (mesh.mesh_dim_names or ()) and not more.keys() & {"num_local_experts", "n_routed_experts"}:
                continue
            model, alone = (fusible.from_config(config, seed=3) for _ in range(2))
            found, wanted = parallelize(model, mesh)(local_batch(mesh, text)[0]), alone(text)
            own = local_batch(mesh, wanted)[0]
            assert (found - own).norm() <= 1e-5 * own.norm(), (name, mesh)
            if name == "gpt2" or more.get("tie_word_embeddings"):
                assert model.head.weight is model.embedding.weight
            if "ep" in (mesh.mesh_dim_names or ()):
                continue
            if name != "bert":
                with torch.no_grad():
                    nexts = [each.next_logits(text[0], torch.tensor([12]), each.new_cache(1, 16)) for each in (model, alone)]
                assert (nexts[0] - nexts[1]).norm() <= 1e-5 * nexts[1].norm(), name
            for y in (found, wanted):
                y.square().mean().backward()
            of_alone = {path: p.grad for path, p in alone.named_parameters() if p.grad is not None}
            gathered = gather_tensors(model, {path: p.grad for path, p in model.named_parameters() if p.grad is not None})
            whole = torch.stack([gradient.norm() for gradient in of_alone.values()]).norm()  # beside which those of keys' biases are roundings
            assert gathered.keys() == of_alone.keys()
            for path, gradient in of_alone.items():
                assert (gathered[path] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole, (name, path)
    for name in ("llama", "deepseek_v3", "tied llama"):
        model, alone = (fusible.from_config({"model_type": name, **_SIZES, **_CONFIGS[name]}, seed=3) for _ in range(2))
        found, wanted = parallelize(model, along_tp(), shared_output=True)(text), alone(text)
        own = wanted.chunk(dist.get_world_size(), -1)[rank]
        assert found.shape == own.shape and (found - own).norm() <= 1e-5 * own.norm(), name
        for y in (found, wanted):
            y.square().sum().backward()
        gradient = gather_tensors(model, {"embedding.weight": model.embedding.weight.grad})["embedding.weight"]
        assert (gradient - alone.embedding.weight.grad).norm() <= 1e-5 * gradient.norm(), name
    for cut in (lambda: nn.Identity(), lambda: fusible.Residual(nn.Identity(), fusible.Linear(16, 16))):
        torch.manual_seed(1)
        made = fusible.Sequential(fusible.Linear(8, 16), cut(), fusible.Linear(16, 8 * dist.get_world_size()))
        alone, x = deepcopy(made), torch.randn(3, 8)
        own = alone(x).chunk(dist.get_world_size(), -1)[rank]
        assert torch.allclose(parallelize(made, along_tp(), shared_output=True)(x), own, rtol=1e-5, atol=1e-6)
    counts = fusible.from_config({"model_type": "bert", **_SIZES, **_CONFIGS["bert"]})
    with pytest.raises(NotServedError, match="along 'cp': expected positions by which attention rotates, got those that a TokenEmbedding counts"):
        parallelize(counts, mesh_of(("cp", dist.get_world_size())))


def embeddings(rank: int) -> None:
    """Of more tokens than can be shared out equally, one of which is padding; trained by a fused optimizer, whose gradients lie as parameters do."""
    world = dist.get_world_size()
    for tokens, padding in ((world * 3 + 1, None), (world * 3 + 1, 0), (world * 3 + 1, world * 3), (1, None), (world - 1, None)):
        text = torch.randint(tokens, (2, 40), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(2)
        alone = nn.Sequential(nn.Embedding(tokens, 8, padding_idx=padding), fusible.LayerNorm(8), fusible.Linear(8, 8))
        shared = parallelize(deepcopy(alone), along_tp())
        weight = shared[0].weight
        for model in (alone, shared):
            optimizer = fusible.FusedAdam(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(text).square().mean().backward()
                optimizer.step()
        assert weight.grad.placements == weight.placements and weight.grad.to_local().shape == weight.to_local().shape
        with torch.no_grad():
            assert torch.allclose(shared(text), alone(text), rtol=1e-4, atol=1e-5)
        assert torch.allclose(weight.full_tensor(), alone[0].weight, rtol=1e-4, atol=1e-5)
        for wrong in (-1, tokens):
            with pytest.raises(ArgumentError, match=f"an Embedding: expected tokens from 0 to {tokens - 1}, got {wrong};"):
                shared(torch.tensor([[0, wrong]]))
    for options, sentence in (({"max_norm": 1.0}, "expected no max_norm, got 1.0"), ({"scale_grad_by_freq": True}, "no scale_grad_by_freq")):
        with pytest.raises(NotServedError, match=f"an Embedding that is parallelized along 'tp': expected .*{sentence[9:]}"):
            parallelize(nn.Sequential(nn.Embedding(8, 8, **options), fusible.Linear(8, 8)), along_tp())


def begins_on_meta(rank: int) -> None:
    """A model that nobody has ever held whole begins with the values that it begins with in one process."""
    world = dist.get_world_size()
    along_both = ("dp_shard", 1), ("tp", world)
    for kind, tied, dimensions in (
        ("gqa", False, along_both),
        ("mha", True, along_both),
        ("mha", False, (("dp_shard", world), ("tp", 1))),
        ("moe", True, (("ep", world),)),
        ("moe", False, (("tp", world),)),
        ("moe", False, (("ep", world // 2), ("tp", 2))),
    ):
        with torch.device("meta"):
            gpt = models.GPT(kind)
        alone = models.model(kind)
        for model in (gpt, alone) if tied else ():
            model.body[-1].weight = model.embedding.weight
        mesh = mesh_of(*dimensions)
        parallelize(gpt, mesh, sequence_parallel=kind == "moe")
        if "dp_shard" in mesh.mesh_dim_names:
            fully_shard(gpt, mesh=mesh["dp_shard"])
        torch.manual_seed(5)
        materialize(gpt)
        torch.manual_seed(5)
        for module in alone.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.reset_parameters()
        found, wanted = gather_tensors(gpt, dict(gpt.named_parameters())), dict(alone.named_parameters())
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())
        text = next(models.batches(1))[0]
        assert (gpt(local_batch(mesh, text)[0]) - local_batch(mesh, alone(text))[0]).norm() <= 1e-5 * alone(text).norm()
    with torch.device("meta"):
        unknown, buffered = nn.Sequential(nn.PReLU()), fusible.Sequential(fusible.Linear(8, 8))
        unknown.register_parameter("scale", nn.Parameter(torch.ones(1)))
        buffered.register_buffer("table", torch.ones(1))
    for model, message in ((unknown, "expected modules with reset_parameters, got a Sequential without"), (buffered, "got table on the meta device")):
        with pytest.raises(NotServedError, match=message):
            materialize(model)
        assert all(p.is_meta for p in model.parameters())


def _own(made: Callable[[], nn.Module], **options: Any) -> Callable[[], Any]:
    return lambda: parallelize(made(), along_tp(), **options)


def refusals(rank: int) -> None:
    """One sentence each, in every process, with nothing sent and nothing changed."""
    h, linear, attention = 8, fusible.Linear, fusible.DotProductAttention
    world = dist.get_world_size()
    nameless = init_device_mesh("cpu", (world,))
    foreign = mesh_of(("model", world))
    experts = mesh_of(("ep", world))
    shared, sequences = linear(h, h), mesh_of(("cp", world))
    heads = fusible.Sequential(attention(world + 1, 4))

    def of_experts(count: int) -> fusible.Sequential:
        return fusible.Sequential(fusible.MixtureOfExperts(h, h, count))

    unlike = fusible.Sequential(linear(h, 3 * (world + 1) * 4), attention(world + 1, 4), linear((world + 1) * 4, h))
    odd = fusible.Sequential(linear(h, world + 1), fusible.GELU(), linear(world + 1, h))
    extra = fusible.Sequential(linear(h, h), te_ops.AddExtraInput(), linear(h, h))
    attends = fusible.Sequential(fusible.LayerNorm(3 * h), attention(2, h // 2), fusible.GELU())
    tied = fusible.Sequential(fusible.LayerNorm(h), linear(h, h), fusible.GELU(), linear(h, h))  # one shares out its rows, the other its columns
    tied[3].weight = tied[1].weight
    cases: list[tuple[Callable[[], Any], type[FusibleError], str]] = [
        (lambda: parallelize(linear(h, h), None), DTypeError, "the mesh of parallelize: expected a DeviceMesh, got a NoneType"),  # type: ignore[arg-type]
        (lambda: parallelize(linear(h, h), nameless), ArgumentError, "expected a name for each dimension, got none; name its dimensions"),
        (lambda: parallelize(linear(h, h), foreign), ArgumentError, "expected known dimensions, got 'model'; .* dp_replicate, dp_shard, cp, ep, tp"),
        (lambda: parallelize(linear(h, h), experts), ArgumentError, "along 'ep': expected a MixtureOfExperts, got none"),
        (
            lambda: parallelize(of_experts(world + 1), experts),
            ShapeError,
            f"the experts that are shared out: .* multiple of {world}, .*, got {world + 1}",
        ),
        (_own(lambda: odd), ShapeError, f"the columns that are shared out: expected a multiple of {world}, the processes .*, got {world + 1}"),
        (_own(lambda: unlike), ShapeError, f"the query heads that are shared out: expected a multiple of {world}, .*, got {world + 1}"),
        (_own(lambda: fusible.Sequential(shared, fusible.GELU(), shared)), ArgumentError, "modules that stand at one place, got .* at several"),
        (_own(lambda: attends, sequence_parallel=True), ArgumentError, "an op that computes each row from that row alone, got DotProductAttention"),
        (_own(lambda: extra, sequence_parallel=True), ArgumentError, "a model with sequence parallelism: expected no extra inputs"),
        (_own(lambda: tied), NotServedError, "parameters that all who hold one share out alike, got 1.weight and 3.weight as one; give each module"),
        (_own(lambda: nn.Sequential(nn.Linear(h, h), linear(h, h))), NotServedError, "Fusible's modules and torch.nn.Embedding, got a Linear"),
        (_own(lambda: linear(h, h, accumulate_into_main_grad=True)), NotServedError, r"got Linear\(accumulate_into_main_grad=True\)"),
        (_own(lambda: fusible.quantize_parameters(linear(h, h))), NotServedError, "expected parameters in high precision, got weight of Linear in 8"),
        (
            _own(lambda: te_ops.Sequential(te_ops.Linear(h, h))),
            NotServedError,
            "got the operation BasicLinear; .*tensor_parallel",
        ),
        (_own(lambda: parallelize(linear(h, h), along_tp())), ArgumentError, "expected parameters that are held as they are, got weight of Linear"),
    ]
    masked = fusible.Sequential(attention(world, 4, mask=True))
    windowed, dropped = (fusible.Sequential(attention(world, 4, **more)) for more in ({"window_size": (3, 0)}, {"dropout": 0.1}))
    cases += [
        (lambda: parallelize(heads, sequences), ShapeError, f"the query heads that are shared out: expected a multiple of {world}"),
        (lambda: parallelize(masked, sequences), ArgumentError, "context parallelism: expected attention without a mask"),
        (lambda: parallelize(windowed, sequences, context_parallel="ring"), ArgumentError, "a window in ring attention: .*; .*by all_to_all"),
        (lambda: parallelize(dropped, sequences, context_parallel="ring"), ArgumentError, "dropout in ring attention"),
        (lambda: parallelize(heads, sequences, context_parallel="star"), ArgumentError, "expected 'all_to_all' or 'ring', got 'star'"),
        (lambda: local_batch(sequences, torch.zeros(1, 2 * world + 1)), ShapeError, f"a multiple of {2 * world} for its tokens"),
    ]
    for call, error, message in cases:
        with counted() as sent, pytest.raises(error, match=message) as caught:
            call()
        assert not sent and ": expected " in str(caught.value) and "\n" not in str(caught.value)
    assert not any(isinstance(p, DTensor) for module in (odd, unlike, attends, extra, shared, tied) for p in module.parameters())


def too_few_rows(rank: int) -> None:
    """Rows that cannot be shared out are refused in every process before any of them has sent something."""
    gpt = parallelize(models.model("mha"), along_tp(), sequence_parallel=True)
    x = torch.randn(1, dist.get_world_size() + 1, models.HIDDEN)
    with counted() as sent, pytest.raises(ShapeError, match="the rows of a sequence-parallel call of .*: expected a multiple of"):
        gpt.body(x)
    assert not sent


def one_process_is_no_layout(rank: int) -> None:
    mesh = mesh_of(("dp_replicate", dist.get_world_size()), ("tp", 1))
    gpt = models.model("mha")
    assert parallelize(gpt, mesh) is gpt and not any(isinstance(p, DTensor) for p in gpt.parameters())
