"""``CrossEntropyLoss``: in blocks of rows, so that no copy of all logits is held in fp32."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.pytorch.engine.refusals import check_dense
from fusible.tex.protocol import accumulator

__all__ = ["CrossEntropyLoss", "gradients", "in_blocks", "merged", "statistics"]

Reduction = Literal["mean", "sum", "none"]

_OPTIONS = frozenset({"ignore_index", "label_smoothing", "z_loss", "reduction", "group"})
_BLOCK = 1 << 22
"""The number of logits that are held in fp32 at once."""
_FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class CrossEntropyLoss(nn.Module):
    """``(1 - s) * (log Z - x[target]) + s * (log Z - mean x) + z * (log Z)^2``, ``Z = sum of exp x``, of each row of logits ``x [*, vocabulary]``.

    ``target``: integers ``[*]`` from 0 to ``vocabulary - 1``, or ``ignore_index``: such a row's loss and gradient are 0, and it does not count.
    ``s``: ``label_smoothing`` (Szegedy et al. 2016, arXiv:1512.00567). ``z``: ``z_loss``, which holds the logits' scale (Chowdhery et al. 2022,
    arXiv:2204.02311, section 5). ``reduction``: ``"mean"`` over the rows that count (NaN where none does, as torch has it), ``"sum"`` or ``"none"``.
    ``group``: of processes that share out the vocabulary: rank r's logits are its r-th part, ``[*, vocabulary / processes]``, and no process holds
    all of them: four numbers a row pass between them. Each computes the whole loss, and the gradient of its own logits.

    The loss is computed and returned in fp32 (fp64 for fp64 logits); the gradient has the logits' dtype, and is rounded once. Raises
    ``ArgumentError``, ``ShapeError`` or ``DTypeError``; a target that is no class is refused on the CPU, and has an infinite loss elsewhere.
    """

    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: Reduction = "mean", group: Any = None
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            do = "pass the share of a target that is spread"
            raise ArgumentError(expected("a number from 0 to 1", of="label_smoothing of CrossEntropyLoss", got=label_smoothing, do=do))
        if not 0.0 <= z_loss < float("inf"):
            do = "pass the term's weight, say 1e-4"
            raise ArgumentError(expected("a number of at least 0", of="z_loss of CrossEntropyLoss", got=z_loss, do=do))
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError(expected("'mean', 'sum' or 'none'", of="reduction of CrossEntropyLoss", got=repr(reduction), do="pass one of them"))
        self.ignore_index, self.label_smoothing, self.z_loss, self.reduction = ignore_index, label_smoothing, z_loss, reduction
        self._shared = _Shared.of(group)

    def __setattr__(self, name: str, value: Any) -> None:
        """An option that is set takes effect at the next call. One that the constructor refuses raises as it does there, and is not set."""
        if name in _OPTIONS and "_shared" in vars(self):
            made = CrossEntropyLoss(**{name: value})
            name, value = ("_shared", made._shared) if name == "group" else (name, value)
        super().__setattr__(name, value)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        _check(logits, target)
        rows, wanted = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).to(torch.int64)
        counted = wanted != self.ignore_index
        if wanted.is_cpu and not torch.compiler.is_compiling():  # elsewhere the answer would be waited for, and such a row's loss is infinite
            _check_targets(wanted, counted, rows.shape[1] * self._shared.processes)
        losses, _ = torch.ops.fusible.cross_entropy(rows, wanted, counted, float(self.label_smoothing), float(self.z_loss), *self._shared)
        if self.reduction == "mean":
            return losses.sum() / counted.sum()
        return losses.sum() if self.reduction == "sum" else losses.view(target.shape)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, reduction={self.reduction!r}"


class _Shared(NamedTuple):
    """Which part of the vocabulary this process has: the ``rank``-th of ``processes``, those of the group of the name. A name, as operators take no
    group, and a model with one could not be copied."""

    rank: int = 0
    processes: int = 1
    group_name: str = ""

    @classmethod
    def of(cls, group: Any) -> _Shared:
        """Raises ``DTypeError`` for what is no group, ``ArgumentError`` for one that this process is not in."""
        if group is None:
            return cls()
        of = "group of CrossEntropyLoss"
        if not isinstance(group, dist.ProcessGroup):
            do = "pass a group of torch.distributed, or leave it out"
            raise DTypeError(expected("a ProcessGroup", of=of, got=f"a {type(group).__name__}", do=do))
        if dist.get_rank(group) < 0:
            raise ArgumentError(expected("a group that this process belongs to", of=of, got="another", do="make the loss in its processes alone"))
        return cls(dist.get_rank(group), dist.get_world_size(group), group.group_name)


@torch.library.custom_op("fusible::cross_entropy", mutates_args=())
def _losses(
    rows: Tensor, target: Tensor, counted: Tensor, smoothing: float, z_loss: float, rank: int, processes: int, group: str
) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 where it does not count; and ``max x`` and ``Z / exp(max x)``, ``[rows, 2]``."""
    local = target - rank * rows.shape[1]
    parts = [statistics(x, y) for x, y in zip(in_blocks(rows), in_blocks(local, rows.shape[1]), strict=True)]
    found = torch.cat(parts)
    if processes > 1:
        found = merged(tex.prim.all_gather(found, group).view(processes, *found.shape))
    largest, sums, chosen, totals = found.unbind(1)
    logarithm = largest + sums.log()
    loss = logarithm - (1 - smoothing) * chosen + z_loss * logarithm.square()
    if smoothing:
        loss = loss - smoothing * totals / (rows.shape[1] * processes)
    return torch.where(counted, loss, 0.0), found[:, :2].clone()


@_losses.register_fake
def _(rows: Tensor, target: Tensor, counted: Tensor, smoothing: float, z_loss: float, rank: int, processes: int, group: str) -> tuple[Tensor, Tensor]:
    dtype = accumulator(rows.dtype)
    return rows.new_empty(rows.shape[:1], dtype=dtype), rows.new_empty((rows.shape[0], 2), dtype=dtype)


@torch.library.custom_op("fusible::cross_entropy_backward", mutates_args=())
def _dlogits(
    dlosses: Tensor, rows: Tensor, target: Tensor, counted: Tensor, stats: Tensor, smoothing: float, z_loss: float, rank: int, processes: int
) -> Tensor:
    """The gradient of ``rows``, where that of each row's loss is given."""
    largest, sums = stats.unbind(1)
    weights = 1 + 2 * z_loss * (largest + sums.log())
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    local, share = target - rank * rows.shape[1], smoothing / (rows.shape[1] * processes)
    of_rows = (in_blocks(each, rows.shape[1]) for each in (largest, sums, local, torch.where(counted, dlosses, 0.0), counted, weights))
    for written, x, m, z, y, d, there, weight in zip(in_blocks(result), in_blocks(rows), *of_rows, strict=True):
        dx = gradients(x, m, z, y, smoothing, share, weight)
        written.copy_(dx.mul_(d[:, None]).masked_fill_(~there[:, None], 0.0))
    return result


@_dlogits.register_fake
def _(
    dlosses: Tensor, rows: Tensor, target: Tensor, counted: Tensor, stats: Tensor, smoothing: float, z_loss: float, rank: int, processes: int
) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, target, counted, *options = inputs
    ctx.options = options[:-1]
    ctx.save_for_backward(rows, target, counted, output[1])
    ctx.mark_non_differentiable(output[1])


def _through(ctx: Any, dlosses: Tensor, _: Any) -> Any:
    return torch.ops.fusible.cross_entropy_backward(dlosses, *ctx.saved_tensors, *ctx.options), *[None] * 7


_losses.register_autograd(_through, setup_context=_setup_context)


def in_blocks(x: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """``x`` in blocks of rows of ``width`` logits, or its own."""
    return x.split(max(_BLOCK // max(width or x.shape[1], 1), 1))


def statistics(x: Tensor, target: Tensor) -> Tensor:
    """For each row its maximum, the sum of ``exp(x - maximum)``, the logit of its target (-inf where that is elsewhere) and the sum of its logits,
    ``[rows, 4]``, fp32 or fp64."""
    x = _wide(x)
    largest, here = x.amax(1), (target >= 0) & (target < x.shape[1])
    chosen = torch.where(here, x.gather(1, torch.where(here, target, 0)[:, None])[:, 0], -torch.inf)
    totals = x.sum(1)
    return torch.stack([largest, (x - largest[:, None]).exp_().sum(1), chosen, totals], 1)


def merged(parts: Tensor) -> Tensor:
    """The ``statistics`` of rows whose columns are in several parts, from those of the parts, ``[parts, rows, 4]``."""
    largest = parts[..., 0].amax(0)
    sums = (parts[..., 1] * (parts[..., 0] - largest).exp()).sum(0)
    return torch.stack([largest, sums, parts[..., 2].amax(0), parts[..., 3].sum(0)], 1)


def gradients(x: Tensor, largest: Tensor, sums: Tensor, target: Tensor, smoothing: float, share: float, weight: Tensor | None = None) -> Tensor:
    """``weight * softmax(x) - (1 - smoothing) * [target] - share`` of rows with these ``statistics``, fp32 or fp64."""
    softmax = (_wide(x) - largest[:, None]).exp_().div_(sums[:, None])
    if weight is not None:
        softmax.mul_(weight[:, None])
    here = (target >= 0) & (target < x.shape[1])
    return softmax.sub_(share).scatter_add_(1, torch.where(here, target, 0)[:, None], here.to(softmax.dtype).mul_(smoothing - 1.0)[:, None])


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype))


def _check(logits: Tensor, target: Tensor) -> None:
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise DTypeError(expected("a torch.Tensor", of=f"{name} of CrossEntropyLoss", got=type(value).__qualname__, do="convert it"))
        check_dense(value, f"{name} of CrossEntropyLoss")
    if target.device != logits.device:
        wanted = f"a tensor on {logits.device}, where the logits are"
        raise ArgumentError(expected(wanted, of="target of CrossEntropyLoss", got=str(target.device), do="move one of them"))
    if logits.dtype not in _FLOATING:
        got = str(logits.dtype).removeprefix("torch.")
        raise DTypeError(expected("fp64, fp32, fp16 or bf16", of="logits of CrossEntropyLoss", got=got, do="cast it"))
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        got = str(target.dtype).removeprefix("torch.")
        raise DTypeError(expected("an integer dtype", of="target of CrossEntropyLoss", got=got, do="give the index of each row's class"))
    if not logits.ndim or logits.shape[:-1] != target.shape or not logits.shape[-1]:
        got = f"{list(target.shape)} for logits {list(logits.shape)}"
        do = "give logits [*, vocabulary], target [*]"
        raise ShapeError(expected("a target for each row of logits", of="target of CrossEntropyLoss", got=got, do=do))


def _check_targets(target: Tensor, counted: Tensor, vocabulary: int) -> None:
    wrong = counted & ((target < 0) | (target >= vocabulary))
    if wrong.any():
        got = int(target[wrong][0])
        do = "pass ignore_index for rows that do not count"
        raise ArgumentError(expected(f"indices from 0 to {vocabulary - 1}", of="target of CrossEntropyLoss", got=got, do=do))
