"""Every op and every module of the table against float64: forward and all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from ops_table import SIDED, TABLE, Record
from ops_tolerance import assert_close, assert_honest
from torch import Tensor as TorchTensor

from fusible import Dropout, nvte, ops
from fusible.compute_pipeline import ComputePipeline, PlanRequest, run_backward, run_forward, run_inference
from fusible.fusions import epoch
from fusible.nvte import DType, Sequences, Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.ops.messages import Communicates

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS: tuple[tuple[int, ...], ...] = ((13,), (1,), (0,), (), (5, 1, 0, 9))
"""The sequences of a batch: one of a length that is a multiple of nothing, a single token, no token, no sequence, several with an empty one."""

RECORDS = [pytest.param(record, id=record.name) for record in TABLE.values()]
DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in FLOATS]


def _random(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> TorchTensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _parameters(record: Record, generator: torch.Generator, dtype: torch.dtype) -> dict[str, TorchTensor]:
    return {name: _random(generator, shape, dtype) / shape[-1] ** (len(shape) / 2 - 0.5) for name, shape in record.shapes(record.width).items()}


def _layouts(generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, TorchTensor]]:
    """A tensor as it comes, one whose memory order is not its dimension order, one with gaps, and one that repeats a single row."""
    yield "contiguous", _random(generator, (tokens, width), dtype)
    yield "transposed", _random(generator, (width, tokens), dtype).t()
    yield "with gaps", _random(generator, (tokens, 2 * width + 1), dtype)[:, 1::2]
    yield "expanded", _random(generator, (1, width), dtype).expand(tokens, width)


def _reference(
    record: Record, x: TorchTensor, parameters: Mapping[str, TorchTensor], dy: TorchTensor, lengths: Sequence[int]
) -> tuple[TorchTensor, TorchTensor, dict[str, TorchTensor]]:
    x = x.double().requires_grad_()
    leaves = {name: p.double().requires_grad_() for name, p in parameters.items()}
    y = record.reference(x, leaves, lengths)
    grads = torch.autograd.grad(y, [x, *leaves.values()], dy.double())
    return y.detach(), grads[0], dict(zip(leaves, grads[1:], strict=True))


def _as_used(ops_: Sequence[Op], parameters: Mapping[str, TorchTensor], activation: torch.dtype) -> dict[str, TorchTensor]:
    """The values that the product sees: an op that asks for a type of a parameter rounds it to the activations' precision."""
    asked = {name for op in ops_ for name in op.arg_names if getattr(op, f"{name}_dtype") is not None}
    return {name: p.to(activation) if name in asked else p for name, p in parameters.items()}


def _given(ops_: Sequence[Op], lengths: Sequence[int]) -> dict[str, Any]:
    if not any("sequences" in op.call_inputs for op in ops_):
        return {}
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return {"sequences": Sequences(Tensor(starts, DType.Int32), len(lengths), max(lengths, default=0), False)}


HELD = [
    pytest.param(record, dtype, held, id=f"{record.name}-{str(dtype)[6:]}{'' if held is dtype else '-fp32 parameters'}")
    for record in TABLE.values()
    for dtype in FLOATS
    for held in ({dtype, torch.float32} if record.parameters else {dtype})
]


@pytest.mark.parametrize(("record", "dtype", "held"), sorted(HELD, key=lambda p: str(p.id)))
def test_op_agrees_with_float64(record: Record, dtype: torch.dtype, held: torch.dtype) -> None:
    """``held``: the dtype of the parameters, that of the activations ``dtype`` or fp32."""
    generator = torch.Generator().manual_seed(11)
    for lengths in LENGTHS:
        tokens = sum(lengths)
        for layout, x in list(_layouts(generator, tokens, record.width, dtype))[: None if tokens > 1 else 1]:
            parameters = _parameters(record, generator, held)
            made = record.make({name: make_nvte_tensor(p) for name, p in parameters.items()}, record.width)
            activation = nvte.nvte_dtype(dtype)
            args = tuple(tuple((arg.dtype, True) for arg in op.args) for op in made)
            request = PlanRequest(None, activation, record.width, True, args, tuple(True for _ in made), False, epoch())
            plan = ComputePipeline(made).plan(request)
            given = _given(made, lengths)
            values = [arg for op in made for arg in op.args]
            assert len(plan.segments) == 1
            result = run_forward(plan, plan.segments[0].forward[0], Tensor(x, activation), values, given, {})
            # What comes back from a loss may lie in memory in any order, as x may.
            dy = next(dy for kind, dy in _layouts(generator, tokens, result.y.shape[-1], dtype) if kind == layout)
            back = run_backward(plan, plan.segments[0].backward[0], result.contexts, Tensor(dy, activation), given, {})
            used = _as_used(made, parameters, dtype)
            y, dx, dparameters = _reference(record, x, used, dy, lengths)
            where = f"{record.name}, {layout}, sequences {lengths}"
            length, roundings = record.length, record.roundings
            inferred, _ = run_inference(plan, plan.inferred[0], Tensor(x, activation), values, given, {})
            for what, got, wanted in (("y", result.y, y), ("inferred y", inferred, y), ("dx", back.dx, dx)):
                assert got is not None
                assert_honest(f"{where}: {what}", got)
                assert_close(f"{where}: {what}", got.data, wanted, dtype, length, roundings)
            names = [name for op in made for name in op.arg_names]
            grads = [grad for grads in back.grads for grad in grads]
            for name, grad in zip(names, grads, strict=True):
                assert grad is not None
                assert_honest(f"{where}: d{name}", grad)
                assert_close(f"{where}: d{name}", grad.data, dparameters[name], held, length + tokens, roundings if held is dtype else 1)


FORMS = ("tokens", "batch", "batch with gaps", "seq_lens")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_module_agrees_with_float64(record: Record, dtype: torch.dtype, form: str) -> None:
    """In the three forms of the input, with 3-D ones also where the batch cannot be viewed as a matrix."""
    generator = torch.Generator().manual_seed(12)
    module = record.module(record.width, dtype)
    for (_, parameter), value in zip(module.named_parameters(), _parameters(record, generator, dtype).values(), strict=True):
        parameter.data = value
    for batch, seq in ((3, 5), (0, 4), (2, 0), (1, 1)):
        tokens = batch * seq
        seq_lens, lengths = None, [seq] * batch
        if form == "batch":
            x = _random(generator, (batch, seq, record.width), dtype)
        elif form == "batch with gaps":
            x = _random(generator, (seq, batch, 2 * record.width), dtype).transpose(0, 1)[..., ::2]
        else:
            x = _random(generator, (tokens, record.width), dtype)
            lengths = [tokens]
            if form == "seq_lens":
                lengths = [tokens - tokens // 3, 0, tokens // 3]
                seq_lens = torch.tensor(lengths, dtype=torch.int32)
        x.requires_grad_()
        module.zero_grad()
        y = module(x, seq_lens)
        dy = _random(generator, y.shape, dtype)
        y.backward(dy)
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        flat = x.detach().reshape(tokens, record.width)
        wanted, dx, dparameters = _reference(record, flat, parameters, dy.reshape(tokens, dy.shape[-1]), lengths)
        where = f"{record.name}, {form} {list(x.shape)}"
        assert y.shape[:-1] == x.shape[:-1] and x.grad is not None
        with torch.no_grad():
            inferred = module(x, seq_lens)
        for what, got, reference in (("y", y.detach(), wanted), ("inferred y", inferred, wanted), ("dx", x.grad, dx)):
            assert_close(f"{where}: {what}", got.reshape(reference.shape), reference, dtype, record.length, record.roundings)
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert_close(f"{where}: d{name}", parameter.grad, dparameters[name], dtype, record.length + tokens, record.roundings)


def test_the_table_covers_every_op() -> None:
    abstract = {ops.Op, ops.Activation}
    # They take a side input with rows of its own: tests/unit/pytorch/test_grouped_linear.py, test_attention_scores.py, test_mixture_of_experts.py.
    elsewhere = {ops.GroupedMMT, ops.CrossAttention, ops.RouteTokens, ops.DispatchTokens, ops.CombineTokens}
    classes = {c for name in ops.__all__ if isinstance(c := getattr(ops, name), type) and issubclass(c, Op)} - abstract - elsewhere
    made = {type(op) for record in (*TABLE.values(), *SIDED.values()) for op in record.make(_Anything(), record.width)}
    of_several_processes = {c for c in classes if issubclass(c, Communicates)}  # tests/integration: test_parallel_linear, test_layouts
    assert classes - of_several_processes <= made


class _Anything(dict):
    def __missing__(self, name: str) -> Tensor:
        return make_nvte_tensor(torch.zeros(2, 2) if name == "weight" else torch.zeros(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_keeps_a_share_and_sends_the_gradient_the_same_way(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module, p = Dropout(0.3), 0.3
    x = (torch.rand(97, 103) + 0.5).to(dtype).requires_grad_()
    y = module(x)
    kept = y != 0
    # 9991 draws: six standard deviations.
    assert abs(kept.double().mean().item() - (1 - p)) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    dy = torch.randn(x.shape).to(dtype)
    y.backward(dy)
    assert x.grad is not None
    assert_close("y", y.detach(), x.detach().double() * kept / (1 - p), dtype)
    assert_close("dx", x.grad, dy.double() * kept / (1 - p), dtype)
    assert not torch.equal(module(x) != 0, kept)
