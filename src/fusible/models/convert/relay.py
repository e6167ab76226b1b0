"""MLPs whose layers a block calls one by one, as those of BERT and Whisper: ``down(act(up(x)))`` is one pipeline, though no module around it is one.

In a call of the block the first layer computes all of it when it is called; the activation and the last layer hand on what it gave, where they are
called on that very tensor. Elsewhere each computes by itself. That a block uses its layers so, with nothing between them, is found by trying it when
the model is converted (``chains``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fusible.errors import ShapeError, expected
from fusible.models.convert.as_found import AsFound, are_looked_at
from fusible.models.convert.calls import Call, call_of
from fusible.models.convert.pipelines import ConvertedModule, quantizes
from fusible.models.convert.swapping import Swapped
from fusible.quantized import Recipe

__all__ = ["Relay", "RelayedActivation", "RelayingBlock"]


class _Call(Call):
    """``y``: what was computed in it, and its last layer has not been called for yet."""

    def __init__(self) -> None:
        super().__init__()
        self.y: torch.Tensor | None = None

    def end(self) -> None:
        super().end()
        self.y = None


class Relay:
    """``names``: of the first layer, the activation and the last layer in the ``block``. ``in_training``: whether it hands on in training, too, where
    it may drop out between them. ``bare``: whether in a graph, too, the last layer is called on the very tensor that the activation gave."""

    def __init__(self, block: nn.Module, names: Sequence[str], in_training: bool, bare: bool) -> None:
        self.block, self.in_training, self.bare, self.call = block, in_training, bare, _Call()
        self.members: tuple[Any, ...] = tuple(block.get_submodule(name) for name in names)
        self._inside = tuple(dict.fromkeys(_steps(block, names)))
        self._dropouts = tuple(module for module in block.modules() if isinstance(module, nn.Dropout))
        up, act, down = self.members
        self._as_found = AsFound.of([act, *(holder for holder, _, _ in self._inside), *self._dropouts], [up, down])

    def link(self) -> None:
        """Let the layers compute together, from now on."""
        up, _, down = self.members
        for member in (up, down):
            if isinstance(member, ConvertedModule):
                vars(member)["_relay"] = self

    def is_whole(self) -> bool:
        """Whether its layers may be computed as one: nobody has put another in the place of one, as LoRA does, has undone its conversion, has set an
        option or a bias of one since, or looks at what one gives."""
        if not self.in_training and self._is_training():
            return False
        up, act, down = self.members
        if not (isinstance(up, ConvertedModule) and isinstance(act, RelayedActivation) and isinstance(down, ConvertedModule)):
            return False
        if any([holder._modules.get(name) is not one for holder, name, one in self._inside]) or are_looked_at([one for _, _, one in self._inside]):
            return False
        return act._goes_with(self._as_found)

    def _is_training(self) -> bool:
        """Whether something may drop out: the block is in training, or one of its dropouts is by itself."""
        return self.block.training or any([dropout.training for dropout in self._dropouts])

    def output(self, member: nn.Module, x: torch.Tensor, recipe: Recipe | None) -> torch.Tensor | None:
        """What the first or the last layer gives for ``x``; None where it is to compute by itself."""
        up, act, down = self.members
        if member is down:
            return self.handed_on(x, last=True)
        if member is not up or not self.call.is_under_way() or not quantizes(recipe) or not self.is_whole():
            return None
        self.call.y = y = act._run(x)
        return y

    def handed_on(self, x: torch.Tensor, last: bool = False) -> torch.Tensor | None:
        """``x`` where it is the output already; None where the layer is to compute. Raises ``ShapeError`` where it is made of the output. In a graph
        what a dropout gives that drops nothing is the output, though it is another object there."""
        y = self.call.y
        if y is None:
            return None
        same = x is y or (torch.compiler.is_compiling() and not self.bare and x.shape == y.shape)
        if last or not same:
            self.call.y = None
        if same:
            return x
        if x.shape == y.shape:
            do = "undo the conversion and convert the model again, or with its MLPs excluded: its blocks compute otherwise than when it was converted"
            got = "another"
            raise ShapeError(expected("the output of the layer before", of=f"the input of a layer of {type(self.block).__name__}", got=got, do=do))
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "call": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, call=_Call())


def _steps(block: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The layers and what lies around them in the block, each behind who holds it and its name there."""
    for name in names:
        holder = block
        for own in name.split("."):
            child = holder.get_submodule(own)
            yield holder, own, child
            holder = child


class RelayedActivation(ConvertedModule):
    """An activation between two layers that its block calls one by one. It has the pipeline of all three."""

    _relay: Relay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._relay.handed_on(x)
        return self.original.forward(self, x) if y is None else y

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # the parameters are those of other modules


class RelayingBlock(Swapped):
    """The block around them, within whose calls they compute together."""

    prefix = ""
    _relay: Relay

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_of(self._relay.call, self.original.forward, self, *args, **kwargs)
