"""``parallelize``: lay a model out on the processes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusible.compute_pipeline import CONTEXT_PARALLEL, Holding, expert_parallel, tensor_parallel
from fusible.compute_pipeline import context_parallel as sequences_shared
from fusible.distributed.embedding import VocabularyEmbedding, WholeEmbedding
from fusible.distributed.mesh import check_mesh, size_of
from fusible.distributed.quantized_gather import GatheredQuantized
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.nvte import make_nvte_tensor
from fusible.ops import DispatchTokens, Op
from fusible.ops.sharing import Process
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.shares import Share
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.modules.sequential import Chain
from fusible.quantized import QuantizedTensor
from fusible.tex.calls.transaction import Write, run

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)

_SERVED = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
_Placements = tuple[Shard | Replicate, ...]
"""How a parameter is laid out along each dimension that shares parameters out."""
_Holdings = tuple[Holding, ...]
_HeldBy = list[Mapping[str, Holding]]
"""How the processes along each dimension hold the parameters of an op, by their names."""
_Rewrite = Callable[[Sequence[BoundOp]], list[tuple[Op, _HeldBy]]]
"""What becomes of the ops of a pipeline in this process."""
_GroupOf = Callable[[tuple[str, ...]], str | None]
"""The processes along some dimensions, by their group's name."""


@dataclass(frozen=True)
class _Part:
    """A parameter that comes in the place of one of a module's: ``lines`` of that one's first dimension, laid out by ``placements``."""

    name: str
    lines: tuple[int, int] | None
    placements: _Placements


@dataclass
class _Changes:
    """What a module becomes."""

    module: BaseModule
    ops: dict[Op, tuple[Op, _HeldBy, BoundOp]] = field(default_factory=dict)

    def parameters(self) -> Iterator[tuple[Op, str, str, _Holdings]]:
        """Each op, the name of a parameter that it takes, the module's name of that, and how the processes hold it from now on. Buffers, which have
        no gradient and are the same in all processes, are left out."""
        for op, (_, held, bound) in self.ops.items():
            for name, parameter in zip(op.arg_names, bound.parameters, strict=True):
                if parameter not in self.module._buffers:
                    yield op, name, parameter, tuple([holdings[name] for holdings in held])


@dataclass(frozen=True)
class _Place:
    """This process among those that share parameters out. ``mesh``: its dimensions along which they do, ``ep`` and ``tp`` or one of them.
    ``laid_out``: what became of parameters, by these, their lines and placements: one that several modules hold stays one."""

    mesh: DeviceMesh
    laid_out: dict[tuple[int, tuple[int, int] | None, _Placements], nn.Parameter] = field(default_factory=dict)
    _groups: dict[tuple[str, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> _Place | None:
        """None where every process has all parameters."""
        names = [name for name in mesh.mesh_dim_names or () if name in ("ep", "tp") and size_of(mesh, name) > 1]
        return cls(mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]) if names else None

    @property
    def names(self) -> tuple[str, ...]:
        return self.mesh.mesh_dim_names or ()

    def among(self, *names: str) -> tuple[str, ...]:
        """Those that there are, in order."""
        return tuple([name for name in self.names if name in names])

    def process(self, names: tuple[str, ...]) -> Process:
        """This one among those along the dimensions together."""
        rank, size = 0, 1
        for name in names:
            rank, size = rank * size_of(self.mesh, name) + self.mesh.get_local_rank(name), size * size_of(self.mesh, name)
        return Process(rank, size)

    @property
    def factor(self) -> float:
        """What gradients are multiplied by: along ``ep`` each process has sequences of its own, and they are means over those."""
        return 1 / size_of(self.mesh, "ep")

    def whole(self, name: str) -> _Part:
        return _Part(name, None, (Replicate(),) * len(self.names))

    def sharded(self, name: str, along: Sequence[str], dim: int) -> _Part:
        return _Part(name, None, tuple([Shard(dim) if each in along else Replicate() for each in self.names]))

    def group(self, names: tuple[str, ...]) -> str | None:
        """The processes along these dimensions; None of none. Every process asks for the same ones in the same order."""
        if not names:
            return None
        if names not in self._groups:
            alone = self.mesh if names == self.names else self.mesh[names[0]]
            self._groups[names] = (alone if len(names) == 1 else self.mesh[names]._flatten()).get_group().group_name
        return self._groups[names]


def parallelize(
    model: M, mesh: DeviceMesh, *, sequence_parallel: bool = False, shared_output: bool = False, context_parallel: str = "all_to_all"
) -> M:
    """Lay ``model`` out on the processes of ``mesh``, and give it back. Every process of the mesh calls it, with the same model.

    ``mesh``: a ``DeviceMesh`` whose dimensions have torchtitan's names. Along ``tp`` processes share out the columns of Fusible's products, and heads
    of attention, between one norm or residual and the next (Shoeybi et al. 2019, arXiv:1909.08053); everything else is the same in all of them, and
    embeddings share out their vocabulary; one that has its weight from the product that computes the logits is held as that is. Along
    ``dp_replicate`` and ``dp_shard`` the model is left as it is: call ``fully_shard`` on it, or wrap it.
    Along ``pp`` the model is this process's stage (``split_stages``).

    Along ``cp`` each process has its part of every sequence (``local_batch``), and ``context_parallel`` says how attention sees the others':
    ``"all_to_all"``, by exchanging heads (Jacobs et al. 2023, arXiv:2309.14509), or ``"ring"``, by passing keys and values round (Liu et al. 2023,
    arXiv:2310.01889). Gradients are means over these processes as they are along ``dp_shard``, and are reduced with it.

    Along ``ep`` processes, each with sequences of its own (``local_batch``), share out the experts of ``MixtureOfExperts`` and exchange tokens
    (Lepikhin et al. 2020, arXiv:2006.16668). Gradients become means over these processes in backward. Processes along ``tp`` share them out as well
    where they share out rows (``sequence_parallel``), so that each has tokens of its own; else each computes with all of them.

    ``sequence_parallel``: processes along ``tp`` share out the rows of everything else too, so that what is kept for backward becomes smaller
    (Korthikanti et al. 2022, arXiv:2205.05198). ``shared_output``: where a pipeline ends in a product, y stays shared out by columns, unless a
    module behind it in a chain, or around it, computes with y (``reads_whole_parts``): rank r's logits are the r-th part of the vocabulary, as
    ``CrossEntropyLoss(group=...)`` takes them.

    Parameters become ``DTensor``s, by the values that the first process along ``tp`` has. One that holds several things side by side (q, k and v; a
    gate and what it multiplies) becomes one for each, ``query_weight`` and so on. Inputs and outputs of the model are those of one process.

    Raises ``ArgumentError``, ``ShapeError`` or ``DTypeError``, in every process alike and before anything is changed or sent.
    """
    check_mesh(mesh, _SERVED)
    if size_of(mesh, "cp") > 1:
        _check_context(model, mesh, context_parallel)
    if (place := _Place.of(mesh)) is not None:
        _share_parameters(model, place, sequence_parallel, shared_output)
    if size_of(mesh, "cp") > 1:
        _share_sequences(model, mesh["cp"], context_parallel)
    group = _group_of(mesh)
    for module in model.modules() if group is not None else ():
        if isinstance(module, BaseModule):
            module.forget_plans()
            module.amax_group = group
    return model


def _share_parameters(model: nn.Module, place: _Place, sequence_parallel: bool, shared_output: bool) -> None:
    _check_lists(model, place, sequence_parallel)
    inner = _inner_ops(model)

    def made(group: _GroupOf) -> tuple[list[_Changes], dict[nn.Embedding, _Part]]:
        def rewrite(bound: Sequence[BoundOp]) -> list[tuple[Op, _HeldBy]]:
            shared = shared_output and id(bound[-1].op) not in inner
            return _rewritten([b.op for b in bound], place, group, sequence_parallel, shared)

        changes = _changes(model, rewrite)
        held = {
            id(change.module._parameters[name]): _parts(name, holdings, place) for change in changes for _, _, name, holdings in change.parameters()
        }
        embeddings = {module: whole if held.get(id(module.weight)) == [whole] else vocabulary for module in _embeddings(model)}
        for module, part in embeddings.items():
            if part != whole:
                VocabularyEmbedding.check(module)
        _check_ties(model, changes, embeddings, place)
        return changes, embeddings

    whole, vocabulary = place.whole("weight"), place.sharded("weight", ("tp",), 0)
    made(lambda names: None)  # raises, before groups of several dimensions are made
    changes, embeddings = made(place.group)
    _lay_out(model, changes, place)
    for module, part in embeddings.items():
        module.weight = _laid_out(module.weight, part, place)
        # Where what computes the logits has it whole, each process embeds all tokens, and finds the whole gradient.
        kind = WholeEmbedding if part == whole else VocabularyEmbedding
        kind.take(module, Share(("weight",), (None,), (place.group(place.among("ep")),), place.factor))


def _rewritten(ops: Sequence[Op], place: _Place, group: _GroupOf, sequence_parallel: bool, shared_output: bool) -> list[tuple[Op, _HeldBy]]:
    """What becomes of a pipeline's ops, and how the processes along each dimension hold the parameters. Those that have tokens of their own share out
    the experts: along ``ep``, and along ``tp`` where rows are shared out."""
    found: list[Op] = list(ops)
    whole = [dict.fromkeys(op.arg_names, Holding()) for op in ops]
    by_name = dict.fromkeys(place.names, whole)
    apart = place.among("ep", *(["tp"] if sequence_parallel else []))
    if apart:
        exchanged = expert_parallel(found, place.process(apart), group(apart))
        found = [each.op for each in exchanged]
        by_name |= {name: [each.holdings for each in exchanged] for name in apart}
    if "tp" in place.names:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "shared_output": shared_output}
        shared = tensor_parallel(found, place.process(("tp",)), group(("tp",)), **options)
        found = [each.op for each in shared]
        # An expert is held by who computes it.
        of_experts = [{name: h for name, h in held.items() if h.dim is not None} for held in by_name["tp"]]
        by_name["tp"] = [{**each.holdings, **held} for each, held in zip(shared, of_experts, strict=True)]
    return [(op, list(held)) for op, *held in zip(found, *(by_name[name] for name in place.names), strict=True)]


def _check_lists(model: nn.Module, place: _Place, sequence_parallel: bool) -> None:
    """Raise ``ArgumentError`` for a model that has nothing to share out, or that takes rows of which nobody says whose they are."""
    pipelines = list(_pipelines(model))
    if "ep" in place.names and not any(isinstance(b.op, DispatchTokens) for bound in pipelines for b in bound):
        do = "leave out the mesh's dimension ep"
        raise ArgumentError(expected("a MixtureOfExperts", of="a model that is parallelized along 'ep'", got="none", do=do))
    if "tp" in place.names and sequence_parallel and any(b.extras is not None and None in b.extras.inputs for bound in pipelines for b in bound):
        do = "leave out sequence_parallel, or give them by channels"
        raise ArgumentError(expected("no extra inputs", of="a model with sequence parallelism", got="some of the caller's", do=do))


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The modules with parameters that are not Fusible's. Raises ``NotServedError`` for one that is no ``nn.Embedding``."""
    found: list[nn.Embedding] = []
    for module in model.modules():
        if isinstance(module, BaseModule) or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not isinstance(module, nn.Embedding):
            do = "call parallelize on Fusible's modules in it, or lay the module out by torch.distributed.tensor.parallel first"
            got = f"a {type(module).__name__}"
            raise NotServedError(expected("Fusible's modules and torch.nn.Embedding", of="the parameters of a parallelized model", got=got, do=do))
        found.append(module)
    return found


def _check_ties(model: nn.Module, changes: Sequence[_Changes], embeddings: Mapping[nn.Embedding, _Part], place: _Place) -> None:
    """Raise ``NotServedError`` where several modules hold one parameter of which they would have unlike shares: they would train apart."""
    ways = {(id(module), "weight"): [part] for module, part in embeddings.items()}
    ways |= {(id(change.module), name): _parts(name, holdings, place) for change in changes for _, _, name, holdings in change.parameters()}
    first: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            here, way = f"{path}.{name}" if path else name, ways.get((id(module), name))
            other, like = first.setdefault(id(parameter), (here, way))
            if parameter is not None and like != way:
                got, do = f"{other} and {here} as one", "give each module a parameter of its own"
                raise NotServedError(expected("parameters that all who hold one share out alike", of="a parallelized model", got=got, do=do))


def _lay_out(model: nn.Module, changes: Sequence[_Changes], place: _Place) -> None:
    writes = [write for change in changes for write in _writes(change, place)]
    for module in model.modules():
        if isinstance(module, BaseModule):
            module.forget_plans()
    run(writes)


def _check_context(model: nn.Module, mesh: DeviceMesh, way: str) -> None:
    """Raise for a model whose sequences cannot be shared out, before anything is changed."""
    if way not in CONTEXT_PARALLEL:
        wanted = " or ".join(map(repr, CONTEXT_PARALLEL))
        raise ArgumentError(expected(wanted, of="context_parallel of parallelize", got=repr(way), do="name one of these"))
    counting = next((type(module).__name__ for module in model.modules() if getattr(module, "counts_places", False)), None)
    if counting is not None:
        wanted, got = "positions by which attention rotates", f"those that a {counting} counts in each process from 0 on"
        raise NotServedError(expected(wanted, of="a model that is parallelized along 'cp'", got=got, do="leave out the mesh's dimension cp"))
    process = Process(0, size_of(mesh, "cp") * size_of(mesh, "tp"))  # those that share out the heads, by columns or by sequences
    for bound in _pipelines(model):
        sequences_shared([b.op for b in bound], process, None, way)


def _share_sequences(model: nn.Module, mesh: DeviceMesh, way: str) -> None:
    process, group = Process(mesh.get_local_rank(), mesh.size()), mesh.get_group().group_name
    writes: list[Write] = []
    for bound in _pipelines(model):
        for b, op in zip(bound, sequences_shared([b.op for b in bound], process, group, way), strict=True):
            if op is not b.op:
                writes.append(partial(vars(b.module).update, b.module.exchanged({b.op: op})))
    for module in model.modules():
        if isinstance(module, BaseModule):
            module.forget_plans()
    run(writes)


def _changes(model: nn.Module, rewrite: _Rewrite) -> list[_Changes]:
    found: dict[int, _Changes] = {}
    seen: set[int] = set()
    for bound in _pipelines(model):
        for b, (op, held) in zip(bound, rewrite(bound), strict=True):
            if id(b.op) in seen:
                do = "give each place a module of its own"
                raise ArgumentError(expected("modules that stand at one place", of="a parallelized model", got=f"{b.op!r} at several", do=do))
            seen.add(id(b.op))
            _check_module(b)
            found.setdefault(id(b.module), _Changes(b.module)).ops[b.op] = op, held, b
    return list(found.values())


def _check_module(b: BoundOp) -> None:
    of, do = "a parallelized model", "make the layer anew"
    if b.module.remakes_op:
        wanted, got = "modules of fusible.pytorch", f"the operation {type(b.module).__name__}"
        raise NotServedError(expected(wanted, of=of, got=got, do="give operations their tensor_parallel_mode when they are made"))
    for name in (name for name in b.parameters if name not in b.module._buffers):
        parameter = b.module._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor):
            got = f"{name} of {type(b.module).__name__}, which is {'a DTensor' if parameter is not None else 'computed'}"
            raise ArgumentError(expected("parameters that are held as they are", of=of, got=got, do=do))
        if isinstance(parameter, QuantizedTensor):
            got = f"{name} of {type(b.module).__name__} in 8 bits"
            raise NotServedError(expected("parameters in high precision", of=of, got=got, do="quantize them after parallelize"))
        if isinstance(parameter, GatheredQuantized):
            got = f"{name} of {type(b.module).__name__}, which FSDP2 is to gather in 8 bits"
            raise ArgumentError(expected("parameters that are held as they are", of=of, got=got, do="call gather_quantized after parallelize"))
        if name in getattr(b.module, "accumulating_parameters", ()):
            got = f"{type(b.module).__name__}(accumulate_into_main_grad=True)"
            raise NotServedError(expected("gradients in .grad", of=of, got=got, do="leave it out"))


def _pipelines(model: nn.Module) -> Iterator[tuple[BoundOp, ...]]:
    """The lists of ops that the model runs as pipelines."""
    covered: set[int] = set()
    for module in model.modules():
        if not isinstance(module, BaseModule):
            continue
        for bound in module._pipelines():
            if not all(id(b.op) in covered for b in bound):
                covered.update(id(b.op) for b in bound)
                yield bound


def _inner_ops(model: nn.Module) -> set[int]:
    """Those of pipelines whose results another module reads: one that follows in a chain, or one whose parts they are (``reads_whole_parts``)."""
    found: set[int] = set()
    for module in model.modules():
        lists = [part for part in module._parts()[:-1] if isinstance(part, list)] if isinstance(module, Chain) else []
        if getattr(module, "reads_whole_parts", False):
            lists += [bound for part in module.modules() if isinstance(part, BaseModule) for bound in part._pipelines()]
        found.update(id(b.op) for bound in lists for b in bound)
    return found


def _group_of(mesh: DeviceMesh) -> Any:
    """The processes that compute one step of one model together, by whose largest magnitudes tensors are scaled; None for this one alone."""
    names = [name for name in mesh.mesh_dim_names or () if name != "pp" and size_of(mesh, name) > 1]
    if not names:
        return None
    return (mesh[tuple(names)]._flatten() if len(names) > 1 else mesh[names[0]]).get_group().group_name


def _writes(change: _Changes, place: _Place) -> list[Write]:
    """What is assigned to lay a module out: nothing is changed yet, but the processes exchange values."""
    module = change.module
    parameters, shares = dict(module._parameters), dict(module.shares)
    local: dict[Op, dict[str, Any]] = {op: {} for op in change.ops}
    for op, name, parameter, holdings in change.parameters():
        parts = _parts(parameter, holdings, place)
        whole = parameters.pop(parameter)
        new = {part.name: _laid_out(whole, part, place) for part in parts}
        parameters |= new
        shares[parameter] = _share(parts, holdings, place)
        local[op][name] = make_nvte_tensor(_shape_of(shares[parameter], new))
    ops = {op: made.with_(**local[op]) if local[op] else made for op, (made, _, _) in change.ops.items()}
    attributes = {**module.exchanged(ops), "_parameters": parameters, "shares": shares}
    return [partial(vars(module).update, attributes)]


def _parts(name: str, holdings: _Holdings, place: _Place) -> list[_Part]:
    """What becomes of a parameter. Several dimensions share out experts alone, which are not divided further."""
    along = [each for each, holding in zip(place.names, holdings, strict=True) if holding.dim is not None]
    if not along:
        return [place.whole(name)]
    holding, process = next(holding for holding in holdings if holding.dim is not None), place.process(tuple(along))
    if len(holding.parts) == 1 and holding.parts[0].shared(process.size):
        assert holding.dim is not None
        return [place.sharded(name, along, holding.dim)]
    found: list[_Part] = []
    at = 0
    for part in holding.parts:
        own = f"{part.name}_{name}"
        made = place.sharded(own, along, 0) if part.shared(process.size) else place.whole(own)
        found.append(replace(made, lines=(at, at + part.width)))
        at += part.width
    return found


def _laid_out(whole: Any, part: _Part, place: _Place) -> nn.Parameter:
    known = id(whole), part.lines, part.placements
    if known not in place.laid_out:
        values = whole.detach() if part.lines is None else whole.detach()[slice(*part.lines)].clone()
        made = nn.Parameter(distribute_tensor(values, place.mesh, part.placements), requires_grad=whole.requires_grad)
        vars(made).update(vars(whole))
        place.laid_out[known] = made
    return place.laid_out[known]


def _share(parts: Sequence[_Part], holdings: _Holdings, place: _Place) -> Share:
    lines: list[tuple[int, int] | None] = []
    groups: list[str | None] = []
    for i, part in enumerate(parts):
        taken = None
        summed: list[str] = []
        for along, holding, placement in zip(place.names, holdings, part.placements, strict=True):
            repeated = holding.dim is not None and isinstance(placement, Replicate)
            taken = holding.parts[i].of(place.process((along,))) if repeated else taken
            if repeated if holding.dim is not None else holding.partial:
                summed.append(along)
        lines.append(None if taken is None else (taken.start, taken.stop))
        groups.append(place.group(tuple(summed)))
    return Share(tuple(part.name for part in parts), tuple(lines), tuple(groups), place.factor)


def _shape_of(share: Share, new: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of the shape and dtype that the op takes, without memory."""
    local = [new[name].to_local() for name in share.names]
    first = sum(each.shape[0] if taken is None else taken[1] - taken[0] for each, taken in zip(local, share.lines, strict=True))
    return torch.empty((first, *local[0].shape[1:]), dtype=local[0].dtype, device="meta")
