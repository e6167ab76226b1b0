"""Keywords that a call hands to operations: what NVIDIA's package makes of them, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_client import package
from te_public import Side, sides

import fusible.pytorch.ops.basic.grouped_linear as grouped_linear

GROUPS, ROWS, WIDTH, HIDDEN = 2, 64, 32, 64
SIZES = (16, 48)


def _block(te: Side) -> Any:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    first, second = te.ops.GroupedLinear(GROUPS, WIDTH, 2 * HIDDEN, **options), te.ops.GroupedLinear(GROUPS, HIDDEN, WIDTH, **options)
    return te.ops.Sequential(first, te.ops.SwiGLU(), second)


def _call(te: Side, keys: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """A call with all four buffers: the output, gradients, and what lies in the buffers."""
    model, x = _block(te), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    splits = torch.tensor(SIZES)
    widths = {0: (WIDTH, 2 * HIDDEN), 2: (HIDDEN, WIDTH)}
    buffers = {
        place: {"output": torch.zeros(ROWS, out, dtype=x.dtype), "grad_input": torch.zeros(ROWS, into, dtype=x.dtype)}
        for place, (into, out) in widths.items()
    }
    y = model(x, splits, splits, op_kwargs={keys(model)[place]: of_op for place, of_op in buffers.items()})
    y.sum().backward()
    assert x.grad is not None and y.data_ptr() == buffers[2]["output"].data_ptr()
    found = {f"{place} {name}": buffer.detach() for place, of_op in buffers.items() for name, buffer in of_op.items()}
    return {"y": y.detach(), "dx": x.grad, **found}


@pytest.mark.parametrize("keys", [lambda model: [*model], lambda model: range(len(model)), lambda model: range(-len(model), 0)])
def test_buffers_of_every_grouped_linear_hold_what_the_packages_hold(keys: Callable[[Any], Any]) -> None:
    with package():
        theirs, ours = (_call(te, keys) for te in sides())
    assert sorted(name for name, value in theirs.items() if not value.numel()) == ["0 output"]  # the package lets go of what it has used
    for name, value in theirs.items():
        if not value.numel():
            continue
        # Products of at most 2 * HIDDEN terms, summed in fp32 and rounded to bf16, one upon the other.
        torch.testing.assert_close(ours[name], value, rtol=2.0**-6, atol=2.0**-6, msg=lambda text, name=name: f"{name}: {text}")
        assert value.abs().max() > 0


def _with(**keywords: Any) -> Callable[[Side], Any]:
    def call(te: Side) -> Any:
        model, splits = _block(te), torch.tensor(SIZES)
        x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return model(x, splits, splits, op_kwargs={2: keywords}).sum().backward()

    return call


def _key(key: Any) -> Callable[[Side], Any]:
    return lambda te: te.ops.Sequential(te.ops.Linear(WIDTH, WIDTH, device="cuda"), te.ops.GELU())(torch.zeros(4, WIDTH), op_kwargs={key: {"by": 2}})


REFUSED: dict[str, Callable[[Side], Any]] = {
    "a buffer of another shape": _with(output=torch.zeros(3, 3, dtype=torch.bfloat16)),
    "a buffer of another dtype": _with(output=torch.zeros(ROWS, WIDTH)),
    "a buffer that lies apart": _with(output=torch.zeros(WIDTH, ROWS, dtype=torch.bfloat16).t()),
    "a buffer that records gradients": _with(output=torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)),
    "a gradient of another shape": _with(grad_input=torch.zeros(3, 3, dtype=torch.bfloat16)),
    "an index that there is not": _key(7),
    "an operation of several": _key(0),
    "a text": _key("first"),
    "a keyword that an operation does not take": _key(1),
    "keywords of a linear layer": lambda te: te.ops.Linear(WIDTH, WIDTH, device="cuda")(torch.zeros(4, WIDTH), by=2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_package_refuses_is_refused_so_that_the_same_clause_catches_it(what: str) -> None:
    with package():
        theirs, ours = sides()
        with pytest.raises(Exception) as caught:  # whatever it is
            REFUSED[what](theirs)
        with pytest.raises(caught.type):
            REFUSED[what](ours)


def test_the_keywords_have_the_packages_names() -> None:
    with package():
        import transformer_engine.pytorch.ops.basic.grouped_linear as theirs

        for name in ("OUTPUT_BUFFER_KEY", "GRAD_INPUT_BUFFER_KEY"):
            assert getattr(theirs, name) == getattr(grouped_linear, name)
