"""Newton-Schulz iterations by NVIDIA's names: against the formula in float64, alone and in two processes, and what NVIDIA's own package asks its
kernel for."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_group import check, run_jobs
from te_client import package, relative_error

from fusible.compat import te_functions
from fusible.errors import ArgumentError, DTypeError, ShapeError

EPS32, EPS_BF16 = 2.0**-23, 2.0**-8
SIZE = 2
SETS = ("simple", "quintic", "polar_express", "cans", "aol")
WIDE, TALL = (12, 20), (20, 12)
LAYOUTS = [(shape, dim, mode) for shape in (WIDE, TALL) for dim, mode in ((None, "duplicated"), (0, "duplicated"), (1, "duplicated"))] + [
    (WIDE, 1, "distributed"),
    (TALL, 0, "distributed"),
    ((16, 16), 0, "distributed"),
    ((16, 16), 1, "distributed"),
]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Singular values from 0.1 to 0.7: past 1 some of the polynomials grow without end."""
    generator = torch.Generator().manual_seed(sum(shape))
    least = min(shape)
    u, v = (torch.linalg.qr(torch.randn(size, least, generator=generator, dtype=torch.float64)).Q for size in shape)
    return (u @ torch.diag(torch.linspace(0.1, 0.7, least, dtype=torch.float64)) @ v.mT).to(dtype)


def formula(x: torch.Tensor, triples: Any) -> torch.Tensor:
    """In float64, on the whole matrix, of which the smaller side is multiplied with itself."""
    y = x.double() if x.shape[0] <= x.shape[1] else x.double().mT
    for a, b, c in triples:
        gram = y @ y.mT
        y = a * y + b * gram @ y + c * gram @ gram @ y
    return y if x.shape[0] <= x.shape[1] else y.mT


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_one_process_computes_the_formula(alone_in_a_group: None, name: str, dtype: torch.dtype) -> None:
    context = te_functions.CusolverMpCtx(dist.group.WORLD)
    triples = te_functions.get_coefficients(7, name)
    for function, shape in ((te_functions.newton_schulz, WIDE), (te_functions.newton_schulz_tp, WIDE), (te_functions.newton_schulz_tp, TALL)):
        x = matrix(shape, dtype)
        wanted = formula(x, triples)
        function(x, context, 7, triples)
        # Each iteration is three products of at most 20 terms; the first polynomials' slopes, of at most 9, make errors larger, the last ones
        # smaller.
        assert x.dtype == dtype and relative_error(x, wanted) <= 7 * 3 * 20 * EPS32 + (EPS_BF16 if dtype == torch.bfloat16 else 0)


def test_the_matrix_becomes_orthogonal(alone_in_a_group: None) -> None:
    context = te_functions.CusolverMpCtx(None)
    x = matrix(WIDE)
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    te_functions.newton_schulz(x, context, 10, te_functions.get_coefficients(10, "polar_express"))
    assert relative_error(x, u @ v) <= 2.0**-16
    loose = matrix(WIDE)
    te_functions.newton_schulz(loose, context)  # Muon's default brings singular values near 1, not to it
    spread = torch.linalg.svdvals(loose)
    assert 0.6 < spread.min() and spread.max() < 1.3


def test_coefficients_end_as_their_sets_do() -> None:
    five = te_functions.get_coefficients(5)
    assert te_functions.get_coefficients(7) == five + five[:2] and len(set(five)) == 5
    express = te_functions.get_coefficients(10, "polar_express")
    assert express[7] == express[8] == express[9] == (1.875, -1.25, 0.375)
    assert list(te_functions.get_coefficient_iterator(3, [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)], "repeat_last"))[1:] == [(4.0, 5.0, 6.0)] * 2


def of_two(rank: int) -> dict[str, torch.Tensor]:
    """What a process has after each layout of a matrix among two."""
    results, triples = {}, te_functions.get_coefficients(5)
    context = te_functions.CusolverMpCtx(dist.group.WORLD)
    for shape, dim, mode in LAYOUTS:
        x = matrix(shape)
        mine = x if dim is None else x.chunk(SIZE, dim)[rank].contiguous()
        te_functions.newton_schulz_tp(mine, context, 5, triples, dim, mode)
        results[f"{shape} {dim} {mode}"] = mine
    plain = matrix(WIDE).chunk(SIZE, 1)[rank].contiguous()
    te_functions.newton_schulz(plain, context, 5, triples)
    results["plain"] = plain
    uneven = torch.zeros(3, 5)
    with pytest.raises(ShapeError, match="the larger dimension of x of newton_schulz_tp: expected a multiple of 2 processes, got 5"):
        te_functions.newton_schulz_tp(uneven, context)
    return results


def of_nvidias(rank: int) -> dict[str, torch.Tensor]:
    """The same by NVIDIA's functions, whose kernel is the formula here, on the columns of each process."""
    with package() as te, pytest.MonkeyPatch.context() as patch:
        import transformer_engine.pytorch.optimizers.newton_schulz as theirs

        def kernel(pointer: int, m: int, n: int, x: torch.Tensor, iterations: int, flat: list[float]) -> None:
            parts = [torch.empty_like(x) for _ in range(SIZE)]
            dist.all_gather(parts, x)
            whole = torch.cat(parts, 1)
            assert whole.shape == (m, n) and m <= n and len(flat) == 3 * iterations
            triples = [tuple(flat[at : at + 3]) for at in range(0, len(flat), 3)]
            x.copy_(formula(whole, triples).chunk(SIZE, 1)[rank])

        made = {"cusolvermp_ctx_create": lambda *_: 1, "cusolvermp_ctx_destroy": lambda _: None}
        patch.setattr(theirs, "tex", types.SimpleNamespace(newton_schulz=kernel, **made))
        patch.setattr(theirs, "_get_nccl_comm_ptr", lambda group: 1)
        context = te.CusolverMpCtx(dist.group.WORLD)
        results = {}
        for shape, dim, mode in LAYOUTS:
            x = matrix(shape)
            mine = x if dim is None else x.chunk(SIZE, dim)[rank].contiguous()
            te.newton_schulz_tp(mine, context, partition_dim=dim, tp_mode=mode)
            results[f"{shape} {dim} {mode}"] = mine
        plain = matrix(WIDE).chunk(SIZE, 1)[rank].contiguous()
        te.newton_schulz(plain, context)
        return {**results, "plain": plain}


def test_two_processes_compute_the_formula_in_every_layout_of_nvidias(tmp_path: Path) -> None:
    parts = run_jobs(tmp_path, [("ours", of_two, ()), ("nvidias", of_nvidias, ())], SIZE)
    triples = te_functions.get_coefficients(5)
    found = {of: check(parts, of) for of in ("ours", "nvidias")}
    bound = 5 * 3 * 20 * EPS32
    for shape, dim, mode in LAYOUTS:
        name = f"{shape} {dim} {mode}"
        for of in ("ours", "nvidias"):
            each = [part[name] for part in found[of]]
            wanted = formula(matrix(shape), triples)
            if shape[0] == shape[1] and dim == 0:
                wanted = formula(matrix(shape).mT, triples).mT
            if dim is None:
                assert torch.equal(each[0], each[1]), name
                each = each[:1]
            assert relative_error(torch.cat(each, dim or 0), wanted) <= bound, (of, name)
    plain = [torch.cat([part[of]["plain"] for part in parts], 1) for of in ("ours", "nvidias")]
    assert all(relative_error(x, formula(matrix(WIDE), triples)) <= bound for x in plain)


REFUSED = {
    "tall": (lambda c: te_functions.newton_schulz(torch.zeros(3, 2), c), ShapeError, "expected at most as many rows as columns, got"),
    "three dimensions": (lambda c: te_functions.newton_schulz(torch.zeros(1, 2, 2), c), ShapeError, "newton_schulz: expected a contiguous matrix"),
    "strides": (lambda c: te_functions.newton_schulz_tp(torch.zeros(2, 4).mT, c), ShapeError, "x of newton_schulz_tp: expected a contiguous matrix"),
    "half": (lambda c: te_functions.newton_schulz(torch.zeros(2, 2).half(), c), DTypeError, "x of newton_schulz: expected torch.float32"),
    "triples": (lambda c: te_functions.newton_schulz(torch.zeros(2, 2), c, 2, [(1.0, 2.0, 3.0)]), ArgumentError, "expected 2 triples (a, b, c)"),
    "pairs": (lambda c: te_functions.newton_schulz(torch.zeros(2, 2), c, 1, [(1.0, 2.0)]), ArgumentError, "1 triples (a, b, c)"),
    "a set": (lambda c: te_functions.get_coefficients(3, "septic"), ArgumentError, "one of simple, quintic, polar_express, cans, aol"),
    "a mode": (lambda c: te_functions.newton_schulz_tp(torch.zeros(2, 2), c, tp_mode="shared"), ArgumentError, "'duplicated' or 'distributed'"),
    "no triples": (lambda c: te_functions.get_coefficient_iterator(3, []), ArgumentError, "at least one triple"),
    "the smaller side": (
        lambda c: te_functions.newton_schulz_tp(torch.zeros(2, 4), c, partition_dim=0, tp_mode="distributed"), ShapeError, "expected the larger"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(alone_in_a_group: None, name: str) -> None:
    make, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as raised:
        make(te_functions.CusolverMpCtx(dist.group.WORLD))
    assert sentence in str(raised.value) and ": expected " in str(raised.value)


def test_a_context_is_of_a_group_that_is_there(alone_in_a_group: None) -> None:
    context = te_functions.CusolverMpCtx(dist.group.WORLD)
    assert (context.nranks, context.rank, context.group) == (1, 0, dist.group.WORLD)
    context.destroy()
    x = torch.eye(2)
    with pytest.raises(ArgumentError, match="CusolverMpCtx of newton_schulz: expected a context in use, got one that is destroyed"):
        te_functions.newton_schulz(x, context)
    assert torch.equal(x, torch.eye(2))
    dist.destroy_process_group()
    try:
        with pytest.raises(ArgumentError, match=r"CusolverMpCtx: expected torch\.distributed with a process group"):
            te_functions.CusolverMpCtx(None)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
