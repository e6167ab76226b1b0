"""Newton-Schulz iterations: the nearest matrix with orthonormal rows, by products alone, of a matrix that processes share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["CusolverMpCtx", "get_coefficient_iterator", "get_coefficients", "newton_schulz", "newton_schulz_tp"]

Coefficients = tuple[float, float, float]

_SETS: dict[str, tuple[Coefficients, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""By name: ``(a, b, c)`` of successive iterations. Muon's (``"simple"``, ``"quintic"``), Polar Express (arXiv:2505.16932, divided by its safety
factor), CANS (arXiv:2506.10935), and those for a matrix in AOL's scaling."""
_ENDLESS = ("polar_express", "cans")
"""The sets whose last iteration is repeated, as it converges; the others begin again."""


def get_coefficient_iterator(
    steps: int, coefficient_sets: Sequence[Coefficients], mode: Literal["cycle", "repeat_last"] = "cycle"
) -> Iterator[Coefficients]:
    """``steps`` of the triples: after the last, those from the first on (``"cycle"``), or the last again (``"repeat_last"``). Raises
    ``ArgumentError`` for another mode, and for no triples."""
    if not coefficient_sets:
        raise ArgumentError(expected("at least one triple", of="coefficient_sets of get_coefficient_iterator", got="none", do="give some"))
    if mode not in ("cycle", "repeat_last"):
        do = "name one of these"
        raise ArgumentError(expected("'cycle' or 'repeat_last'", of="mode of get_coefficient_iterator", got=repr(mode), do=do))
    endless = itertools.cycle(coefficient_sets) if mode == "cycle" else itertools.chain(coefficient_sets, itertools.repeat(coefficient_sets[-1]))
    return itertools.islice(endless, steps)


def get_coefficients(steps: int, coefficient_type: str = "quintic") -> list[Coefficients]:
    """The triples ``(a, b, c)`` of ``steps`` iterations: ``"simple"``, ``"quintic"``, ``"polar_express"``, ``"cans"`` or ``"aol"``."""
    if coefficient_type not in _SETS:
        wanted = f"one of {', '.join(_SETS)}"
        raise ArgumentError(expected(wanted, of="coefficient_type of get_coefficients", got=repr(coefficient_type), do="name one of these"))
    return list(get_coefficient_iterator(steps, _SETS[coefficient_type], "repeat_last" if coefficient_type in _ENDLESS else "cycle"))


class CusolverMpCtx:
    """The processes that share a matrix out: those of ``group``, a group of ``torch.distributed`` over any transport. The name is NVIDIA's; there is
    no cuSOLVERMp behind it here, and making one sends nothing. After ``destroy`` it serves no more."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            do = "call torch.distributed.init_process_group first, for one process too"
            raise ArgumentError(expected("torch.distributed with a process group", of="CusolverMpCtx", got="none", do=do))
        self._group: Any = dist.group.WORLD if group is None else group
        self.nranks, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if self.rank < 0:
            raise ArgumentError(expected("a group with this process in it", of="CusolverMpCtx", got="one without", do="make it where the group is"))

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes."""
        if self._group is None:
            raise ArgumentError(expected("a context in use", of="CusolverMpCtx", got="one that is destroyed", do="make another"))
        return self._group  # type: ignore[no-any-return]

    def destroy(self) -> None:
        """Let go of the group."""
        self._group = None


def newton_schulz(x: torch.Tensor, ctx: CusolverMpCtx, num_iterations: int = 5, coefficients: Sequence[Coefficients] | None = None) -> None:
    """Iterate ``X <- a X + b (X X^T) X + c (X X^T)^2 X`` in place, in fp32, rounded to ``x``'s type at the end.

    ``x``: this process's columns of the matrix X ``[m, n]``, ``[m, n / ctx.nranks]``, fp32 or bf16, contiguous; ``m <= n``. ``coefficients``: a
    triple ``(a, b, c)`` for each iteration, by default ``get_coefficients(num_iterations)``. The singular values of X must be at most about 1, and go
    towards 1: divide X by its norm before. Nothing is differentiated. Raises ``ArgumentError``, ``DTypeError`` or ``ShapeError``, and writes nothing
    then.
    """
    triples = _triples(num_iterations, coefficients, "newton_schulz")
    _check_matrix(x, "newton_schulz")
    rows, columns = x.shape[0], x.shape[1] * ctx.nranks
    if rows > columns:
        do = "use newton_schulz_tp, which takes the transpose"
        raise ShapeError(expected("at most as many rows as columns", of="x of newton_schulz", got=f"{rows} x {columns}", do=do))
    with torch.no_grad():
        x.copy_(_iterated(x, ctx, triples))


def _iterated(x: torch.Tensor, ctx: CusolverMpCtx, triples: Sequence[Coefficients]) -> torch.Tensor:
    """The columns of a process after all iterations, fp32. One sum over the processes for each: of ``X X^T``, which all need whole."""
    group, y = ctx.group, x.float()
    for a, b, c in triples:
        gram = y @ y.mT
        dist.all_reduce(gram, group=group)
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y


def newton_schulz_tp(
    x: torch.Tensor,
    ctx: CusolverMpCtx,
    num_iterations: int = 5,
    coefficients: Sequence[Coefficients] | None = None,
    partition_dim: int | None = None,
    tp_mode: Literal["duplicated", "distributed"] = "duplicated",
) -> None:
    """``newton_schulz``, in place, of a matrix of any shape in the layout of tensor parallelism; of one with more rows than columns, the transpose's.

    ``partition_dim``: None where each process has the whole of ``x``; else the dimension along which the processes have equal parts, which are
    gathered, computed together and given back (``tp_mode="duplicated"``), or computed where they are (``"distributed"``, along the larger dimension
    alone). The larger dimension of a matrix that is gathered, or whole, is a multiple of the processes.
    """
    triples = _triples(num_iterations, coefficients, "newton_schulz_tp")
    _check_partition(partition_dim, tp_mode)
    _check_matrix(x, "newton_schulz_tp")
    sizes = [size * (ctx.nranks if dim == partition_dim else 1) for dim, size in enumerate(x.shape)]
    tall = sizes[0] > sizes[1]
    with torch.no_grad():
        if partition_dim is not None and tp_mode == "distributed":
            if sizes[0] != sizes[1] and partition_dim != int(not tall):
                do = "share it out along the larger dimension, or pass tp_mode='duplicated'"
                got = f"dimension {partition_dim} of {sizes[0]} x {sizes[1]}"
                raise ShapeError(expected("the larger", of="partition_dim of newton_schulz_tp with tp_mode='distributed'", got=got, do=do))
            flipped = partition_dim == 0
            y = _iterated(x.mT if flipped else x, ctx, triples)
            x.copy_(y.mT if flipped else y)
            return
        if max(sizes) % ctx.nranks:
            wanted, of = f"a multiple of {ctx.nranks} processes", "the larger dimension of x of newton_schulz_tp"
            raise ShapeError(expected(wanted, of=of, got=max(sizes), do="pad it with zeros, which stay zero"))
        whole = x if partition_dim is None else _gathered(x, ctx, partition_dim)
        wide = whole.mT if tall else whole
        y = _iterated(wide.chunk(ctx.nranks, 1)[ctx.rank], ctx, triples)
        # All processes take the bytes that one computed: what each has whole stays the same on every machine.
        whole = _gathered(y.to(x.dtype), ctx, 1)
        whole = whole.mT if tall else whole
        x.copy_(whole if partition_dim is None else whole.chunk(ctx.nranks, partition_dim)[ctx.rank])


def _gathered(x: torch.Tensor, ctx: CusolverMpCtx, dim: int) -> torch.Tensor:
    """The parts of all processes side by side."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(ctx.nranks)]
    dist.all_gather(parts, x, group=ctx.group)
    return torch.cat(parts, dim)


def _triples(iterations: int, coefficients: Sequence[Coefficients] | None, function: str) -> Sequence[Coefficients]:
    triples = get_coefficients(iterations) if coefficients is None else coefficients
    if len(triples) != iterations or any(len(triple) != 3 for triple in triples):
        got = f"{len(triples)} of {sorted({len(triple) for triple in triples})} numbers"
        raise ArgumentError(expected(f"{iterations} triples (a, b, c)", of=f"coefficients of {function}", got=got, do="give one an iteration"))
    return triples


def _check_matrix(x: torch.Tensor, function: str) -> None:
    if x.ndim != 2 or not x.is_contiguous():
        got = f"{list(x.shape)} with strides {x.stride()}"
        raise ShapeError(expected("a contiguous matrix", of=f"x of {function}", got=got, do="reshape it, or call contiguous()"))
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise DTypeError(expected("torch.float32 or torch.bfloat16", of=f"x of {function}", got=str(x.dtype), do="cast it"))


def _check_partition(dim: int | None, mode: str) -> None:
    if dim not in (None, 0, 1) or mode not in ("duplicated", "distributed"):
        got, do = f"{dim} and {mode!r}", "name such"
        wanted = "None, 0 or 1, and 'duplicated' or 'distributed'"
        raise ArgumentError(expected(wanted, of="partition_dim and tp_mode of newton_schulz_tp", got=got, do=do))
