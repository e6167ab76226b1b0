"""What is checked in each process of a group of two: ``check(rank)`` raises where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import NVFP4, RECIPES

from fusible import autocast, tex
from fusible.errors import ArgumentError, NotServedError, ShapeError
from fusible.ops import MMT, Add
from fusible.pytorch import ops as te_ops
from fusible.pytorch import reduce_sequence_parallel_gradients
from fusible.quantized import DelayedScaling, Float8CurrentScaling

Check = Callable[[int], Any]
JOBS: dict[str, Check] = {}


def job(check: Check) -> Check:
    JOBS[check.__name__] = check
    return check


def mine(rank: int, *shape: int) -> torch.Tensor:
    """Small integers, other ones in each process; their sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(40 + rank)).float()


def both(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return mine(0, *shape), mine(1, *shape)


def called(op: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = op(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


@job
def all_gather_joins_rows_and_sums_its_gradient(rank: int) -> None:
    y, dx = called(te_ops.AllGather(), mine(rank, 3, 2, 5), mine(rank, 6, 2, 5))
    assert torch.equal(y, torch.cat(both(3, 2, 5))) and torch.equal(dx, sum(both(6, 2, 5)).chunk(2)[rank])  # type: ignore[union-attr]


@job
def reduce_scatter_is_its_transpose(rank: int) -> None:
    y, dx = called(te_ops.ReduceScatter(dist.group.WORLD), mine(rank, 6, 5), mine(rank, 3, 5))
    assert torch.equal(y, sum(both(6, 5)).chunk(2)[rank]) and torch.equal(dx, torch.cat(both(3, 5)))  # type: ignore[union-attr]


@job
def all_reduce_sums_and_takes_the_mean_or_its_own_gradient(rank: int) -> None:
    x, dy = mine(rank, 3, 5), mine(rank, 3, 5) + 1
    y, dx = called(te_ops.AllReduce(), x, dy)
    assert torch.equal(y, sum(both(3, 5))) and torch.equal(dx, sum(both(3, 5)) / 2 + 1)  # type: ignore[arg-type]
    assert torch.equal(called(te_ops.AllReduce(reduce_in_backward=False), x, dy)[1], dy)
    same = torch.full((3, 5), 0.1)
    assert torch.equal(called(te_ops.AllReduce(), x, same)[1], same)
    assert torch.equal(x, mine(rank, 3, 5)), "the input was written to"


@job
def primitives_take_any_dtype_and_memory_order(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
        a, b = (x.abs().to(dtype) for x in both(4, 6))
        x = (a, b)[rank].t().contiguous().t()
        assert torch.equal(tex.prim.all_gather(x), torch.cat([a, b]))
        assert torch.equal(tex.prim.reduce_scatter(x), (a + b).chunk(2)[rank]) and torch.equal(tex.prim.all_reduce(x), a + b)
        assert torch.equal(tex.prim.all_reduce(x, None, "max"), torch.maximum(a, b)) and torch.equal(x, (a, b)[rank])
    assert tex.prim.all_gather(torch.zeros(0, 3)).shape == (0, 3)
    large = torch.full((2,), 60000.0, dtype=torch.float16)
    assert torch.equal(tex.prim.all_reduce(large, None, "mean"), large), "a sum in fp16 would have been infinite"


@job
def wrong_calls_are_refused_before_anything_is_sent(rank: int) -> None:
    for call, error, message in (
        (lambda: tex.prim.reduce_scatter(torch.zeros(3, 2)), ShapeError, "x of prim.reduce_scatter: expected a first dimension that 2 divides"),
        (lambda: tex.prim.all_gather(torch.zeros(())), ShapeError, "at least 1 dimension"),
        (lambda: tex.prim.all_reduce(torch.zeros(2), None, "product"), ArgumentError, "one of sum, max, mean"),
        (lambda: te_ops.ReduceScatter()(torch.zeros(3, 2)), ShapeError, "a first dimension that 2 divides"),
        (
            lambda: te_ops.BasicLinear(4, 5, tensor_parallel_mode="column"),
            ShapeError,
            "out_features: expected a multiple of 2.*, got 5",
        ),
        (lambda: te_ops.BasicLinear(5, 4, tensor_parallel_mode="row"), ShapeError, "BasicLinear's in_features: expected .*, got 5"),
        (lambda: te_ops.Linear(5, 4, tensor_parallel_mode="row"), ShapeError, "Linear's in_features: expected .*, got 5"),
        (lambda: te_ops.Bias(5, tensor_parallel=True), ShapeError, "Bias' size: expected .*, got 5"),
        (lambda: te_ops.BasicLinear(4, 4, tensor_parallel_mode="both"), ArgumentError, "None, 'column' or 'row'"),
        (lambda: te_ops.BasicLinear(4, 4, tensor_parallel_mode="row", userbuffers_options={"comm_name": "fc2"}), NotServedError, "no overlap"),
        (lambda: te_ops.BasicLinear(4, 4, tensor_parallel_mode="row", sequence_parallel=True)(torch.zeros(3, 2)), ShapeError, "that 2 divides"),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert ": expected " in str(caught.value) and "\n" not in str(caught.value)


@job
def a_group_of_one_is_no_group(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(2)]
    options: dict[str, Any] = {"tensor_parallel_mode": "row", "tensor_parallel_group": alone[rank], "sequence_parallel": True}
    layer = te_ops.Linear(4, 5, **options)
    assert [type(op.bound_op.op) for op in layer.basic_operations()] == [MMT, Add]
    te_ops.BasicLinear(4, 5, **options, userbuffers_options={"comm_name": "fc2"})
    x, dy = mine(rank, 3, 4), mine(rank, 3, 4)
    for op in (te_ops.AllGather(alone[rank]), te_ops.ReduceScatter(alone[rank]), te_ops.AllReduce(alone[rank])):
        y, dx = called(op, x, dy)
        assert torch.equal(y, x) and torch.equal(dx, dy)
    with pytest.raises(ArgumentError, match="a group that this process belongs to"):
        te_ops.AllGather(alone[1 - rank])


@job
def a_shared_sequence_is_kept_by_its_own_rows_and_in_8_bits(rank: int) -> None:
    """Between the passes: of x ``[8, 64]`` the 4 rows of the process, as bytes."""
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        layer = te_ops.BasicLinear(64, 32, tensor_parallel_mode="column", sequence_parallel=True)
        kept: list[torch.Tensor] = []

        def keep(t: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(t)
            return t

        with autocast(recipe=recipe), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layer(mine(rank, 4, 64).requires_grad_())
        assert [t.dtype for t in kept if t.shape == (4, 64)] == [torch.uint8] and not [t for t in kept if t.shape[0] == 8]


def gathered(calls: Sequence[tex.Call]) -> list[Any]:
    """The sorts of the tensors that are gathered, behind other calls or not."""
    return [call.request["x"] for call in calls if call.function in ("prim_all_gather", "prim_begin_all_gather")]


@job
def what_is_sent_of_a_tensor_with_one_scale_are_bytes(rank: int) -> None:
    for mode, width in (("column", 64), ("row", 32)):
        layer = te_ops.BasicLinear(64, 64, tensor_parallel_mode=mode, sequence_parallel=True)
        x = mine(rank, 4 if mode == "column" else 8, width).requires_grad_()
        with tex.record() as calls, autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
            y.backward(torch.ones_like(y))
        sent = gathered(calls)
        assert len(sent) == (2 if mode == "column" else 1) and set(sent) == {("cpu", torch.uint8)}


@job
def a_norm_before_a_column_layer_writes_what_is_sent(rank: int) -> None:
    """Under delayed and current scaling; the amax that the norm has observed is the group's all the same."""
    model = te_ops.Sequential(te_ops.RMSNorm(64), te_ops.BasicLinear(64, 64, tensor_parallel_mode="column", sequence_parallel=True))
    with torch.no_grad():
        model[0].weight.mul_(1 + rank)
    with autocast(recipe=DelayedScaling()):
        for _ in range(3):  # by then the weight's scale has settled, and its copy is kept
            model(mine(rank, 4, 64)).sum().backward()
        with tex.record() as calls:
            model(mine(rank, 4, 64))
    assert [call.function for call in calls if "quantize" in call.function or "norm" in call.function] == ["rmsnorm_fwd"]
    state = model.pipeline(0).scaling.current
    assert state is not None
    slot = state.forward.slots.index("1.x")
    scales = tex.prim.all_gather(state.forward.scale[slot : slot + 1])
    assert scales[0] == scales[1] != 1.0


class _Eager(te_ops.BasicOperation):
    """Hands its input on as the next operation wants it."""

    def op_forward(self, ctx: Any, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any) -> Any:
        assert next_op_input_quantizer is not None
        return next_op_input_quantizer(input_)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output


@job
def a_users_operation_before_a_column_layer_may_quantize_too(rank: int) -> None:
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        layer = te_ops.BasicLinear(64, 64, tensor_parallel_mode="column", sequence_parallel=True)
        found = []
        for model in (te_ops.Sequential(layer), te_ops.Sequential(_Eager(), layer)):
            for step in range(3):
                with autocast(recipe=recipe):
                    y = model(mine(rank, 4, 64) * (1 + 3 * rank))
                layer.weight.grad = None
                y.backward(mine(step, 8, 64)[:, :32])
            assert layer.weight.grad is not None
            found.append((y.detach(), layer.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@job
def rows_of_any_number_of_dimensions_are_shared_out_by_the_first(rank: int) -> None:
    for mode in ("column", "row"):
        layer = te_ops.Linear(64, 64, tensor_parallel_mode=mode, sequence_parallel=True)
        x = mine(rank, 6, 2, 64) if mode == "column" else mine(rank, 6, 2, 32)
        y, dx = called(layer, x, dy := torch.ones(12, 2, 32) if mode == "column" else torch.ones(3, 2, 64))
        flat, dflat = called(layer, x.flatten(0, 1), dy.flatten(0, 1))
        assert torch.equal(y, flat.view_as(y)) and torch.equal(dx, dflat.view_as(dx))


@job
def what_nobody_wants_the_gradient_of_costs_no_communication(rank: int) -> None:
    for mode, frozen, sent in (
        ("column", "x", ["prim_all_gather", "prim_begin_all_gather", "prim_end_collective"]),
        ("column", "weight", ["prim_all_gather", "prim_reduce_scatter"]),
        ("row", "x", ["prim_reduce_scatter", "prim_all_gather"]),
        ("row", "weight", ["prim_reduce_scatter", "prim_all_gather"]),
    ):
        layer = te_ops.BasicLinear(64, 64, tensor_parallel_mode=mode, sequence_parallel=True)
        layer.weight.requires_grad_(frozen != "weight")
        x = mine(rank, 4, 64 if mode == "column" else 32).requires_grad_(frozen != "x")
        with tex.record() as calls:
            layer(x).sum().backward()
        assert [call.function for call in calls if call.function.startswith("prim_") and call.function != "prim_cast"] == sent
        assert (x.grad is None) == (frozen == "x") and (layer.weight.grad is None) == (frozen == "weight")


@job
def nvfp4_scales_what_is_gathered_as_a_whole(rank: int) -> None:
    """Forward alone: gradients are rounded at random."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(32, 64, generator=generator), torch.randn(64, 64, generator=generator)
    x[0, ::32] = weight[::32, 0] = 9.0
    whole, part = te_ops.BasicLinear(64, 64), te_ops.BasicLinear(64, 64, tensor_parallel_mode="column", sequence_parallel=True)
    with torch.no_grad():
        whole.weight.copy_(weight)
        part.weight.copy_(weight.chunk(2)[rank])
    with autocast(recipe=NVFP4):
        assert torch.equal(part(x.chunk(2)[rank]), whole(x).chunk(2, dim=1)[rank])


@job
def a_row_layer_saves_its_parameters_under_the_names_of_any_other(rank: int) -> None:
    layers = [te_ops.Linear(8, 6, tensor_parallel_mode=mode, sequence_parallel=s) for mode in (None, "column", "row") for s in (False, True)]
    names = [[name for name in layer.state_dict() if not name.endswith("._extra_state")] for layer in layers]
    assert all(of_layer == ["basic_ops.0.weight", "basic_ops.1.bias"] for of_layer in names), names
    row = layers[-1]
    assert row.weight.shape == (6, 4) and row.bias is not None and row.bias.shape == (6,) and layers[2].weight.shape == (3, 8)
    assert [type(op).__name__ for op in row.basic_ops] == ["BasicLinear", "Bias", "ReduceScatter"]
    assert te_ops.Linear(8, 6, bias=False, tensor_parallel_mode="row").bias is None


@job
def mxfp8_is_sent_in_bytes_where_blocks_lie_in_one_process(rank: int) -> None:
    """The numbers are those of the whole, up to the order of fp32 sums (of at most 320 products below 40, so to 1e-4 by far), also where scales are
    padded to 128 rows. Of x the process keeps its own rows, by columns."""
    for own in (32, 80, 160):
        x, dy = (torch.randn(2 * own, n, generator=torch.Generator().manual_seed(n)) for n in (64, 128))
        for mode, columns in (("column", slice(64 * rank, 64 * rank + 64)), ("row", slice(0, 128))):
            whole, part = te_ops.BasicLinear(64, 128), te_ops.BasicLinear(64, 128, tensor_parallel_mode=mode, sequence_parallel=True)
            with torch.no_grad():
                whole.weight.copy_(mine(0, 128, 64) / 16)
                part.weight.copy_(whole.weight.chunk(2, dim=0 if mode == "column" else 1)[rank])
            kept: list[torch.Tensor] = []

            def keep(t: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                kept.append(t)
                return t

            given = x.chunk(2)[rank] if mode == "column" else x.chunk(2, dim=1)[rank]
            with tex.record() as calls, autocast(recipe=RECIPES["mxfp8"]), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y, _ = called(part, given, dy[:, columns] if mode == "column" else dy.chunk(2)[rank])
            sent = gathered(calls)
            assert set(sent) == {("cpu", torch.float32 if own % 32 else torch.uint8)}
            assert mode == "row" or ([t.dtype for t in kept if t.shape == (own, 64)] == [torch.float32 if own % 32 else torch.uint8])
            with autocast(recipe=RECIPES["mxfp8"]):
                reference, _ = called(whole, x, dy)
            assert part.weight.grad is not None and whole.weight.grad is not None
            wanted = whole.weight.grad.chunk(2, dim=0 if mode == "column" else 1)[rank]
            torch.testing.assert_close(part.weight.grad, wanted, rtol=0, atol=1e-4)
            if mode == "column":
                torch.testing.assert_close(y, reference[:, columns], rtol=0, atol=1e-4)


class Slope(te_ops.BasicOperation):
    """``x * slope``, in plain torch, with a slope for each column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))

    def op_forward(self, ctx: Any, input_: Any, **_: Any) -> torch.Tensor:
        x = te_ops.maybe_dequantize(input_)
        ctx.save_for_backward(x)
        return x * self.slope

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * self.slope, [(grad_output * ctx.saved_tensors[0]).sum(0)]


PARTIAL = [0, 1, 2, 3, 7, 8, 9]
"""Of the list below: where the rows are shared out."""


def parallel_list(parallel: bool) -> te_ops.Sequential:
    """Every kind of parameter before, in and after what gathers and scatters rows; the first eight operations are in the sequence-parallel region."""
    torch.manual_seed(5)
    split = {"sequence_parallel": True}
    column = {"tensor_parallel_mode": "column", **split} if parallel else {}
    row = {"tensor_parallel_mode": "row", **split} if parallel else {}
    gather = te_ops.AllGather() if parallel else te_ops.Identity()
    return te_ops.Sequential(
        te_ops.LayerNorm(16), Slope(16), te_ops.Linear(16, 16), te_ops.Bias(16), te_ops.BasicLinear(16, 32, **column),
        te_ops.GELU(), te_ops.BasicLinear(32, 16, **row), te_ops.Bias(16), te_ops.RMSNorm(16), te_ops.BasicLinear(16, 16), gather, te_ops.RMSNorm(16),
    )  # fmt: skip


@job
def every_partial_gradient_is_marked_and_reduced(rank: int) -> None:
    whole, part = parallel_list(False), parallel_list(True)
    with torch.no_grad():
        for (name, p), q in zip(part.named_parameters(), whole.parameters(), strict=True):
            p.copy_(q if p.shape == q.shape else q.chunk(2, 0 if name.startswith("4.") else 1)[rank])
    x, dy = torch.randn(8, 16), torch.randn(8, 16)
    for name, parameter in [*whole.named_parameters(), *part.named_parameters()]:
        if name.startswith("3."):
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    whole(x).backward(dy)
    part(x.chunk(2)[rank]).backward(dy / 2)  # each process has all rows in the end: half of the loss
    for name, p in part.named_parameters():
        assert getattr(p, "sequence_parallel", False) is (int(name.split(".")[0]) in PARTIAL), name
    for p in part[3].parameters():  # Megatron's way of keeping a gradient
        p.main_grad, p.grad = p.grad, None  # type: ignore[union-attr]
    reduce_sequence_parallel_gradients(part)
    for (name, p), q in zip(part.named_parameters(), whole.named_parameters(), strict=True):
        got = p.main_grad if name.startswith("3.") else p.grad  # type: ignore[attr-defined]
        wanted: Any = q[1].grad
        if int(name.split(".")[0]) == 11:
            wanted = wanted / 2  # the other half is the other process's
        assert got is not None
        wanted = wanted if wanted.shape == got.shape else wanted.chunk(2, 0 if name.startswith("4.") else 1)[rank]
        # Products of up to 32 terms five layers deep, and sums over 8 rows in another order.
        assert (got - wanted).abs().max() <= 5 * 48 * torch.finfo(torch.float32).eps * (wanted.abs().max() + 1), name


@job
def marks_stay_where_parameters_are_made_or_named_by_hand(rank: int) -> None:
    norm = te_ops.LayerNorm(16, device="meta", sequence_parallel=True)
    norm(torch.randn(4, 16))
    assert not norm.weight.is_meta and norm.weight.sequence_parallel and norm.bias.sequence_parallel  # type: ignore[attr-defined]
    model = te_ops.Sequential(te_ops.RMSNorm(16), te_ops.BasicLinear(16, 32, tensor_parallel_mode="column", sequence_parallel=True))
    model[0].weight.sequence_parallel = False  # whoever says so has another owner in mind
    model(torch.randn(4, 16)).sum().backward()
    assert model[0].weight.sequence_parallel is False  # type: ignore[attr-defined]
    model[0].weight = torch.nn.Parameter(torch.ones(16))
    model(torch.randn(4, 16)).sum().backward()
    assert model[0].weight.sequence_parallel  # type: ignore[attr-defined]
    alone = te_ops.RMSNorm(16, sequence_parallel=True)
    alone(torch.full((2, 16), 1.0 + rank)).backward(torch.ones(2, 16))
    weight: Any = alone.weight
    gradient = weight.grad.clone()
    dist.all_reduce(gradient)
    reduce_sequence_parallel_gradients([weight], dist.group.WORLD)
    assert torch.equal(weight.grad, gradient)
