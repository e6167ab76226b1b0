"""Memory that a call hands to ``GroupedLinear`` by keyword: its output and the gradient of its input lie there, wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible.errors import ArgumentError, DTypeError, OutOfRangeError, ShapeError
from fusible.pytorch import ops

RECIPES = {
    "none": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "block": fusible.Float8BlockScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
ROWS, WIDTH, HIDDEN = 64, 32, 64
SIZES = torch.tensor([32, 0, 16])
TAKEN = int(SIZES.sum())
FILLED = 7.0


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block(executor: str = "eager") -> ops.Sequential:
    torch.manual_seed(0)
    first, second = ops.GroupedLinear(3, WIDTH, 2 * HIDDEN, bias=False), ops.GroupedLinear(3, HIDDEN, WIDTH)
    return ops.Sequential(ops.Linear(WIDTH, WIDTH), first, ops.SwiGLU(), second, ops.ConstantScale(2.0)).compile(executor)


def passed(model: ops.Sequential, keywords: Any = None) -> dict[str, Tensor]:
    """The output and all gradients of a call."""
    model.zero_grad()
    x = random(1, ROWS, WIDTH).requires_grad_()
    y = model(x, SIZES, SIZES, op_kwargs=keywords)
    y.backward(random(2, ROWS, WIDTH))
    assert x.grad is not None
    return {"y": y.detach().clone(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("executor", ["eager", "xla"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_with_buffers_gives_what_one_without_gives(recipe: str, executor: str) -> None:
    """Those in the middle too: what stands behind reads the buffer. Two passes, so that delayed scaling has seen amaxes, then one without again."""
    plain, given = block(executor), block(executor)
    shapes = {1: (2 * HIDDEN, WIDTH), 3: (WIDTH, HIDDEN)}
    with fusible.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        for step in range(3):
            buffers = {
                place: {"output": torch.full((ROWS, out), FILLED), "grad_input": torch.full((ROWS, columns), FILLED)}
                for place, (out, columns) in shapes.items()
            }
            wanted, found = passed(plain), passed(given, buffers if step < 2 else None)
            for name, value in wanted.items():
                rows = slice(TAKEN) if name in ("y", "dx") else slice(None)  # the others have what lay in the buffer
                told = lambda text, name=name: f"{name}: {text}"  # noqa: E731
                torch.testing.assert_close(found[name][rows], value[rows], rtol=2.0**-18, atol=2.0**-18, msg=told)
            for of_op in buffers.values() if step < 2 else ():
                assert not any((buffer[:TAKEN] == FILLED).any() for buffer in of_op.values())
                assert (of_op["output"][TAKEN:] == FILLED).all() and (of_op["grad_input"][TAKEN:] == 0).all()


def test_what_is_given_is_the_buffer_itself_and_records_gradients() -> None:
    op, x = ops.GroupedLinear(3, WIDTH, HIDDEN, bias=False), random(1, ROWS, WIDTH).requires_grad_()
    out, grad = torch.empty(ROWS, HIDDEN), torch.empty(ROWS, WIDTH)
    y = op(x, SIZES, output=out, grad_input=grad)
    assert y.data_ptr() == out.data_ptr() and y.requires_grad
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad[:TAKEN], grad[:TAKEN])
    with torch.no_grad():
        assert op(x, SIZES, output=(again := torch.empty(ROWS, HIDDEN))).data_ptr() == again.data_ptr()
    again = out.detach()
    torch.testing.assert_close(op(x, SIZES, output=again)[:TAKEN], op(x, SIZES)[:TAKEN])


def test_a_plan_is_made_once_for_all_buffers_of_an_operation() -> None:
    op = ops.GroupedLinear(3, WIDTH, HIDDEN)
    for _ in range(3):
        op(random(1, ROWS, WIDTH), SIZES, output=torch.empty(ROWS, HIDDEN))
    assert len(op._fuser()._plans) == 1


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "another shape": ({"output": torch.empty(ROWS, WIDTH)}, ShapeError),
    "another dtype": ({"output": torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)}, ShapeError),
    "another device": ({"output": torch.empty(ROWS, HIDDEN, device="meta")}, ShapeError),
    "rows that lie apart": ({"output": torch.empty(HIDDEN, ROWS).t()}, ShapeError),
    "one that records gradients": ({"output": torch.empty(ROWS, HIDDEN, requires_grad=True)}, ShapeError),
    "a gradient of another shape": ({"grad_input": torch.empty(ROWS, HIDDEN)}, ShapeError),
    "no tensor": ({"output": 1}, DTypeError),
    "another keyword": ({"out": torch.empty(ROWS, HIDDEN)}, ArgumentError),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_buffer_is_refused_before_anything_is_written(what: str) -> None:
    keywords, kind = WRONG[what]
    op, x = ops.GroupedLinear(3, WIDTH, HIDDEN), random(1, ROWS, WIDTH)
    good = torch.full((ROWS, HIDDEN), FILLED)
    with fusible.autocast(recipe=RECIPES["delayed"]):
        op(x, SIZES)
        before = {name: value.clone() for name, value in op.state_dict().items()}
        with pytest.raises(kind) as caught:
            op(x, SIZES, **{"output": good, **keywords})
    name = next(iter(keywords))
    assert ": expected " in str(caught.value) and (f"{name} of GroupedLinear" in str(caught.value) or kind is ArgumentError)
    assert (good == FILLED).all()
    assert all(torch.equal(value, before[name]) for name, value in op.state_dict().items())


def test_keywords_that_no_operation_takes_are_refused_in_a_sentence() -> None:
    model, x = ops.Sequential(ops.BasicLinear(WIDTH, WIDTH), ops.GELU()), random(1, ROWS, WIDTH)
    with pytest.raises(TypeError, match=r"BasicLinear.op_forward: expected no keyword arguments, got factor; leave them out."):
        model(x, op_kwargs={0: {"factor": 2.0}})
    with pytest.raises(ArgumentError, match="GELU.op_forward"):
        model(x, op_kwargs={-1: {"output": x}})
    with pytest.raises(DTypeError, match="the keyword arguments of GELU: expected a mapping of names to values, got a int"):
        model(x, op_kwargs={1: 3})
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"a key of op_kwargs: expected .*, got {index}"):
            model(x, op_kwargs={index: {}})
    with pytest.raises(ArgumentError, match="a key of op_kwargs: expected .*, got 'first'"):
        model(x, op_kwargs={"first": {}})
    with pytest.raises(OutOfRangeError, match="basic_op_kwargs: expected keyword arguments of 2 basic operations, got 1"):
        ops.OperationFuser([ops.BasicLinear(WIDTH, WIDTH), ops.GELU()])(x, basic_op_kwargs=[{}])


class Doubled(ops.FusedOperation):
    """A ``GroupedLinear`` by itself, whose output is doubled by a keyword that only this class knows."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **rest):
        keywords = dict(basic_op_kwargs[0])
        times = keywords.pop("times", 1)
        y, extra = self.basic_ops[0].fuser_forward(basic_op_ctxs, input_, basic_op_kwargs=[keywords], **rest)
        return y * times, extra


def test_a_fused_operation_is_handed_the_keywords_of_its_basic_operations() -> None:
    op, x = ops.GroupedLinear(3, WIDTH, HIDDEN, bias=False), random(1, ROWS, WIDTH)
    out = torch.empty(ROWS, HIDDEN)
    fused = Doubled([op])
    y = fused(x, SIZES, basic_op_kwargs=[{"times": 2, "output": out}])
    torch.testing.assert_close(y[:TAKEN], 2 * op(x, SIZES)[:TAKEN])
    torch.testing.assert_close(out[:TAKEN], op(x, SIZES)[:TAKEN])
    y = ops.Sequential(ops.Identity(), fused)(x, SIZES, op_kwargs={op: {"times": 3}})
    torch.testing.assert_close(y[:TAKEN], 3 * op(x, SIZES)[:TAKEN])
