"""Scales of delayed scaling go with their modules through every edit of a ``Sequential``: before a call, after one, in copies and in checkpoints.

The reference is the same layers called one after another, each with a state of its own, which no edit of the list around them can touch.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import DelayedScaling, Linear, autocast
from fusible.pytorch import ops, quantize_parameters

WIDTH = 8
RECIPE = DelayedScaling(amax_history_len=3)
KINDS = [pytest.param(fusible.Sequential, id="Sequential"), pytest.param(ops.Sequential, id="ops.Sequential")]
Edit = Callable[[Any, list[nn.Module]], Any]


def layers(count: int, seed: int = 1) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Linear(WIDTH, WIDTH) for _ in range(count)]


def train(model: nn.Module, steps: int, seed: int) -> list[Tensor]:
    """The outputs and the gradients of some steps, each with inputs of another size, so that scales move."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for step in range(steps):
        x = (torch.randn(5, WIDTH, generator=generator) * 4.0 ** (step + seed % 3)).requires_grad_()
        with autocast(recipe=RECIPE):
            y = model(x)
        (2.0**step * y.square().mean()).backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return seen


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def replace(m: Any, new: list[nn.Module]) -> None:
    m[1] = new[0]


def delete(m: Any, new: list[nn.Module]) -> None:
    del m[1]


def delete_several(m: Any, new: list[nn.Module]) -> None:
    del m[:4:2]


def add(m: Any, new: list[nn.Module]) -> None:
    m += nn.Sequential(*new)


def by_name(m: Any, new: list[nn.Module]) -> None:
    setattr(m, "2", new[0])


EDITS: dict[str, Edit] = {
    "append": lambda m, new: m.append(new[0]),
    "extend": lambda m, new: m.extend(new),
    "insert first": lambda m, new: m.insert(0, new[0]),
    "insert between": lambda m, new: m.insert(2, new[0]),
    "pop": lambda m, new: m.pop(0),
    "pop several": lambda m, new: m.pop(slice(1, 3)),
    "move": lambda m, new: m.append(m.pop(0)),
    "reverse": lambda m, new: [m.insert(i, m.pop(-1)) for i in range(len(m))],
    "set": replace,
    "del": delete,
    "del several": delete_several,
    "+=": add,
    "setattr": by_name,
    "a foreign module between": lambda m, new: m.insert(2, nn.Tanh()),
    "nothing of before": lambda m, new: [m.pop(0) for _ in range(4)] and m.extend(new),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EDITS)
def test_what_stays_keeps_its_scales_and_what_is_new_begins_anew(name: str, kind: type) -> None:
    model, reference = (made(*layers(4)) for made in (kind, nn.Sequential))
    assert equal(train(model, 3, 1), train(reference, 3, 1))
    for made in (model, reference):
        EDITS[name](made, layers(2, seed=2))
    assert equal(train(model, 3, 2), train(reference, 3, 2))
    for made in (model, reference):
        made.insert(0, Linear(WIDTH, WIDTH))
        made[0].load_state_dict(layers(1, 3)[0].state_dict())
    assert equal(train(model, 2, 3), train(reference, 2, 3))


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle", "edited copy", "edited pickle"])
def test_a_checkpoint_and_a_copy_made_at_once_after_an_edit(way: str, name: str) -> None:
    model = fusible.Sequential(*layers(4))
    train(model, 3, 1)
    if way.startswith("edited"):
        twin = copy.deepcopy(model) if way == "edited copy" else pickle.loads(pickle.dumps(model))
        for made in (model, twin):
            EDITS[name](made, layers(2, seed=2))
        assert model.state_dict().keys() == twin.state_dict().keys()
    else:
        EDITS[name](model, layers(2, seed=2))
        if way == "state dict":
            twin = fusible.Sequential(*(nn.Tanh() if isinstance(m, nn.Tanh) else Linear(WIDTH, WIDTH) for m in model))
            assert str(twin.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
        else:
            twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert equal(train(model, 3, 2), train(twin, 3, 2))


def test_the_list_inside_is_edited_and_the_state_is_outside() -> None:
    """A nested Sequential's scales are with the one around it, and follow edits of both."""
    inner = fusible.Sequential(*layers(2))
    model = fusible.Sequential(inner, *layers(2, seed=4))
    reference = nn.Sequential(*layers(2), *layers(2, seed=4))
    assert equal(train(model, 3, 1), train(reference, 3, 1))
    inner.insert(1, layers(1, seed=5)[0])
    reference.insert(1, layers(1, seed=5)[0])
    assert equal(train(model, 3, 2), train(reference, 3, 2))
    inner.append(model.pop(1))
    assert equal(train(model, 3, 3), train(reference, 3, 3))
    model.extend(inner[1:])
    del inner[1:]
    reference.append(reference[3])
    order = [0, 4, 1, 2, 3]
    reference = nn.Sequential(*(reference[i] for i in order))
    assert model.state_dict().keys() >= {"scaling_state.0"}
    assert equal(train(model, 3, 4), train(reference, 3, 4))


def test_hooks_come_and_go_between_edits() -> None:
    """A hooked module is called on its own, with scales of its own; those of all others go on."""
    model, reference = (made(*layers(4)) for made in (fusible.Sequential, nn.Sequential))
    train(model, 3, 1), train(reference, 3, 1)
    handle = model.append(nn.Tanh())[4].register_forward_hook(lambda *args: None)
    reference.append(nn.Tanh())
    assert equal(train(model, 2, 2), train(reference, 2, 2))
    handle.remove()
    for made in (model, reference):
        made.pop(4)
    assert equal(train(model, 2, 3), train(reference, 2, 3))
    runner = model._runner()
    handle = model[1].register_forward_hook(lambda *args: None)
    train(model, 1, 4)
    handle.remove()
    train(model, 1, 4)
    assert model._runner() is runner, "no plan is made again"


def test_a_module_at_two_places_has_two_states_and_the_one_that_stays_keeps_its_own() -> None:
    shared, between = layers(2)
    model, reference = fusible.Sequential(shared, between, shared), nn.Sequential(*layers(2), layers(1)[0])
    with torch.no_grad():
        assert torch.equal(reference[0].weight, reference[2].weight)
    for made in (model, reference):
        with torch.no_grad(), autocast(recipe=RECIPE):
            made(torch.randn(2, WIDTH))
        train(made, 3, 1)
        made.pop(0)
    outputs = [train(made, 2, 2)[0] for made in (model, reference)]
    assert torch.equal(*outputs)


def test_weights_that_are_quantized_before_an_edit() -> None:
    model, reference = (made(*layers(4)) for made in (fusible.Sequential, nn.Sequential))
    train(model, 3, 1), train(reference, 3, 1)
    for made in (model, reference):
        quantize_parameters(made)
        made.insert(1, layers(1, seed=2)[0])
    x = 3 * torch.randn(5, WIDTH)
    with torch.no_grad(), autocast(recipe=RECIPE):
        assert torch.equal(model(x), reference(x))


def test_a_traced_model_follows_an_edit_and_one_that_is_undone() -> None:
    model, eager = (fusible.Sequential(*layers(3)) for _ in range(2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    taken: list[nn.Module] = []
    for step in range(4):
        x = 2.0**step * torch.randn(4, WIDTH)
        with autocast(recipe=RECIPE):
            assert torch.equal(compiled(x), eager(x))
        if step % 2 == 0:
            taken = [made.pop(1) for made in (model, eager)]
        else:
            for made, layer in zip((model, eager), taken, strict=True):
                made.insert(1, layer)
