"""MLPs: linear layers and an activation between them as one pipeline, whose activation writes what the last product reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Self

import torch
from torch import nn

from fusible import ops
from fusible.models.convert.activation import FORMULAS, GATED, TITLES
from fusible.models.convert.as_found import AsFound, are_looked_at
from fusible.models.convert.joining import is_joined, pack
from fusible.models.convert.linear import BoundParts, joined_ops, linear_ops
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.swapping import Swap
from fusible.models.convert.trying import computes, draw, takes_one_tensor, tried
from fusible.pytorch.engine.lowered import own_parameter
from fusible.quantized import Recipe

__all__ = ["ConvertedMLP", "FoundMLP", "find_mlp", "mlp_swap"]


class ConvertedMLP(ConvertedModule):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))``, as one pipeline.

    Its layers are still modules, and where somebody has put another in the place of one (LoRA does), has hooked one, has undone its conversion or
    given it another recipe, has set an option or a bias since, or drops out within, they are called one by one, as by its former class.
    """

    _inputs: tuple[str, ...]
    """The layers that read x."""
    _children: tuple[nn.Module, ...]
    """The modules that were there when it was converted, in their order."""
    _dropouts: tuple[nn.Dropout, ...]
    _in_training: bool
    """Whether it computes no otherwise in training, but for these."""
    _as_found: AsFound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_plain(self._in_force()) or not self._is_whole():
            return self.original.forward(self, x)
        return self._run(x)

    def _is_whole(self) -> bool:
        """Whether its layers may be computed as one."""
        if tuple(self._modules.values()) != self._children or are_looked_at(self._children):
            return False
        if (self.training and not self._in_training) or any([dropout.training and dropout.p for dropout in self._dropouts]):
            return False
        return self._goes_with(self._as_found) and (len(self._inputs) == 1 or is_joined(self._weights()))

    def _weights(self) -> list[torch.Tensor | None]:
        return [own_parameter(self._modules[name], "weight") for name in self._inputs]  # type: ignore[arg-type]  # pyright: ignore

    def join(self) -> None:
        """Let the layers that read x be one product, from now on."""
        if len(self._inputs) > 1 and all(isinstance(self._modules.get(name), ConvertedModule) for name in self._inputs):
            pack(self._weights())

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # the parameters are those of modules inside

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join()


@dataclass(frozen=True)
class FoundMLP:
    """``inputs``: the names of the layers that read x, the gate first; ``down``: of the last one; ``activation``: of ``tex.activations``, at a
    ``place``; ``in_training``: whether it computes the same in training, but for what modules inside drop out."""

    inputs: tuple[str, ...]
    activation: str
    down: str
    place: str
    in_training: bool

    @property
    def text(self) -> str:
        layers = [" and ".join(self.inputs), *(["as one"] if len(self.inputs) > 1 else []), f"-> {self.activation} -> {self.down}"]
        return " ".join(layers) + ("" if self.in_training else ", but for training")


class _Formula(nn.Module):
    """The activation of a name, in torch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.formula = FORMULAS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x)


_WIDTH, _INNER = 5, 7


def find_mlp(module: nn.Module, linears: Sequence[str], activations: dict[str, str]) -> FoundMLP | None:
    """What a module computes with the ``linears`` and ``activations`` inside it, of which Fusible's are known by name: None where it is no MLP.

    Small layers are put in the places of its own for the trial.
    """
    inside = {name: child for name, child in module._modules.items() if child is not None}
    others = [child for name, child in inside.items() if name not in linears and name not in activations]
    if len(linears) not in (2, 3) or len(activations) != 1 or not takes_one_tensor(module):
        return None
    if any(parameter is not None for parameter in module._parameters.values()) or not all(isinstance(child, nn.Dropout) for child in others):
        return None
    ((place, activation),) = activations.items()
    for *inputs, down in permutations(linears):
        for gate in _gates(module, inputs, down, activation):
            if computes(*_trial(module, inputs, down, place, activation, gate)):
                in_training = computes(*_trial(module, inputs, down, place, activation, gate, training=True))
                return FoundMLP(tuple(inputs), gate or activation, down, place, in_training)
    return None


def _gates(module: Any, inputs: Sequence[str], down: str, activation: str) -> tuple[str, ...]:
    """The forms that fit the layers' sizes: the name of a gate, or "" for the activation alone."""
    of_first, of_down = (sum(len_out(module._modules[name]) for name in inputs), len_in(module._modules[down]))
    if of_first == 2 * of_down:
        return (GATED[activation],)
    return ("",) if of_first == of_down and len(inputs) == 1 else ()


def len_out(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.nf


def len_in(layer: Any) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.nx


def _trial(
    module: nn.Module, inputs: Sequence[str], down: str, place: str, activation: str, gate: str, training: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What the module gives with small layers inside, and what it would as an MLP of this form."""
    rows = _INNER * (2 if gate and len(inputs) == 1 else 1)
    weights = {name: draw(rows, _WIDTH, seed=1 + i) for i, name in enumerate(inputs)} | {down: draw(_WIDTH, _INNER, seed=9)}
    x, of_name = draw(2, 3, _WIDTH), FORMULAS[activation]
    dropouts = {name: nn.Identity() for name, child in module._modules.items() if isinstance(child, nn.Dropout)}
    layers = {name: _layer(weight) for name, weight in weights.items()}
    y = tried(module, x, {}, {**dropouts, place: _Formula(activation), **layers}, training=training)
    hidden = torch.cat([x @ weights[name].T for name in inputs], -1)
    a, b = hidden.chunk(2, -1) if gate else (hidden, None)
    return y, (of_name(a) if b is None else of_name(a) * b) @ weights[down].T


def _layer(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def mlp_swap(module: Any, found: FoundMLP, recipe: Recipe | None) -> Swap:
    """The swap of a module that was found to be an MLP."""
    inputs = [module._modules[name] for name in found.inputs]
    first = joined_ops(inputs) if len(inputs) > 1 else linear_ops(inputs[0])
    parts: list[BoundParts] = [*first, (getattr(ops, TITLES[found.activation])(), module, ()), *linear_ops(module._modules[found.down])]
    children = tuple(child for child in module._modules.values())
    dropouts = tuple(child for child in children if isinstance(child, nn.Dropout))
    as_found = AsFound.of([module, module._modules[found.place]], [*inputs, module._modules[found.down]])
    of_training = {"_dropouts": dropouts, "_in_training": found.in_training}
    attributes = {**ConvertedMLP.attributes(module, parts, recipe), **of_training, "_as_found": as_found}
    return Swap(module, ConvertedMLP, {**attributes, "_inputs": found.inputs, "_children": children})
