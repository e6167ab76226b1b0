"""Weights that FSDP2 shares out in high precision and gathers in 8 bits: passes, steps and checkpoints are, to the bit, those of weights gathered as
they are held, and what is sent is counted."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fusible
from fusible.distributed import gather_quantized, load_sharded, materialize, parallelize, save_sharded
from fusible.distributed.quantized_gather import GatheredQuantized
from fusible.errors import ArgumentError, DTypeError
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import GroupedTensor, QuantizedTensor, QuantizerRole, quantizer_for_role

WORLD, WIDTH, INNER = 2, 256, 512
CURRENT, BLOCKS, MX = fusible.Float8CurrentScaling(), fusible.Float8BlockScaling(), fusible.MXFP8BlockScaling()
RECIPES: dict[str, Any] = {"current": CURRENT, "block": BLOCKS, "mxfp8": MX, "nvfp4": fusible.NVFP4BlockScaling(disable_stochastic_rounding=True)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "FusedAdam": lambda parameters: fusible.FusedAdam(parameters, lr=0.01),
}

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")


def made(inner: int = INNER, seed: int = 0) -> fusible.Sequential:
    torch.manual_seed(seed)
    return fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, inner), fusible.GELU(), fusible.Linear(inner, WIDTH, bias=False))


def shared_out(model: nn.Module, recipe: Any, **options: Any) -> nn.Module:
    """``recipe``: by which weights are gathered, if by any."""
    if recipe is not None:
        gather_quantized(model, recipe)
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Results and gradients."""
    found: list[Any] = []
    for step in range(steps):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        with fusible.autocast(recipe=recipe):
            y = model(x * (1 + rank))
        y.float().square().mean().backward()
        found += [y.detach(), *(p.grad.to_local().clone() for p in model.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def weights_seen(model: nn.Module) -> list[torch.Tensor]:
    """What the weights of products are within a pass."""
    found: list[torch.Tensor] = []

    def look(module: nn.Module, *_: object) -> None:
        found.extend(p.detach().clone() for p in module.parameters() if p.dim() == 2)

    handle = model.register_forward_hook(look)
    with torch.no_grad():
        model(torch.zeros(32, WIDTH))
    handle.remove()
    return found


def train_alike(rank: int) -> None:
    """As with weights that are gathered in float32 and quantized then, in every format and by every optimizer."""
    for name, of in [*((name, "SGD") for name in RECIPES), ("current", "AdamW"), ("current", "FusedAdam")]:
        models = [shared_out(made(), gathered) for gathered in (None, RECIPES[name])]
        wanted, found = (trained(model, OPTIMIZERS[of](model.parameters()), RECIPES[name], rank) for model in models)
        assert all(map(torch.equal, found, wanted)), (name, of)
        seen: list[Any] = weights_seen(models[1])
        assert all(isinstance(x, QuantizedTensor) and x.get_usages()["columnwise"] is (name != "current") for x in seen), name  # read either way
        assert all(p.dtype is torch.float32 for p in models[1].parameters())


def scale_by_what_all_have(rank: int) -> None:
    """A weight of which one process has the larger part; under delayed scaling, too; in bfloat16 where the policy says so."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = made()
        with torch.no_grad():
            model[1].weight[: INNER // 2] *= 8
        whole = [p.detach().clone() for p in model.parameters() if p.dim() == 2]
        seen = weights_seen(shared_out(model, CURRENT, mp_policy=policy))
        quantizer: Any = quantizer_for_role(CURRENT.immutable(), QuantizerRole("linear", "weight"))
        for x, wanted in zip(seen, whole, strict=True):
            assert x.dtype is (policy.param_dtype or torch.float32) and torch.equal(x.float(), quantizer(wanted).dequantize())
    model = shared_out(made(), CURRENT)
    losses = trained(model, OPTIMIZERS["SGD"](model.parameters()), fusible.DelayedScaling(), rank)
    assert all(x.isfinite().all() for x in losses)


def leave_what_does_not_divide(rank: int) -> None:
    """Rows of which the processes have different numbers, and shards that would cut blocks."""
    for inner, recipe in ((33, CURRENT), (96, MX), (384, BLOCKS)):
        models = [shared_out(made(inner), gathered) for gathered in (None, recipe)]
        wanted, found = (trained(model, OPTIMIZERS["SGD"](model.parameters()), recipe, rank) for model in models)
        assert all(map(torch.equal, found, wanted)), inner
        first, second = weights_seen(models[1])
        assert not isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor)


class Gather:
    """What FSDP2 asks to gather: as it would, noting the bytes of each message."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent.append(input_tensor.nbytes)
        return distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def send_less(rank: int) -> None:
    """In a step each process sends its shards twice, once for forward and once for backward, of what is resharded between. It keeps no weight whole:
    neither that which it was given, nor a quantized copy, as it does of weights that are gathered as they are held."""
    shard = 2 * WIDTH * INNER // WORLD
    rest = 4 * (2 * WIDTH + INNER) // WORLD  # the norm's and the bias, in float32
    for name, each, scales in (("current", 1, 2 * 4), ("block", 1, shard // 128**2 * 4), ("mxfp8", 2, 2 * shard // 32), ("", 4, 0)):
        recipe = RECIPES.get(name)
        model, gather = shared_out(made(), recipe, reshard_after_forward=True), Gather()
        model.set_custom_all_gather(gather)  # type: ignore[operator]
        trained(model, OPTIMIZERS["SGD"](model.parameters()), recipe or CURRENT, rank, 1)
        assert [n - rest for n in gather.sent] == 2 * [shard * each + scales], (name, gather.sent, rest, shard)
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta]
        whole = {x.dtype for x in tensors if x.untyped_storage().nbytes() >= WIDTH * INNER * x.itemsize}
        assert whole == ({torch.uint8} if recipe is None else set()), (name, whole)


def mixture(experts: int = 4, inner: int = INNER) -> fusible.Sequential:
    torch.manual_seed(0)
    return fusible.Sequential(fusible.Residual(fusible.RMSNorm(WIDTH), fusible.MixtureOfExperts(WIDTH, inner, experts, 2)))


def gather_experts_whole(rank: int) -> None:
    """Each as its process quantizes it; what cannot be shared out in whole experts, or would not be whole blocks, as it is held."""
    of_expert = 3 * WIDTH * INNER
    scales = {"current": 2 * 4, "block": (8 + 2) * 4 * 4, "mxfp8": 2 * of_expert // 32, "nvfp4": of_expert // 16 + 2 * 4}  # lines of 4 in blocks
    for name, each in (("current", 1), ("block", 1), ("mxfp8", 2), ("nvfp4", 0.5)):
        for experts, inner in ((4, INNER), (3, INNER), *([(4, 20)] if name == "block" else [])):
            results, seen = [], list[type]()
            for gathered in (None, RECIPES[name]):
                model = mixture(experts, inner)
                model.register_forward_hook(lambda model, *_, seen=seen: seen.extend(type(p) for p in model.parameters() if p.dim() == 3))  # type: ignore[misc]
                model, gather = shared_out(model, gathered, reshard_after_forward=True), Gather()
                model.set_custom_all_gather(gather)  # type: ignore[operator]
                results.append(trained(model, OPTIMIZERS["AdamW"](model.parameters()), RECIPES[name], rank, 2))
            assert all(map(torch.equal, *results)), (name, experts, inner)
            assert seen[-2:] == 2 * [GroupedTensor if (experts, inner) == (4, INNER) else nn.Parameter], (name, experts, inner, seen)
            if seen[-1] is GroupedTensor:
                rest = 4 * (WIDTH + experts * WIDTH) // WORLD  # the norm's and the router's, in float32
                assert gather.sent[:2] == 2 * [experts // WORLD * (int(of_expert * each) + scales[name]) + rest], (name, gather.sent)


def train_what_is_held_in_8_bits(rank: int) -> None:
    """Experts that are held as one, in 8 bits, of which each process has whole ones: steps are, to the bit, those of one process."""
    for name, recipe in {**RECIPES, "delayed": fusible.DelayedScaling()}.items():
        for of in ("AdamW", "FusedAdam"):
            results = []
            for sharded in (False, True):
                with quantized_model_init(recipe=recipe):
                    model = mixture()
                if sharded:
                    model = shared_out(model, None, reshard_after_forward=True)
                optimizer, found = OPTIMIZERS[of](model.parameters()), list[torch.Tensor]()
                for step in range(3):
                    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
                    with fusible.autocast(recipe=recipe):
                        y = model(x)
                    y.float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(y.detach())
                results.append(found)
            assert all(map(torch.equal, *results)) and not torch.equal(*results[0][:2]), (name, of)


def are_saved_and_read(rank: int, folder: str) -> None:
    """By torch's checkpoints, Fusible's own, and whole; what is read goes on as what was saved, gathered one way or the other."""
    model = shared_out(made(), CURRENT)
    trained(model, OPTIMIZERS["AdamW"](model.parameters()), CURRENT, rank, 1)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=f"{folder}/torch")
    save_sharded(f"{folder}/fusible", model, model.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is torch.Tensor for value in full.values()), {name: type(value) for name, value in full.items()}
    wanted = trained(model, OPTIMIZERS["SGD"](model.parameters()), CURRENT, rank)
    for recipe in (None, CURRENT):
        for way in ("torch", "fusible", "to_empty"):
            other = shared_out(made(seed=5), recipe)
            if way == "to_empty":
                other.to_empty(device="cpu")
            into = other.state_dict()
            if way == "fusible":
                load_sharded(f"{folder}/fusible", other, into)
            else:
                dcp.load(into, checkpoint_id=f"{folder}/torch")
            other.load_state_dict(into)
            held = [p._local_tensor for p in other.parameters() if p.dim() == 2]  # type: ignore[attr-defined]
            assert all(isinstance(x, GatheredQuantized) is (recipe is not None) for x in held), way
            assert all(map(torch.equal, trained(other, OPTIMIZERS["SGD"](other.parameters()), CURRENT, rank), wanted)), (way, recipe)


def begin_on_meta(rank: int) -> None:
    with torch.device("meta"):
        model = made()
    shared_out(model, CURRENT)
    torch.manual_seed(0)
    materialize(model)
    other = shared_out(made(), None)
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.to_local(), wanted.to_local())  # type: ignore[attr-defined]
    assert all(isinstance(x, QuantizedTensor) for x in weights_seen(model))


def are_compiled(rank: int) -> None:
    """By XLA, whose programs read the memory that FSDP2 frees and gives anew."""
    results = []
    for recipe in (None, CURRENT):
        model = shared_out(made(), recipe, reshard_after_forward=True)
        model.compile("xla")
        results.append(trained(model, OPTIMIZERS["SGD"](model.parameters()), CURRENT, rank))
    assert all(map(torch.equal, *results))


def are_traced(rank: int) -> None:
    """By ``torch.compile``, which no longer sees the weight of which a gradient is wanted."""
    for name in ("current", "mxfp8"):
        results = []
        for recipe in (None, RECIPES[name]):
            torch._dynamo.reset()
            model = shared_out(made(), recipe, reshard_after_forward=True)
            compiled: Any = torch.compile(model, backend="aot_eager")
            results.append(trained(compiled, OPTIMIZERS["SGD"](model.parameters()), RECIPES[name], rank, 2))
        assert all(map(torch.equal, *results)), name
    torch._dynamo.reset()


def train_under_the_first_fsdp(rank: int) -> None:
    """Whose flat parameter the modules' own are views of, in a pass alone or always."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    for original in (True, False):
        alone, whole = made(), made()
        sharded = FullyShardedDataParallel(whole, use_orig_params=original, device_id=torch.device("cpu"))
        results = []
        for model in (alone, sharded):
            optimizer, found = OPTIMIZERS["SGD"](model.parameters()), []
            for _ in range(2):
                with fusible.autocast(recipe=CURRENT):
                    y = model(x)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(y.detach())
            results.append(found)
        assert all(map(torch.equal, *results)), original


def refuse(rank: int) -> None:
    laid_out, mesh = fusible.Sequential(fusible.Linear(WIDTH, WIDTH, bias=False)), init_device_mesh("cpu", (WORLD,))
    laid_out[0]._parameters["weight"] = nn.Parameter(distribute_tensor(laid_out[0].weight, mesh, [Shard(0)]))  # type: ignore[arg-type, union-attr]
    under, another = (
        "whose parameters FSDP does not share out yet, got one",
        "that are whole or laid out by parallelize, got a Linear whose weight is a",
    )
    for model, message in ((shared_out(made(), None), under), (shared_out(made(), CURRENT), under), (laid_out, another)):
        with pytest.raises(ArgumentError, match=rf"^gather_quantized: expected \w[\w ]* {message} "):
            gather_quantized(model, CURRENT)
    with pytest.raises(ArgumentError, match="which FSDP2 is to gather in 8 bits; call gather_quantized after parallelize"):
        parallelize(gather_quantized(made(), CURRENT), init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))


JOBS = (
    train_alike,
    scale_by_what_all_have,
    leave_what_does_not_divide,
    send_less,
    gather_experts_whole,
    train_what_is_held_in_8_bits,
    are_saved_and_read,
    begin_on_meta,
    are_compiled,
    are_traced,
    train_under_the_first_fsdp,
    refuse,
)


def decoder(groups: int = 2) -> fusible.Sequential:
    """A block whose q, k and v, and whose gate and what it multiplies, processes along ``tp`` hold apart."""
    torch.manual_seed(0)
    qkv, attention = fusible.Linear(WIDTH, WIDTH + 2 * groups * 64, bias=False), fusible.GroupedQuerySelfAttention(WIDTH, 4, groups, rope_base=1e4)
    return fusible.Sequential(
        fusible.Residual(fusible.RMSNorm(WIDTH), qkv, attention, fusible.Linear(WIDTH, WIDTH)),
        fusible.Residual(fusible.RMSNorm(WIDTH), fusible.Linear(WIDTH, 4 * WIDTH), fusible.SwiGLU(), fusible.Linear(2 * WIDTH, WIDTH, bias=False)),
    )


def classes_seen(model: nn.Module, dims: int = 2) -> dict[str, type]:
    """Of what this process has of each weight of a product, of so many dimensions, within a pass."""
    found: dict[str, type] = {}

    def look(module: nn.Module, *_: object) -> None:
        found.update({name: type(getattr(p, "_local_tensor", p)) for name, p in module.named_parameters() if p.dim() == dims})

    handle = model.register_forward_hook(look, prepend=True)
    with torch.no_grad():
        model(torch.zeros(2, 16, WIDTH))
    handle.remove()
    return found


def assert_alike(models: Sequence[fusible.Sequential], recipe: Any, mesh: DeviceMesh) -> None:
    """Two models, the weights of the second of which are gathered as ``recipe`` quantizes them, have the same results and gradients in two steps."""
    results, own = [], mesh.get_rank() if "ep" in (mesh.mesh_dim_names or ()) else mesh.get_local_rank("dp_shard")
    gather_quantized(models[1], recipe)
    for model in models:
        fully_shard(model, mesh=mesh["dp_shard"])
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), list[torch.Tensor]()
        for step in range(2):
            x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(10 * step + own))
            with fusible.autocast(recipe=recipe):
                y = model(x * (1 + 10 * step + own))
            y.float().square().mean().backward()
            found += [y.detach(), *(p.grad._local_tensor.clone() for p in model.parameters())]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
    assert all(map(torch.equal, *results)), recipe


def train_alike_along_tp(mesh: DeviceMesh) -> None:
    """Of what is joined to one weight the parts are gathered apart, and scaled as one; what would be scaled otherwise is gathered as it is held."""
    for name, recipe in RECIPES.items():
        for groups in (2, 1):  # of keys: one each, or one that both have
            models = [parallelize(decoder(groups), mesh) for _ in range(2)]
            assert_alike(models, recipe, mesh)
            model = models[1]
            held = {part for part, kind in classes_seen(model).items() if not issubclass(kind, QuantizedTensor)}
            apart = groups == 2 and name != "block"  # shards of 32 rows of keys cut squares of 128
            assert held == (set() if apart else {"0.1.query_weight", "0.1.key_weight", "0.1.value_weight"}), (name, groups, held)


def train_alike_along_ep(mesh: DeviceMesh) -> None:
    """Of the experts that processes along ``ep``, or ``tp`` by rows, have, those along ``dp_shard`` hold one each."""
    meshes = [init_device_mesh("cpu", (WORLD, 2), mesh_dim_names=("dp_shard", along)) for along in ("ep", "tp")]
    for (name, recipe), mesh in product(RECIPES.items(), meshes):
        models = [parallelize(mixture(), mesh, sequence_parallel=True) for _ in range(2)]
        assert_alike(models, recipe, mesh)
        assert {part for part, kind in classes_seen(models[1], 3).items() if issubclass(kind, GroupedTensor)} == {
            "0.1.up_weight",
            "0.1.down_weight",
        }, name


def share_out_what_is_held_in_8_bits(mesh: DeviceMesh) -> None:
    """Experts that are quantized before they are shards: a pass is, to the bit, that of those that are no shards."""
    mesh = init_device_mesh("cpu", (WORLD, 2), mesh_dim_names=("dp_shard", "ep"))
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    for name, recipe in RECIPES.items():
        results = []
        for sharded in (False, True):
            model = fusible.quantize_parameters(parallelize(mixture(), mesh), recipe=recipe)
            if sharded:
                fully_shard(model, mesh=mesh["dp_shard"])
                held = [p._local_tensor for p in model.parameters() if p.dim() == 3]  # type: ignore[attr-defined]
                assert [(type(p), len(p)) for p in held] == 2 * [(GroupedTensor, 1)], name
            with torch.no_grad():
                results += [model(x), model(x)]
        assert all(torch.equal(result, results[0]) for result in results), name


def scale_joined_parts_alike(mesh: DeviceMesh) -> None:
    """A value part of which the second half, another process's, is eight times as large."""
    model = parallelize(decoder(), mesh)
    attention_in: Any = model.get_submodule("0.1")
    with torch.no_grad():
        attention_in.value_weight._local_tensor[32:] *= 8
    whole = torch.cat([attention_in._parameters[f"{part}_weight"]._local_tensor for part in ("query", "key", "value")])
    quantizer: Any = quantizer_for_role(CURRENT.immutable(), QuantizerRole("linear", "weight"))
    wanted, found = quantizer(whole).dequantize(), list[torch.Tensor]()
    fully_shard(gather_quantized(model, CURRENT), mesh=mesh["dp_shard"])
    parts = ("query_weight", "key_weight", "value_weight")
    look = lambda *_: found.extend(attention_in._parameters[part]._local_tensor.dequantize() for part in parts)  # noqa: E731
    model.register_forward_hook(look, prepend=True)
    with torch.no_grad():
        model(torch.zeros(2, 16, WIDTH))
    assert torch.equal(torch.cat(found), wanted)


JOBS_OF_FOUR = (train_alike_along_tp, scale_joined_parts_alike, train_alike_along_ep, share_out_what_is_held_in_8_bits)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for job in JOBS:
        job(*((rank, folder) if job is are_saved_and_read else (rank,)))  # type: ignore[operator]
    distributed.barrier()
    os._exit(0)  # an interpreter that ends while gloo's threads run may abort, with all its work done


def run_in_four(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2 * WORLD)
    mesh = init_device_mesh("cpu", (WORLD, 2), mesh_dim_names=("dp_shard", "tp"))
    for job in JOBS_OF_FOUR:
        job(mesh)
    distributed.barrier()
    os._exit(0)


def test_parts_of_weights_along_tp_and_ep_are_gathered_in_8_bits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_in_four, args=(folder,), nprocs=2 * WORLD)


def test_weights_gathered_in_8_bits_train_as_those_gathered_as_they_are() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder,), nprocs=WORLD)


def test_in_one_process_a_model_is_what_it_was() -> None:
    """Before it is shared out: it is called, saved, and read as ever. Products of what is no plain tensor are torch's, which rounds otherwise."""
    for recipe in (CURRENT, None):
        results = []
        for gathered in (False, True):
            model = made()
            if gathered:
                gather_quantized(model, CURRENT)
            optimizer = fusible.FusedAdam(model.parameters(), lr=0.01)
            for _ in range(2):
                with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                    y = model(torch.ones(32, WIDTH))
                y.square().mean().backward()
                optimizer.step()
            results.append([y.detach(), *(p.detach().clone() for p in model.parameters())])
            other = made(seed=3)
            other.load_state_dict(model.state_dict())
            with tempfile.NamedTemporaryFile(suffix=".pt") as file:
                torch.save(model.state_dict(), file.name)
                assert all(type(value) is torch.Tensor for value in torch.load(file.name).values())
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0 if recipe else 1e-4, atol=0 if recipe else 1e-4)


def test_a_weight_that_an_embedding_has_too_stays_its_own() -> None:
    model = nn.Sequential(nn.Embedding(64, WIDTH), fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.Linear(WIDTH, 64, bias=False)))
    model[1][1].weight = model[0].weight
    gather_quantized(model, CURRENT)
    assert model[1][1].weight is model[0].weight and type(model[0].weight) is nn.Parameter
    assert isinstance(model[1][0].weight, GatheredQuantized)


def test_recipes_that_weights_cannot_be_gathered_by_are_refused() -> None:
    for recipe, error, message in (
        (None, DTypeError, "gather_quantized: expected a recipe, got None; "),
        (fusible.HighPrecision(), ArgumentError, "gather_quantized: expected a recipe that quantizes weights, got "),
        (fusible.DelayedScaling(), ArgumentError, "gather_quantized: expected a recipe that scales weights by their own magnitudes, got "),
    ):
        model = made()
        with pytest.raises(error, match=f"^{message}") as caught:
            gather_quantized(model, recipe)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and not any(isinstance(p, GatheredQuantized) for p in model.parameters())
