"""What is set on a converted model is seen by its next call: options, biases, sizes, dropouts, hooks, and the conversion of a part of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import fusible
from fusible.models.convert import scaling_states
from fusible.models.convert.as_found import Options, has_options

WIDTH, INNER = 32, 64
PIPELINES = fusible.HighPrecision("float32")
"""By which the pipelines compute what the former classes do, but for the order of sums."""


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.sigmoid(self.beta * hidden)


class Scaled(nn.Module):
    """As of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


class ScaledNorm(Scaled):
    """By the name of a norm."""


class MLP(nn.Module):
    """``dropout`` is drawn by a function, ``drop`` by a module."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.halved = False
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False)
        self.drop, self.dropout = nn.Dropout(0.0), dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.act(self.up(hidden)), self.dropout, self.training)
        return self.down(self.drop(y / 2 if self.halved else y))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Block(nn.Module):
    """Which calls the layers of its MLP one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)
        self.drop, self.dropout = nn.Dropout(0.0), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.act(self.fc1(self.norm(x))), self.dropout, self.training)
        return x + self.fc2(self.drop(y))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def conv1d() -> nn.Module:
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(INNER, WIDTH)


def dropping(model: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


def sets(place: str, **options: Any) -> Callable[[nn.Module], None]:
    """Sets options of the module at a place, of which "" is the model."""

    def change(model: nn.Module) -> None:
        for name, value in options.items():
            setattr(model.get_submodule(place), name, value)

    return change


def bias(place: str, size: int) -> Callable[[nn.Module], None]:
    return sets(place, bias=nn.Parameter(torch.linspace(-1.0, 1.0, size)))


def drops(place: str, p: float = 0.5) -> Callable[[nn.Module], None]:
    """Lets the dropout at a place, alone, drop out."""

    def change(model: nn.Module) -> None:
        dropout: Any = model.get_submodule(place)
        dropout.p = p
        dropout.train()

    return change


def in_training(change: Callable[[nn.Module], None] = lambda model: None) -> Callable[[nn.Module], None]:
    def both(model: nn.Module) -> None:
        change(model.train())

    return both


def narrowed(*layers: tuple[str, int]) -> Callable[[nn.Module], None]:
    """Cuts half of the hidden columns off, along a dimension of each layer's weight."""

    def change(model: nn.Module) -> None:
        for place, dim in layers:
            layer: Any = model.get_submodule(place)
            layer.weight = nn.Parameter(layer.weight.detach().narrow(dim, 0, INNER // 2).clone())
            if layer.bias is not None and not dim:
                layer.bias = nn.Parameter(layer.bias.detach()[: INNER // 2].clone())

    return change


def doubled(place: str) -> Callable[[nn.Module], None]:
    return lambda model: parametrize.register_parametrization(model.get_submodule(place), "weight", Doubled())  # type: ignore[return-value]


def cut(model: nn.Module) -> None:
    norm: Any = model
    norm.weight, norm.bias = nn.Parameter(torch.ones(WIDTH // 2)), nn.Parameter(torch.ones(WIDTH // 2))
    norm.normalized_shape = (WIDTH // 2,)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "the epsilon of a LayerNorm": (lambda: nn.LayerNorm(WIDTH), sets("", eps=0.5)),
    "the epsilon of an RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), sets("", eps=0.5)),
    "the epsilon of another library's norm": (ScaledNorm, sets("", variance_epsilon=0.5)),
    "no bias of a LayerNorm": (lambda: nn.LayerNorm(WIDTH), sets("", bias=None)),
    "a computed weight of a LayerNorm": (lambda: nn.LayerNorm(WIDTH), doubled("")),
    "fewer columns of a LayerNorm": (lambda: nn.LayerNorm(WIDTH), cut),
    "an option of an activation": (Swish, sets("", beta=2.0)),
    "a bias of a linear layer": (lambda: nn.Linear(WIDTH, INNER, bias=False), bias("", INNER)),
    "no bias of a linear layer": (lambda: nn.Linear(WIDTH, INNER), sets("", bias=None)),
    "fewer rows of a linear layer": (lambda: nn.Linear(WIDTH, INNER), narrowed(("", 0))),
    "another bias of a Conv1D": (conv1d, sets("", bias=nn.Parameter(torch.zeros(INNER)))),
    "a bias of an MLP": (MLP, bias("down", WIDTH)),
    "no bias of an MLP": (MLP, sets("up", bias=None)),
    "fewer columns of an MLP": (MLP, narrowed(("up", 0), ("down", 1))),
    "an option of an MLP's activation": (MLP, sets("act", approximate="tanh")),
    "a switch of an MLP": (MLP, sets("", halved=True)),
    "a module of an MLP drops out alone": (MLP, drops("drop")),
    "a function of an MLP drops out in training": (lambda: MLP(0.5), in_training()),
    "a function of an MLP drops out later": (MLP, in_training(sets("", dropout=0.5))),
    "a module of an MLP that dropped out in training drops out alone": (lambda: dropping(MLP()), drops("drop")),
    "a bias of the keys": (Attention, bias("k_proj", 32)),
    "no bias of the queries": (Attention, sets("q_proj", bias=None)),
    "a bias of a block": (Blocks, sets("blocks.0.fc2", bias=None)),
    "an option of a block's activation": (Blocks, sets("blocks.0.act", approximate="tanh")),
    "a module of a block drops out alone": (Blocks, drops("blocks.0.drop")),
    "a module of a block that dropped out in training drops out alone": (lambda: dropping(Blocks()), drops("blocks.0.drop")),
    "a function of a block drops out later": (Blocks, in_training(sets("blocks.0", dropout=0.5))),
}


KINDS: dict[str, tuple[Any, Any]] = {
    "a number": (1.0, 2.0),
    "a whole number": (1, 2),
    "a number that is none": (math.nan, 2.0),
    "a word": ("one", "two"),
    "a switch": (False, True),
    "None": (None, 2.0),
    "a pair": ((1, 2), (1, 3)),
    "a tensor later": (1.0, torch.ones(3)),
    "a function": (torch.neg, torch.abs),
    "a dtype": (torch.float32, torch.float64),
}
"""Options as they are found, and as they are set later."""


class Optioned(nn.Module):
    """Gives twice of what it is to where its option is set anew. Its class has another one."""

    of_class = 1.0

    def __init__(self, option: Any) -> None:
        super().__init__()
        self.option = option

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        of_class = getattr(self, "of_class", 0.0)
        option = self.option
        as_found = any(type(option) is type(found) and (option == found or (option != option and found != found)) for found, _ in KINDS.values())
        return x if as_found and of_class == 1.0 else 2 * x


class OptionedActivation(Optioned):
    """A GELU that torch computes in several passes: of one alone a conversion leaves it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x * (torch.erf(x / math.sqrt(2)) + 1) / 2)


class OptionedNorm(Optioned):
    def __init__(self, option: Any) -> None:
        super().__init__(option)
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(F.rms_norm(x, (WIDTH,), self.weight, self.eps))


class OptionedMLP(Optioned):
    def __init__(self, option: Any) -> None:
        super().__init__(option)
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.scaled(self.act(self.up(x))))


class OptionedBlock(Optioned):
    def __init__(self, option: Any) -> None:
        super().__init__(option)
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.scaled(self.act(self.fc1(self.norm(x)))))


class Around(nn.Module):
    """A model around what has the option."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


OPTIONED = (OptionedActivation, OptionedNorm, OptionedMLP, OptionedBlock)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def columns(model: nn.Module) -> int:
    """Of what a model takes."""
    return next((len(module.weight) for module in model.modules() if isinstance(module, nn.LayerNorm)), WIDTH)


@pytest.mark.parametrize("name", CASES)
def test_the_next_call_is_that_of_a_model_which_was_not_converted(name: str) -> None:
    plain, change = made(name), CASES[name][1]
    model = fusible.convert(copy.deepcopy(plain), PIPELINES, keep_high_precision=())
    assert fusible.conversion_report(model).converted
    x = torch.randn(4, WIDTH, requires_grad=True)
    before = plain(x)
    assert torch.allclose(model(x), before, atol=1e-5)
    results = []
    for one in (plain, model):
        change(one)
        torch.manual_seed(1)
        results.append(one(x[:, : columns(one)]))
    assert torch.allclose(results[1], results[0], atol=1e-5)
    assert results[0].shape != before.shape or not torch.allclose(results[0], before, atol=1e-4)
    results[1].sum().backward()


@pytest.mark.parametrize("make", OPTIONED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["option", "of_class"])
def test_an_option_of_any_kind_is_looked_at(make: type[Optioned], kind: str, name: str) -> None:
    found, later = KINDS[kind]
    plain = Around(make(found)).eval()
    model: Any = fusible.convert(copy.deepcopy(plain), PIPELINES, keep_high_precision=())
    assert fusible.conversion_report(model).converted
    x = torch.randn(4, WIDTH)
    before = plain(x)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(one(x), before, atol=1e-5)
        options = [held for module in one.modules() for held in options_held(module)]
        assert options
        assert all(has_options(module, held) for module, held in options)
    for one in (plain, model):
        setattr(one.inside, name, later if name == "option" else 2.0)
    assert not torch.allclose(plain(x), before, atol=1e-4)
    assert torch.allclose(model(x), plain(x), atol=1e-5)


def options_held(module: Any) -> Iterator[tuple[nn.Module, Options]]:
    """What a converted module has found of the options of modules."""
    attributes = vars(module)
    if "_found" in attributes:
        yield module, attributes["_found"]
    for holder in (module, attributes.get("_relay")):
        if (found := getattr(holder, "_as_found", None)) is not None:
            yield from found.options


@pytest.mark.parametrize("name", ["the epsilon of a LayerNorm", "a bias of a linear layer", "a bias of an MLP", "no bias of the queries"])
def test_a_compiled_model_sees_it_too(name: str) -> None:
    model = fusible.convert(made(name), PIPELINES, keep_high_precision=())
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
        CASES[name][1](model)
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_a_layer_that_gets_a_bias_keeps_its_scales() -> None:
    model, x = fusible.convert(nn.Linear(WIDTH, INNER, bias=False), fusible.DelayedScaling(), keep_high_precision=()), torch.randn(4, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    states = scaling_states(model)
    model.bias = nn.Parameter(torch.zeros(INNER))
    assert states and scaling_states(model).keys() == states.keys()
    assert all(torch.equal(value, states[name]) for name, value in scaling_states(model).items())


def test_the_layers_of_an_mlp_are_called_where_all_modules_are_hooked() -> None:
    for make, layers in ((MLP, 3), (Blocks, 3)):
        model, seen = fusible.convert(make().eval(), PIPELINES, keep_high_precision=()), []
        handle = register_module_forward_hook(lambda module, args, y, seen=seen: seen.append(module))
        model(torch.randn(4, WIDTH))
        handle.remove()
        assert sum(isinstance(module, nn.Linear | nn.GELU) for module in seen) == layers


@pytest.mark.parametrize("place", ["up", "down"])
def test_a_layer_of_an_mlp_whose_conversion_is_undone_computes_as_before(place: str) -> None:
    """What it gives is exactly torch's then, of what it is called on."""
    model, given = fusible.convert(MLP().eval(), fusible.NVFP4BlockScaling(), keep_high_precision=()), []
    layer = fusible.convert(model.get_submodule(place), undo=True)
    other = copy.deepcopy(model)
    other.get_submodule(place).register_forward_hook(lambda module, args, y: given.append((args[0], y)))
    x = torch.randn(16, WIDTH)
    assert torch.equal(model(x), other(x))
    ((seen, y),) = given
    assert torch.equal(y, F.linear(seen, layer.weight, layer.bias))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: nn.LayerNorm(WIDTH), "input"),
        (ScaledNorm, "hidden"),
        (Swish, "hidden"),
        (lambda: nn.Linear(WIDTH, INNER), "input"),
        (conv1d, "x"),
        (MLP, "hidden"),
    ],
)
def test_a_layer_is_called_by_the_names_of_its_former_class(make: Any, argument: str) -> None:
    plain, x = make().eval(), torch.randn(4, WIDTH)
    model = fusible.convert(copy.deepcopy(plain), PIPELINES, keep_high_precision=())
    assert type(model) is not type(plain)
    assert torch.allclose(model(**{argument: x}), plain(x), atol=1e-5)
    with pytest.raises(TypeError, match="another"):
        model(another=x)
