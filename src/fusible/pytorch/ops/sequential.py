"""``Sequential``: operations and other modules one after another, fused where operations stand side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, OutOfRangeError, expected
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.chain import ChainCall, Passage, go_through
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.tracing import TracedRun
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.modules.sequential import Chain, Container
from fusible.pytorch.ops.fuser import OperationFuser
from fusible.pytorch.ops.op import BasicOperation
from fusible.quantized import Recipe

__all__ = ["Sequential"]


_Member = tuple[BaseModule, tuple[int, ...]]


class Sequential(Chain):
    """``Sequential(*modules)`` or ``Sequential({name: module})``: as ``nn.Sequential``, with operations fused and extra tensors passed along.

    ``forward(x, *extra_inputs, op_kwargs=None, seq_lens=None, cache=None)``: the extra inputs of its operations, in order; ``op_kwargs[operation or
    index]``: keyword arguments for that operation's ``op_forward``. Returns ``y``, or a tuple of it and the extra outputs in order. Nested
    Sequentials, and Fusible's own modules, join the pipeline. A module that is none of these, or that has hooks, is called on its own.

    ``seq_lens`` and ``cache`` are those of ``fusible.Sequential``. Where operations stand beside attention, or with either, ``x`` is a batch in one
    of the forms that ``fusible.Sequential`` takes, and so are extra tensors that have a row for each of its rows; else ``x`` may have any dimensions.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
        seq_lens: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        parts = self._traced() if torch.compiler.is_compiling() else self._arranged()
        if len(parts) == 1 and not extra_inputs and not op_kwargs and isinstance(parts[0], OperationFuser):
            return parts[0](x, seq_lens=seq_lens, cache=cache)
        keywords = self._kwargs_by_operation(op_kwargs) if op_kwargs else {}
        passage = Passage("a Sequential", parts, x, extra_inputs, ChainCall(seq_lens, cache, keywords))
        return go_through(passage, parts)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, *extra, seq_lens=call.seq_lens, cache=call.cache)

    def _traced(self) -> list[Any]:
        parts = enumerate(self._parts())
        return [TracedRun(self, i, [module for module, _ in part]) if isinstance(part, list) else part for i, part in parts]

    @property
    def _module_groups(self) -> list[Any]:
        """The fusers and other modules that a call goes through, by the name that NVIDIA's examples look at."""
        return self._arranged()

    def _called(self, part: Any) -> Any:
        return self._runner(_bound(part)) if isinstance(part, list) else part

    def _parts(self) -> list[Any]:
        """Runs of modules whose ops join one pipeline, as lists of each with the containers in which it stands; other modules as themselves."""
        return self._runs(Sequential, _placed)

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        return [_bound(part) for part in self._parts() if isinstance(part, list)]

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> OperationFuser:
        modules = next(part for part in self._parts() if isinstance(part, list) and _bound(part) == bound)
        return OperationFuser([module for module, _ in modules], executor=self._executor, blocks=[block for _, block in modules])

    def _kwargs_by_operation(self, op_kwargs: Mapping[Any, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        children = list(self._chain())
        found: dict[int, dict[str, Any]] = {}
        for key, kwargs in op_kwargs.items():
            inside = isinstance(key, int) and -len(children) <= key < len(children)
            op = children[key] if inside else key
            if not isinstance(op, BasicOperation) or not any(op is known for known in self.modules()):
                of, do = "a key of op_kwargs", "name one of the Sequential's own"
                refused = OutOfRangeError if isinstance(key, int) and not inside else ArgumentError
                raise refused(expected("a basic operation in the Sequential, or its index", of=of, got=repr(key), do=do))
            found[id(op)] = kwargs
        return found

    def explain(self, x: torch.Tensor | None = None, *, recipe: Recipe | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a training call would do under a recipe, group by group: the operations, the fused passes, the type on every edge, the quantizers, and
        which fusions nearly matched and why they did not. ``x``: an input for the first group, where its operations do not tell its shape."""
        texts = []
        parts = self._arranged()
        for number, part in enumerate(parts, 1):
            heading = f"group {number} of {len(parts)}: "
            if isinstance(part, OperationFuser):
                names = ", ".join(op._get_name() for op in part.basic_ops)
                texts.append(f"{heading}{names}\n{part.explain(x if number == 1 else None, recipe)}")
            else:
                texts.append(f"{heading}{type(part).__name__}, called on its own")
        return "\n\n".join(texts)

    def _new(self, *modules: Any) -> Sequential:
        return Sequential(*modules)

    def _addends(self, modules: Any, sign: str) -> list[nn.Module]:
        return list(modules) if isinstance(modules, Iterable) else super()._addends(modules, sign)


def _placed(module: BaseModule, at: tuple[int, ...], place: int) -> list[_Member]:
    return [(module, (*at, place) if isinstance(module, Container) else at)]


def _bound(modules: Iterable[_Member]) -> tuple[BoundOp, ...]:
    return tuple(bound.within(block) for module, block in modules for bound in module.bound_ops())
