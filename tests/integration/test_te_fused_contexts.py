"""Passes that were written for NVIDIA's operations, within a fused operation of ours: what they save is what our other pass reads, and the reverse.

The package's own operations stand for code that a user has written: each computes one pass of ours, in which it saves, or reads, what it does there.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from te_client import package
from te_op_draws import OPERATIONS, ROWS, WIDTH, Drawn
from te_public import sides

from fusible.errors import ArgumentError
from fusible.pytorch.ops import FusedOperation

PROCESSES = ("AllGather", "AllReduce", "ReduceScatter")
GROUPED = "GroupedLinear"
"""Its context has what is quantized for each group, in forms of each package's own."""
NAMES = [name for name in OPERATIONS if name not in (*PROCESSES, GROUPED, "Linear")]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield te


def _pair(name: str, dtype: torch.dtype) -> tuple[Any, Any, Drawn]:
    drawn = OPERATIONS[name](random.Random(0), WIDTH)
    options = {key: value for key, value in drawn.options.items() if key not in ("cache_quantized_input", "in_place", "glu_interleave_size")}
    theirs, ours = (getattr(side.ops, name)(*drawn.arguments, **options) for side in sides())
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype), drawn


def _results(call: Any, parameters: Any, drawn: Drawn, dtype: torch.dtype, without: int | None = None) -> list[torch.Tensor | None]:
    """Outputs and gradients. ``without``: the place of a parameter that needs none."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    extras = [made(ROWS, WIDTH).to(dtype).requires_grad_() for made in drawn.extras]
    for place, parameter in enumerate(parameters):
        parameter.grad = None
        parameter.requires_grad_(place != without)
    torch.manual_seed(2)
    y = call(x, *extras)
    outputs = y if isinstance(y, tuple) else (y,)
    torch.manual_seed(3)
    sum((each.float() * torch.randn(each.shape)).sum() for each in outputs).backward()
    return [*(each.detach() for each in outputs), x.grad, *(each.grad for each in extras), *(parameter.grad for parameter in parameters)]


def _forward_of(theirs: Any) -> type[FusedOperation]:
    from transformer_engine.pytorch.ops.op import OperationContext

    class Forward(FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **rest):
            context = OperationContext(requires_grad=basic_op_ctxs[0].requires_grad)
            given = {"basic_op_extra_inputs": basic_op_extra_inputs, "basic_op_kwargs": [{}], "prev_op_grad_output_quantizer": None}
            output, extra = theirs.fuser_forward([context], input_, next_op_input_quantizer=None, **given)
            if context.to_save is not None:
                basic_op_ctxs[0].save_for_backward(*context.to_save)
            own = {"to_save", "saved_tensors", "_saved_tensors_range", "requires_grad"}
            vars(basic_op_ctxs[0]).update({name: value for name, value in vars(context).items() if name not in own})
            return output, extra

    return Forward


def _backward_of(theirs: Any) -> type[FusedOperation]:
    class Backward(FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return theirs.fuser_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs)

    return Backward


KINDS: dict[str, Callable[[Any], type[FusedOperation]]] = {"forward": _forward_of, "backward": _backward_of}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_of_the_packages_and_the_other_of_ours_give_what_its_own_two_give(name: str, kind: str, dtype: torch.dtype) -> None:
    theirs, ours, drawn = _pair(name, dtype)
    fused = KINDS[kind](theirs)([ours])
    parameters = list(theirs.parameters())
    for without in (None, *range(len(parameters))):
        wanted = _results(theirs, parameters, drawn, dtype, without)
        if kind == "backward":  # which reads its own parameters
            for mine, their in zip(ours.parameters(), parameters, strict=True):
                mine.requires_grad_(their.requires_grad)
        found = _results(fused, list(ours.parameters()), drawn, dtype, without)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                # Sums over at most ROWS rows or WIDTH columns, in fp32, of what is rounded to the dtype a few times on the way.
                tolerance = torch.finfo(dtype).eps * (8 if dtype is torch.bfloat16 else ROWS + WIDTH)
                torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance * other.float().abs().max().item())


def test_what_an_operation_keeps_in_a_form_of_its_own_is_asked_of_its_own_forward() -> None:
    theirs, ours, drawn = _pair(GROUPED, torch.float32)
    fused = _forward_of(theirs)([ours])
    extras = [made(ROWS, WIDTH) for made in drawn.extras]
    with pytest.raises(
        ArgumentError, match=r"GroupedLinear.*: expected what its own backward needs, .*; call basic_ops\[0\].fuser_forward with that context"
    ):
        fused(torch.randn(ROWS, WIDTH, requires_grad=True), *extras)
