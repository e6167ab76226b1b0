"""What is sent between the processes of a group, counted and derived: for ``test_layouts``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import layout_models as models
import pytest
import torch
import torch.distributed as dist
from layout_models import Dimensions, along_tp, mesh_of

import fusible
from fusible import tex
from fusible.compute_pipeline import messages_of
from fusible.distributed import parallelize
from fusible.pytorch.engine.autocast import current_autocast
from fusible.pytorch.engine.shares import gradient_sums
from fusible.tex.backends.torch_backend import collectives
from fusible.tex.protocol import accumulator

Result = dict[str, Any]


@contextmanager
def counted() -> Iterator[Counter[tuple[str, int]]]:
    """The collectives that are called, each with the bytes of what is whole."""
    found: Counter[tuple[str, int]] = Counter()

    def counting(function: Callable[..., Any], name: str, place: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found[name, args[place].nbytes] += 1
            return function(*args, **options)

        return call

    made = dist.P2POp

    def passing(op: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if op is dist.isend:
            found["ring_shift", tensor.nbytes] += 1
        return made(op, tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_gather", counting(collectives._all_gather, "all_gather", 0))
        patch.setattr(collectives, "_reduce_scatter", counting(collectives._reduce_scatter, "reduce_scatter", 1))
        patch.setattr(collectives, "_all_reduce", counting(collectives._all_reduce, "all_reduce", 0))
        patch.setattr(dist, "all_reduce", counting(dist.all_reduce, "all_reduce", 0))  # of amaxes, when a quantizer asks for it
        patch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single, "all_to_all", 0))
        patch.setattr(dist, "P2POp", passing)
        yield found


def messages(kind: str, recipe: str, sequence: bool, dtype: torch.dtype, rank: int) -> Result:
    """Of a model laid out along ``tp``."""
    return _messages(parallelize(models.model(kind), along_tp(), sequence_parallel=sequence), recipe, dtype)


def messages_of_context(way: str, causal: bool, dtype: torch.dtype, rank: int) -> Result:
    """Of a model laid out along ``cp``."""
    gpt = models.model("mha")
    if not causal:
        for module in gpt.modules():
            if isinstance(module, fusible.DotProductAttention):
                vars(module).update(module.exchanged({b.op: b.op.with_(causal=False) for b in module.bound_ops()}))
    return _messages(parallelize(gpt, mesh_of(("cp", dist.get_world_size())), context_parallel=way), "fp32", dtype)


def messages_of_experts(dimensions: Dimensions, sequence: bool, rank: int) -> Result:
    """Of a model whose experts processes share out. How many rows go to each expert hangs on the tokens: what is derived is what processes send on
    average; all that is no token's is to the byte, message by message."""
    gpt = parallelize(models.model("moe"), mesh_of(*dimensions), sequence_parallel=sequence)
    x = torch.randn(models.BATCH, models.TOKENS, models.HIDDEN, requires_grad=True)
    with counted() as sent:
        y = gpt.body(x)
        y.backward(torch.ones_like(y))
    runner = gpt.body.pipeline(0)
    plan, rows = runner.plan(x.view(-1, models.HIDDEN), runner.parameters(), current_autocast(), True), models.BATCH * models.TOKENS
    derived = Counter((s.message.collective, s.message.nbytes) for of in ("forward", "backward") for s in messages_of(plan, of, rows))  # type: ignore[arg-type]
    shares = runner._shares
    assert shares is not None
    derived.update(("all_reduce", nbytes) for _, nbytes in gradient_sums(shares, [True] * len(shares)))
    exchanged, on_average = (
        torch.tensor(sum(nbytes * times for (of, nbytes), times in all_.items() if of == "all_to_all")) for all_ in (sent, derived)
    )
    dist.all_reduce(exchanged)
    assert exchanged == dist.get_world_size() * on_average, (sent, derived)
    others = [Counter({message: times for message, times in all_.items() if message[0] != "all_to_all"}) for all_ in (sent, derived)]
    assert others[0] == others[1], (others[0] - others[1], others[1] - others[0])
    return {}


def _messages(gpt: models.GPT, recipe: str, dtype: torch.dtype) -> Result:
    """What the first step of the blocks sends is what is derived of it, message by message: the bytes of all messages, by collective."""
    x = torch.randn(models.BATCH, models.TOKENS, models.HIDDEN, dtype=dtype, requires_grad=True)
    with fusible.autocast(enabled=models.RECIPES[recipe] is not None, recipe=models.RECIPES[recipe]):
        with counted() as sent:
            y = gpt.body(x)
            y.backward(torch.ones_like(y))
        runner = gpt.body.pipeline(0)
        plan = runner.plan(x.view(-1, models.HIDDEN), runner.parameters(), current_autocast(), True)
        text = gpt.body.explain(x)
    rows = models.BATCH * models.TOKENS
    derived = Counter((s.message.collective, s.message.nbytes) for of in ("forward", "backward") for s in messages_of(plan, of, rows))  # type: ignore[arg-type]
    shares = runner._shares
    derived.update(("all_reduce", nbytes) for _, nbytes in (gradient_sums(shares, [True] * len(shares)) if shares is not None else ()))
    assert sent == derived, (sent - derived, derived - sent)
    assert all(f"{nbytes:,} bytes" in text and collective in text for collective, nbytes in sent)
    return {
        name: sum(nbytes * times for (of, nbytes), times in sent.items() if of == name) for name in ("all_gather", "reduce_scatter", "all_reduce")
    }


def sums(rank: int) -> None:
    """And what is gathered: of every float, waited for or not. Processes send as many bytes as rings do, and add in fp32 what has 16 bits."""
    size = dist.get_world_size()
    for dtype, rows in product((torch.bfloat16, torch.float16, torch.float32, torch.float64), (0, 1, 3, 64)):
        parts = torch.stack([torch.randn(rows * size, 5, generator=torch.Generator().manual_seed(70 + r)).to(dtype) for r in range(size)])
        x = parts[rank].t().contiguous().t().requires_grad_()
        exact, absolute = parts.double().sum(0), parts.double().abs().sum(0)
        for name in ("all_gather", "all_reduce", "reduce_scatter"):
            with sent_by_exchange() as sent:
                y = getattr(tex.prim, name)(x)
                behind = tex.prim.end_collective(*getattr(tex.prim, f"begin_{name}")(x))
            assert torch.equal(y, behind) and y.dtype == dtype and torch.equal(x, parts[rank]) and not y.requires_grad
            inside = accumulator(dtype) if name == "reduce_scatter" or size == 2 else dtype
            bound = torch.finfo(dtype).eps / 2 * exact.abs() + (size - 1) * torch.finfo(inside).eps / 2 * absolute
            if name == "all_gather":
                assert torch.equal(y, parts.flatten(0, 1)) and sent == ([x.nbytes] * 2 if size == 2 else [])
            elif name == "all_reduce":
                assert ((y.double() - exact).abs() <= bound).all() and sent == ([x.nbytes] * 2 if size == 2 else [])
                least, most = (tex.prim.all_reduce(way * y.double(), None, "max") for way in (-1, 1))
                assert torch.equal(-least, most)
            else:
                own = slice(rank * rows, (rank + 1) * rows)
                assert ((y.double() - exact[own]).abs() <= bound[own]).all() and sent == [x.nbytes * (size - 1) // size] * 2
    whole = torch.arange(4 * size)
    assert torch.equal(tex.prim.reduce_scatter(whole), size * whole.chunk(size)[rank])
    assert torch.equal(tex.prim.all_reduce(whole), size * whole) and torch.equal(tex.prim.all_reduce(torch.tensor(1.0)), torch.tensor(float(size)))


@contextmanager
def sent_by_exchange() -> Iterator[list[int]]:
    """The bytes that each ``all_to_all`` sends to other processes."""
    sent: list[int] = []
    function = collectives._all_to_all

    def counting(came: torch.Tensor, x: torch.Tensor, *splits: list[int], **options: Any) -> Any:
        own = splits[1][dist.get_rank()] if splits else x.shape[0] // dist.get_world_size()
        sent.append(x.nbytes - own * x[:1].nbytes)
        return function(came, x, *splits, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_to_all", counting)
        yield sent
