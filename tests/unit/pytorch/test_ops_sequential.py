"""``ops.Sequential`` as a container: of operations, other modules, Fusible's own and nested ones; changed between calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import autocast
from fusible.errors import ArgumentError, FusibleError
from fusible.pytorch import ops
from fusible.quantized import DelayedScaling


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def scales(*factors: float) -> ops.Sequential:
    return ops.Sequential(*(ops.ConstantScale(factor) for factor in factors))


def factors(model: ops.Sequential) -> list[float]:
    return [op.scale for op in model]  # type: ignore[misc]


def product(model: ops.Sequential) -> float:
    return model(torch.ones(1, 1)).item()


def test_it_is_made_of_modules_or_of_names() -> None:
    named = ops.Sequential(OrderedDict(first=ops.ConstantScale(2.0), second=ops.ConstantScale(3.0)))
    assert list(named._modules) == ["first", "second"] and product(named) == 6 and product(ops.Sequential({"a": ops.ConstantScale(2.0)})) == 2
    assert isinstance(named, nn.Module) and named.first is named[0]
    with pytest.raises(FusibleError, match="Sequential: expected modules, got int"):
        ops.Sequential(3)
    x = leaf(2, 2)
    assert torch.equal(ops.Sequential()(x), x)


CHANGES: list[tuple[str, Callable[[ops.Sequential], object], list[float]]] = [
    ("append", lambda m: m.append(ops.ConstantScale(11.0)), [2, 3, 5, 7, 11]),
    ("extend", lambda m: m.extend(scales(11.0, 13.0)), [2, 3, 5, 7, 11, 13]),
    ("insert", lambda m: m.insert(1, ops.ConstantScale(11.0)), [2, 11, 3, 5, 7]),
    ("insert before the last", lambda m: m.insert(-1, ops.ConstantScale(11.0)), [2, 3, 5, 11, 7]),
    ("pop", lambda m: m.pop(), [2, 3, 5]),
    ("pop one", lambda m: m.pop(1), [2, 5, 7]),
    ("pop several", lambda m: m.pop(slice(1, 3)), [2, 7]),
    ("set", lambda m: m.__setitem__(2, ops.ConstantScale(11.0)), [2, 3, 11, 7]),
    ("set the last", lambda m: m.__setitem__(-1, ops.ConstantScale(11.0)), [2, 3, 5, 11]),
    ("delete", lambda m: m.__delitem__(0), [3, 5, 7]),
    ("delete several", lambda m: m.__delitem__(slice(0, 4, 2)), [3, 7]),
    ("+=", lambda m: m.__iadd__([ops.ConstantScale(11.0)]), [2, 3, 5, 7, 11]),
    ("add_module", lambda m: m.add_module("4", ops.ConstantScale(11.0)), [2, 3, 5, 7, 11]),
    ("setattr", lambda m: setattr(m, "1", ops.ConstantScale(11.0)), [2, 11, 5, 7]),
]


@pytest.mark.parametrize(("change", "wanted"), [pytest.param(c, w, id=name) for name, c, w in CHANGES])
def test_a_change_counts_from_the_next_call_on(change: Callable[[ops.Sequential], object], wanted: list[float]) -> None:
    model = scales(2.0, 3.0, 5.0, 7.0)
    assert product(model) == 210
    change(model)
    assert factors(model) == wanted and len(model) == len(wanted)
    assert product(model) == torch.tensor(wanted).prod().item()
    assert list(model._modules) == [str(i) for i in range(len(wanted))], "numbered in order, as a state dict needs it"


def test_parts_and_sums_are_new_sequentials_of_the_same_modules() -> None:
    model = scales(2.0, 3.0, 5.0, 7.0)
    part, total = model[1:3], model + [ops.ConstantScale(11.0)]  # noqa: RUF005 - their sum is what is tested
    assert isinstance(part, ops.Sequential) and part[0] is model[1] and product(part) == 15
    assert isinstance(total, ops.Sequential) and product(total) == 2310 and product(model) == 210 and model[-1].scale == 7
    with pytest.raises(IndexError):
        model[4]


def test_other_modules_part_the_pipeline() -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), nn.ReLU(), ops.ConstantScale(3.0), ops.AddExtraInput(), nn.Sigmoid(), ops.MakeExtraOutput())
    x, extra = leaf(3, 4), leaf(3, 4)
    y, out = model(x, extra)
    torch.testing.assert_close(y, torch.sigmoid(6 * x.relu() + extra))
    assert torch.equal(y, out) and len(model._arranged()) == 5
    (y.sum() + out.sum()).backward()
    assert x.grad is not None and extra.grad is not None


def test_nested_sequentials_join_the_pipeline_with_their_extra_tensors() -> None:
    inner = ops.Sequential(ops.AddExtraInput(), ops.Sequential(ops.ConstantScale(3.0), ops.MakeExtraOutput()))
    model = ops.Sequential(ops.ConstantScale(2.0), inner, ops.Sequential(ops.AddExtraInput()))
    x, a, b = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    y, extra = model(x, a, b)
    assert len(model._arranged()) == 1
    torch.testing.assert_close(y, 3 * (2 * x + a) + b)
    torch.testing.assert_close(extra, 3 * (2 * x + a))
    inner.append(ops.ConstantScale(2.0))
    torch.testing.assert_close(model(x, a, b)[0], 6 * (2 * x + a) + b)
    inner[1].insert(1, nn.ReLU())
    torch.testing.assert_close(model(x, a, b)[0], 2 * (3 * (2 * x + a)).relu() + b)
    assert len(model._arranged()) == 3


def test_modules_of_ours_join_the_pipeline() -> None:
    torch.manual_seed(1)
    linear, norm = fusible.Linear(16, 16), fusible.LayerNorm(16)
    model = ops.Sequential(ops.ConstantScale(2.0), linear, fusible.GELU(), fusible.Sequential(norm, fusible.Residual(ops.GELU())), ops.Linear(16, 16))
    x = leaf(4, 16)
    y = model(x)
    assert len(model._arranged()) == 1
    plain = fusible.Sequential(linear, fusible.GELU(), norm)(2 * x)
    torch.testing.assert_close(y, model[-1](plain + ops.GELU()(plain)), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "mmt_add_gelu_fwd_fused" in model.explain()


def test_operations_join_a_pipeline_of_our_modules() -> None:
    """Those without extra tensors; the two kinds of Sequential run the same ops."""
    torch.manual_seed(1)
    linear = ops.Linear(16, 16)
    x = leaf(4, 16)
    model = fusible.Sequential(fusible.LayerNorm(16), linear, ops.GELU())
    torch.testing.assert_close(model(x), ops.Sequential(*model)(x), rtol=0, atol=0)


@pytest.mark.parametrize("where", ["operation", "linear", "nested", "bias"])
def test_hooks_fire(where: str) -> None:
    torch.manual_seed(1)
    linear, op, inner = ops.Linear(4, 4), ops.GELU(), ops.Sequential(ops.ConstantScale(2.0))
    model, x = ops.Sequential(ops.Identity(), linear, op, inner, ops.Identity()), leaf(3, 4)
    plain = model(x)
    hooked = {"operation": op, "linear": linear, "nested": inner, "bias": linear.basic_ops[1]}[where]
    seen: list[str] = []
    handles = [
        hooked.register_forward_pre_hook(lambda *_: seen.append("pre")),
        hooked.register_forward_hook(lambda m, args, y: (seen.append("forward"), y)[1]),
        hooked.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    y = model(x)
    torch.testing.assert_close(y, plain)
    y.sum().backward()
    assert seen == ["pre", "forward", "backward"]
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(x), plain, rtol=0, atol=0)
    assert len(seen) == 3 and len(model._arranged()) == 1


def test_the_state_dict_has_the_names_of_the_modules_and_of_the_parts_of_linear() -> None:
    model = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 4), ops.BasicLinear(4, 8))
    names = {"0.weight", "0.bias", "1.basic_ops.0.weight", "1.basic_ops.1.bias", "2.weight"}
    places = {f"{op}._extra_state" for op in ("0", "1.basic_ops.0", "1.basic_ops.1", "2")}
    assert set(model.state_dict()) == names | places
    assert model[1].weight is model[1].basic_ops[0].weight and model[1].bias is model[1].basic_ops[1].bias
    other = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 4), ops.BasicLinear(4, 8))
    other.load_state_dict(model.state_dict())
    x = leaf(3, 8)
    assert torch.equal(other(x), model(x))


def test_scaling_state_is_saved_and_loaded() -> None:
    recipe = DelayedScaling(amax_history_len=3)

    def make() -> ops.Sequential:
        torch.manual_seed(1)
        return ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Quantize(), ops.Linear(32, 32))

    def step(model: ops.Sequential, factor: float) -> Tensor:
        x = (factor * leaf(16, 32).detach()).requires_grad_()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)  # a weight takes a new scale when it has been written to
        with autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        assert x.grad is not None
        return torch.cat([y.detach().flatten(), x.grad.flatten()])

    model = make()
    for factor in (1.0, 30.0):
        step(model, factor)
    other = make()
    other.load_state_dict(model.state_dict())
    assert torch.equal(step(other, 1.0), step(model, 1.0)) and not torch.equal(step(make(), 1.0), step(model, 1.0))


def test_the_wrong_width_is_refused_before_anything_runs() -> None:
    model = ops.Sequential(ops.Linear(8, 4), ops.Linear(5, 4))
    for call in (lambda: ops.Linear(8, 4)(leaf(2, 7)), lambda: model(leaf(2, 8)), lambda: ops.Linear(8, 4)(leaf(2, 8).double())):
        with pytest.raises(FusibleError, match=r"^[^.]*: expected [^.]*(\.[^ ][^.]*)*\.$"):
            call()


def test_extra_inputs_are_counted_over_all_parts() -> None:
    model = ops.Sequential(ops.AddExtraInput(), nn.ReLU(), ops.AddExtraInput())
    with pytest.raises(ArgumentError, match="a call of a Sequential: expected 2 extra inputs, got 1"):
        model(leaf(2, 2), leaf(2, 2))
