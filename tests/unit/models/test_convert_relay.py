"""MLPs whose layers a block calls one by one, as one pipeline: what is found, what it gives, and when layers compute by themselves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import tex
from fusible.errors import ShapeError
from fusible.models.convert.relay import RelayedActivation
from fusible.models.convert.states import load_scaling_states, scaling_states

WIDTH, INNER = 64, 128
RECIPE = fusible.Float8CurrentScaling()


class Mixer(nn.Module):
    """In the place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return self.out(x), None


class Inline(nn.Module):
    """As of Whisper. ``between``: what is done to the activation."""

    dropout = 0.0

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.mixer, self.norm, self.between = Mixer(), nn.LayerNorm(WIDTH), between
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.mixer(x, mask)[0]
        y = self.act(self.fc1(self.norm(x)))
        y = F.dropout(y, self.dropout, self.training)
        y = y if self.between is None else self.between(y)
        return x + self.fc2(y)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(WIDTH, INNER), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(x))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(self.dense(y)) + x)


class Nested(nn.Module):
    """As of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.first, self.last = Mixer(), First(), Last()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.mixer(x, mask)[0]
        return self.last(self.first(x), x)


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([make(), make()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, None)
        return x


def converted(make: Any, recipe: fusible.Recipe = RECIPE) -> Any:
    return fusible.convert(Model(make).eval(), recipe, keep_high_precision=())


def chains(model: Any) -> list[str]:
    return [layer.text for layer in fusible.conversion_report(model).converted if layer.kind == "MLP"]


def by_layers(model: Any) -> Any:
    """The same where a hook keeps layers from being computed together."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.GELU):
            module.register_forward_hook(lambda *_: None)
    return other


def casts(model: Any, x: torch.Tensor) -> int:
    """How often a call quantizes what no kernel before it has quantized; weights have been by the call before."""
    with torch.no_grad(), tex.record() as calls:
        model(x)
    return sum(call.function == "quantize" for call in calls)


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    loss = (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(7))).sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize(
    ("make", "text"), [(Inline, "fc1 -> erf_gelu -> fc2"), (Nested, "first.dense -> erf_gelu -> last.dense")], ids=["inline", "nested"]
)
@pytest.mark.parametrize("recipe", [RECIPE, fusible.MXFP8BlockScaling(), fusible.HighPrecision("float32")], ids=str)
def test_the_layers_of_a_block_are_one_pipeline_with_the_same_numbers(make: Any, text: str, recipe: fusible.Recipe) -> None:
    model, x = converted(make, recipe), torch.randn(3, 16, WIDTH)
    assert chains(model) == [text, text]
    other = by_layers(model)
    # In 8 bits a rounding of z in another place may turn one code; of sums in fp32 another order is all there is.
    step = 1e-5 if recipe.high_precision() else 2.0**-4
    for found, wanted in zip(gradients(model, x), gradients(other, x), strict=True):
        assert (found - wanted).norm() <= step * wanted.norm()


@pytest.mark.parametrize("make", [Inline, Nested], ids=["inline", "nested"])
def test_the_activation_writes_what_the_last_product_reads(make: Any) -> None:
    model, x = converted(make, fusible.DelayedScaling()), torch.randn(3, 16, WIDTH)
    gradients(model.train(), x)
    other = by_layers(model.eval())
    for one in 3 * (model, other):  # weights that come again are looked at before a copy is kept
        casts(one, x)
    assert casts(model, x) == casts(other, x) - 2


@pytest.mark.parametrize(
    "between", [lambda y: y * 1.0, lambda y: y + 1.0, lambda y: F.relu(y), lambda y: y.clone()], ids=["a copy", "a shift", "relu", "a clone"]
)
def test_a_block_that_does_something_between_is_left(between: Any) -> None:
    model = converted(lambda: Inline(between))
    assert not chains(model) and not any(isinstance(module, RelayedActivation) for module in model.modules())


class Twice(Inline):
    """Whose activation goes elsewhere, too."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.act(self.fc1(x))
        return self.fc2(y) + y.mean(-1, keepdim=True)


class Square(Inline):
    """Of one width, by which an output cannot be told from what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("make", [Twice, Square])
def test_what_cannot_be_told_is_left(make: Any) -> None:
    assert not chains(converted(make))


def hook_a_layer(model: Any) -> None:
    model.blocks[0].first.dense.register_forward_hook(lambda *_: None)


def hook_what_is_around(model: Any) -> None:
    """It sees the activation, of its width."""

    def check(module: Any, given: Any, y: torch.Tensor) -> None:
        assert y.shape[-1] == INNER

    model.blocks[0].first.register_forward_hook(check)


def put_another_layer(model: Any) -> None:
    former = model.blocks[0].last.dense
    model.blocks[0].last.dense = nn.Sequential(former, nn.Identity())


def exchange_a_forward(model: Any) -> None:
    former = model.blocks[0].last.forward
    model.blocks[0].last.forward = lambda y, x: former(y.clone(), x)


@pytest.mark.parametrize("change", [hook_a_layer, hook_what_is_around, put_another_layer, exchange_a_forward])
def test_where_somebody_looks_or_changes_a_layer_they_are_called_one_by_one(change: Any) -> None:
    model, x = converted(Nested), torch.randn(2, 8, WIDTH)
    wanted = by_layers(model)(x)
    model(x)
    change(model)
    assert (model(x) - wanted).norm() <= 2.0**-4 * wanted.norm()


def test_dropout_between_is_drawn_in_training() -> None:
    class Dropping(Inline):
        dropout = 0.5

    model, x = converted(Dropping), torch.randn(2, 8, WIDTH)
    assert chains(model) == ["fc1 -> erf_gelu -> fc2, but for training"] * 2
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_a_block_that_computes_otherwise_later_is_refused() -> None:
    changes: list[Any] = []

    class Changed(Inline):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            x = x + self.mixer(x, mask)[0]
            y = self.act(self.fc1(self.norm(x)))
            return x + self.fc2(changes[0](y) if changes else y)

    model, x = converted(Changed), torch.randn(2, 8, WIDTH)
    changes.append(lambda y: y * 2.0)  # where no module shows it
    with pytest.raises(
        ShapeError, match=r"^the input of a layer of Changed: expected the output of the layer before, got another; undo the conversion"
    ):
        model(x)


def test_a_call_that_was_broken_off_leaves_nothing_behind() -> None:
    model, x = converted(Inline), torch.randn(2, 8, WIDTH)
    block, z = model.blocks[0], torch.randn(2, 8, INNER)
    wanted = F.gelu(z)
    block.fc1(x)
    assert torch.allclose(block.act(z), wanted)
    assert block.fc2(z).shape == (2, 8, WIDTH)


@pytest.mark.parametrize("make", [Inline, Nested], ids=["inline", "nested"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_by_its_own_layers(make: Any, copied: Any) -> None:
    model, x = converted(make), torch.randn(2, 8, WIDTH)
    wanted = model(x)
    other = copied(model)
    assert torch.equal(other(x), wanted)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(other(x), wanted)


def test_undone_nothing_is_left() -> None:
    model, x = Model(Nested).eval(), torch.randn(2, 8, WIDTH)
    before, wanted = [vars(module).keys() for module in model.modules()], model(x)
    classes = [type(module) for module in model.modules()]
    fusible.convert(model, RECIPE)(x)
    fusible.convert(model, undo=True)
    assert [vars(module).keys() for module in model.modules()] == before and [type(module) for module in model.modules()] == classes
    assert torch.equal(model(x), wanted)


def test_the_state_of_delayed_scaling_is_that_of_the_activation() -> None:
    model, x = converted(Inline, fusible.DelayedScaling()), torch.randn(2, 8, WIDTH)
    gradients(model.train(), x)
    states = scaling_states(model)
    assert any(name.startswith("blocks.0.act.scaling_state") for name in states)
    again = converted(Inline, fusible.DelayedScaling()).train()
    load_scaling_states(again, states)
    wanted = gradients(copy.deepcopy(model), x)
    assert all(torch.equal(one, two) for one, two in zip(gradients(again, x), wanted, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("recipe", [RECIPE, fusible.HighPrecision("float32")], ids=str)
def test_a_layer_that_is_called_by_itself_gives_what_it_alone_computes(recipe: fusible.Recipe) -> None:
    model, x, z = converted(Nested, recipe), torch.randn(2, 8, WIDTH), torch.randn(2, 8, INNER)
    other = by_layers(model)
    block, wanted = model.blocks[0], other.blocks[0]
    assert torch.equal(block.first.dense(x), wanted.first.dense(x)) and block.first.dense(x).shape == (2, 8, INNER)
    assert torch.equal(block.first(x), wanted.first(x))
    assert torch.equal(block.last.dense(z), wanted.last.dense(z))
    assert torch.equal(block.last(block.first(x), x), wanted.last(wanted.first(x), x))


@pytest.mark.parametrize("undone", ["first.dense", "first.act", "last.dense", "first", "last"])
def test_where_a_layer_is_undone_the_others_compute_by_themselves(undone: str) -> None:
    model, x = converted(Nested), torch.randn(2, 8, WIDTH)
    wanted = model(x)
    fusible.convert(model.blocks[0].get_submodule(undone), undo=True)
    assert (model(x) - wanted).norm() <= 2.0**-4 * wanted.norm()


class Partly(Inline):
    """Whose MLP is repeated in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x + checkpoint(lambda x: self.fc2(self.act(self.fc1(x))), x, use_reentrant=self.reentrant)  # type: ignore[operator]  # pyright: ignore


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [Inline, Partly])
def test_a_repeated_forward_takes_the_path_of_the_first(make: Any, reentrant: bool) -> None:
    def told(model: Any, call: Any) -> list[torch.Tensor]:
        y = model_in = torch.randn(3, 16, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
        for block in model.blocks:
            y = call(block, y)
        y.square().sum().backward()
        return [y, model_in.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]  # type: ignore[list-item]  # pyright: ignore

    model = converted(make)
    assert chains(model) == ["fc1 -> erf_gelu -> fc2"] * 2
    for block in model.blocks:
        block.reentrant = reentrant
    other = copy.deepcopy(model) if make is Inline else by_layers(model)
    found = told(model, lambda block, x: block(x, None) if make is Partly else checkpoint(block, x, None, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, told(other, lambda block, x: block(x, None)), strict=True))


def test_blocks_are_called_by_their_former_names() -> None:
    """Lists of blocks, such as FSDP's, have them."""
    model = converted(Nested)
    assert [type(block).__name__ for block in model.blocks] == ["Nested", "Nested"] and type(model.blocks[0]) is not Nested
    assert isinstance(pickle.loads(pickle.dumps(model)).blocks[1], Nested)


class Bare(Inline):
    """As ``Inline``, but for the dropout."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.mixer(x, mask)[0]
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Dropping(Inline):
    """As ``Inline``, and drops out in training."""

    dropout = 0.5


def _exported(model: Any, x: torch.Tensor) -> Any:
    return fusible.export_program(model, x).module()


def _compiled(model: Any, x: torch.Tensor) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("make", [Inline, Dropping, Nested, Bare])
@pytest.mark.parametrize("graph", [_exported, _compiled])
def test_a_graph_computes_by_the_scales_that_training_has_left(make: Any, graph: Any) -> None:
    torch._dynamo.reset()
    model, x = converted(make, fusible.DelayedScaling()), torch.randn(2, 8, WIDTH)
    for block in model.blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear) and layer.in_features == WIDTH and layer.out_features == INNER:
                layer.weight.data *= 2000.0  # so that 448 is far too small for the activation by a scale of 1
    if make is not Dropping:
        gradients(model.train(), x)
    else:
        gradients(model, x)  # without a training mode that would drop out, and yet with gradients, so that amaxes are observed
    model.eval()
    with torch.no_grad():
        wanted, found = model(x), graph(model, x)(x)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


def test_a_dropout_between_is_found_where_it_drops_nothing() -> None:
    found = {make: converted(make).blocks[0]._relay for make in (Inline, Dropping, Nested, Bare)}
    assert {make: relay.bare for make, relay in found.items()} == {Inline: False, Dropping: False, Nested: True, Bare: True}
    assert {make: relay.in_training for make, relay in found.items()} == {Inline: True, Dropping: False, Nested: True, Bare: True}
