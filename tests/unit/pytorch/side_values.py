"""Generated lists of operations with channels, and what they mean, in plain torch: for ``test_side_values``.

The values are small integers, so that sums and products are exact in fp32 in any order, and a value that goes astray is another number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fusible
from fusible.pytorch import ops

WIDTH = 4


@dataclass(eq=False)
class Node:
    """``kind``: "scale", "linear", "make", "add", "times" (an operation in plain torch with an extra input), or a block: "ops", "fusible",
    "residual". ``number``: the factor, or the seed of a weight. ``name``: of a channel, None for the caller's own."""

    kind: str
    number: int = 0
    name: str | None = None
    to_caller: bool = False
    inside: list[Node] = field(default_factory=list)


class Refused(Exception):
    """The list has no meaning."""


class Times(ops.BasicOperation):
    """``x`` times an extra input."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **_: Any) -> Any:
        x, other = ops.maybe_dequantize(input_), basic_op_extra_inputs[0][0]
        basic_op_ctxs[0].save_for_backward(x, other)
        return x * other, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> Any:
        x, other = basic_op_ctxs[0].saved_tensors
        return grad_output * other, [()], [(grad_output * x,)]


BLOCKS: dict[str, Callable[..., Any]] = {"ops": ops.Sequential, "fusible": fusible.Sequential, "residual": fusible.Residual}


def weight(seed: int) -> Tensor:
    """A permutation with a sign: products by it stay as large as they are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(WIDTH)[torch.randperm(WIDTH, generator=generator)] * (1 - 2 * torch.randint(2, (WIDTH, 1), generator=generator))


def built(node: Node, made: dict[int, Any]) -> Any:
    """The module of a node; one node at two places is one module."""
    if id(node) not in made:
        made[id(node)] = _built(node, made)
    return made[id(node)]


def _built(node: Node, made: dict[int, Any]) -> Any:
    if node.kind in BLOCKS:
        return BLOCKS[node.kind](*(built(each, made) for each in node.inside))
    if node.kind == "scale":
        return ops.ConstantScale(float(node.number))
    if node.kind == "linear":
        layer = ops.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(weight(node.number))
        return layer
    if node.kind == "make":
        return ops.MakeExtraOutput().set_extra_output_channel(0, node.name, output_to_caller=node.to_caller)
    return (ops.AddExtraInput if node.kind == "add" else Times)().set_extra_input_channel(0, node.name)


class Interpreter:
    """What a list means: each block has the names that are given in it; they are seen in it and in blocks within, once they have been given."""

    def __init__(self, extra: Sequence[Tensor], weights: dict[int, Tensor]) -> None:
        self.extra, self.outputs, self.weights = list(extra), list[Tensor](), weights

    def run(self, block: Node, x: Tensor, around: list[tuple[set[str], dict[str, Tensor]]]) -> Tensor:
        names = [each.name for each in block.inside if each.kind == "make" and each.name is not None]
        if len(set(names)) < len(names):
            raise Refused
        scopes = [*around, (set(names), {})]
        y = x
        for node in block.inside:
            if node.kind == "scale":
                y = node.number * y
            elif node.kind == "linear":
                y = y @ self.weights[id(node)].T
            elif node.kind == "make":
                if node.name is not None:
                    scopes[-1][1][node.name] = y
                if node.name is None or node.to_caller:
                    self.outputs.append(y)
            elif node.kind in BLOCKS:
                y = self.run(node, y, scopes)
            else:
                other = self.extra.pop(0) if node.name is None else self.value(node.name, scopes)
                y = y + other if node.kind == "add" else y * other
        return x + y if block.kind == "residual" else y

    def value(self, name: str, scopes: list[tuple[set[str], dict[str, Tensor]]]) -> Tensor:
        for names, values in reversed(scopes):
            if name in names:
                if name not in values:
                    raise Refused
                return values[name]
        raise Refused


def leaves(node: Node) -> list[Node]:
    """The operations in the order in which they run."""
    return [leaf for each in node.inside for leaf in (leaves(each) if each.kind in BLOCKS else [each])]


def generated(seed: int, *, outer: str | None = None, wild: bool = False, torch_ops: bool = True) -> Node:
    """A list. ``outer``: the outermost container. ``wild``: names are drawn without looking, so that most lists have no meaning. ``torch_ops``:
    whether operations in plain torch, and extra outputs for the caller, are among them."""
    draw = random.Random(seed)
    kind = outer or draw.choice(list(BLOCKS))
    spare: list[Node] = []

    def block(kind: str, depth: int, seen: list[str]) -> Node:
        own: list[str] = []
        inside: list[Node] = []
        for _ in range(draw.randint(2, 7)):
            choice = draw.choice(["scale", "linear", "make", "make", "take", "take", "take", "block"])
            known = own + seen
            if choice == "make":
                free = [name for name in "abc" if wild or name not in own]
                public = torch_ops and draw.random() < 0.15
                if free:
                    own.append(draw.choice(free))
                    inside.append(Node("make", name=own[-1], to_caller=public))
            elif choice == "take" and (wild or known):
                name: str | None = draw.choice(list("abc") if wild else known)
                if draw.random() < 0.1:
                    name = None
                inside.append(Node("times" if torch_ops and draw.random() < 0.1 else "add", name=name))
            elif choice == "block" and depth < 3:
                if spare and not wild and draw.random() < 0.3:
                    inside.append(draw.choice(spare))  # takes names of its own block alone, so it may stand anywhere
                    continue
                alone = draw.random() < 0.4
                made = block(draw.choice(list(BLOCKS)), depth + 1, [] if alone else known)
                inside.append(made)
                if alone:
                    spare.append(made)
            else:
                inside.append(Node("linear", number=draw.randint(0, 99)) if choice == "linear" else Node("scale", number=draw.choice([-2, -1, 2, 3])))
        return Node(kind, inside=inside or [Node("scale", number=2)])

    return block(kind, 0, [])
