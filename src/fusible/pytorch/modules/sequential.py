"""``Sequential`` and ``Residual``: modules made of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, with_rows
from fusible.pytorch.engine.chain import ChainCall, Passage, go_through
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.tracing import TracedRun
from fusible.pytorch.modules.base import BaseModule, has_hooks, hooks_of
from fusible.pytorch.modules.editing import ModuleListMethods, check_module

__all__ = ["Chain", "Container", "Residual", "Sequential", "bound_at", "is_open"]


class Container(BaseModule):
    """Children in order. A child whose ops join the pipeline is *open*: it is one of ours and nobody has hooked it; any other is called as it is."""

    def __init__(self, *modules: Any) -> None:
        nn.Module.__init__(self)
        named: Iterable[tuple[str, nn.Module]] = ((str(i), module) for i, module in enumerate(modules))
        if len(modules) == 1 and isinstance(modules[0], dict):
            named = modules[0].items()
        for name, module in named:
            check_module(module, type(self).__name__)
            self.add_module(name, module)
        super().__init__()

    @property
    def open(self) -> bool:
        """Whether this container's ops can be part of an enclosing pipeline."""
        return all(is_open(child) for child in self._chain())

    def _chain(self) -> Iterator[nn.Module]:
        """The modules in order; one that stands at several places comes at each."""
        return (module for module in self._modules.values() if module is not None)

    def bound_ops(self) -> Iterator[BoundOp]:
        for place, child in enumerate(self._chain()):
            assert isinstance(child, BaseModule)
            yield from bound_at(child, (), place)

    def holders(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        # Of the modules, not of the ops: an operation that nobody has called yet has none, and a compiler that traces cannot make one.
        return [holder for child in self._chain() if isinstance(child, BaseModule) for holder in child.holders()]

    @property
    def public_extra_inputs(self) -> int:
        return sum(child.public_extra_inputs for child in self._chain() if isinstance(child, BaseModule))

    def compile(self, executor: str = "xla"):
        super().compile(executor)
        for child in self._chain():
            if isinstance(child, BaseModule):
                child.compile(executor)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return self._chain()


def is_open(module: nn.Module) -> bool:
    """Whether a module's ops join the pipeline around it: it is one of ours, and nobody has hooked it."""
    return isinstance(module, BaseModule) and not has_hooks(module) and module.open


def bound_at(module: BaseModule, at: tuple[int, ...], place: int) -> Iterator[BoundOp]:
    """A module's ops where it stands at a place of the container ``at``: a container is a block, to whose operations its channels belong."""
    block = (*at, place) if isinstance(module, Container) else at
    return (bound.within(block) for bound in module.bound_ops())


def _alone(module: BaseModule, *_: Any) -> Sequence[Any]:
    return [module]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What a container calls, one after another; with the children and hooks from which that follows, to see whether it still holds."""

    parts: list[PipelineRunner | nn.Module]
    hooks: tuple[Mapping[Any, Any], ...]
    children: tuple[tuple[Mapping[str, Any], tuple[Any, ...]], ...]

    @classmethod
    def of(cls, container: nn.Module, parts: list[Any]) -> Arrangement:
        inside = list(container.modules())
        hooks = tuple(hooks for module in inside[1:] for hooks in hooks_of(module))
        return cls(parts, hooks, tuple((module._modules, tuple(module._modules.values())) for module in inside if module._modules))

    def holds(self) -> bool:
        """Whether nothing has changed; never while any module inside is hooked, and it is not kept when made then."""
        return not any(self.hooks) and all(tuple(now.values()) == then for now, then in self.children)


class Chain(ModuleListMethods, Container):
    """Base of both ``Sequential``s: a list of modules. What a call goes through is kept until a child or a hook changes."""

    _arrangement: Arrangement | None = None

    def _parts(self) -> list[Any]:
        """Runs of modules whose ops join one pipeline, as lists, and other modules as themselves."""
        raise NotImplementedError

    def _runs(self, kind: type[Chain], of: Callable[..., Iterable[Any]], at: tuple[int, ...] = ()) -> list[Any]:
        """``_parts``, whose lists have what ``of(child, at, place)`` gives of each open child. Chains of the ``kind`` inside are gone through."""
        parts: list[Any] = []
        for place, child in enumerate(self._chain()):
            if isinstance(child, kind) and not has_hooks(child):
                inner = child._runs(kind, of, (*at, place))
            else:
                inner = [list(of(child, at, place))] if is_open(child) else [child]
            for part in inner:
                if isinstance(part, list) and parts and isinstance(parts[-1], list):
                    parts[-1] += part
                elif not isinstance(part, list) or part:
                    parts.append(part)
        return parts

    def _called(self, part: Any) -> Any:
        """One of ``_parts`` as a call goes through it."""
        raise NotImplementedError

    def _arranged(self) -> list[Any]:
        arrangement = self._arrangement
        if arrangement is None or not arrangement.holds():
            arrangement = Arrangement.of(self, [self._called(part) for part in self._parts()])
            self._arrangement = arrangement if arrangement.holds() else None
        return arrangement.parts

    def pipeline(self, part: int) -> PipelineRunner:
        return self._arranged()[part]

    def forget_plans(self) -> None:
        super().forget_plans()
        self._arrangement = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_arrangement": None}


class Sequential(Chain):
    """``Sequential(*modules)`` or ``Sequential({name: module})``: one fused pipeline of all its modules' ops, nested ones included.

    A module that is none of Fusible's, or that has hooks, is called between two pipelines. Scaling state of nested modules lives here, with the
    outermost Sequential that is called. It has the methods of a list, as ``torch.nn.Sequential`` has them.
    """

    def forward(
        self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None, *, extra_inputs: Sequence[torch.Tensor] = ()
    ) -> Any:
        parts = self._traced() if torch.compiler.is_compiling() else self._arranged()
        if len(parts) == 1 and isinstance(parts[0], PipelineRunner):
            return parts[0](x, seq_lens, cache, extra_inputs)
        passage = Passage(type(self).__name__, parts, x, extra_inputs, ChainCall(seq_lens, cache))
        return go_through(passage, parts)

    def _called(self, part: Any) -> Any:
        return self._runner(tuple(part)) if isinstance(part, list) else part

    def _traced(self) -> list[Any]:
        return [TracedRun(self, i, part) if isinstance(part, list) else part for i, part in enumerate(self._runs(Sequential, _alone))]

    def explain(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> str:
        texts = []
        for part in self._parts():
            if isinstance(part, list):
                runner = self._runner(tuple(part))
                texts.append(runner.explain(x, seq_lens))
                width = runner.out_width(x.shape[-1])
                if width is None:
                    texts.append("what follows is not explained: the width of its input is not known before a call")
                    break
                x = x.new_empty((*x.shape[:-1], width))
            elif isinstance(part, BaseModule):
                texts.append(f"{type(part).__name__}, called with its hooks\n{part.explain(x, seq_lens)}")
            else:
                texts.append(f"{type(part).__name__}, a module of its own; what follows is not explained")
                break
        return "\n\n".join(texts)

    def _new(self, *modules: Any) -> Sequential:
        return Sequential(*modules)

    def _parts(self) -> list[Any]:
        return [list(with_rows(part)) if isinstance(part, list) else part for part in self._runs(Sequential, bound_at)]

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        return [tuple(part) for part in self._parts() if isinstance(part, list)]

    def _runner(self, bound: tuple[BoundOp, ...] | None = None):
        if bound is None:
            parts = self._parts()
            bound = tuple(parts[0]) if len(parts) == 1 and isinstance(parts[0], list) else None
        return super()._runner(bound)


class Residual(Container):
    """``y = x + body(x)`` with the body a chain of modules: ``Residual(LayerNorm(h), Linear(h, h))``."""

    reads_whole_parts = True

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self._begin, self._end = ops.ResidualBegin(), ops.ResidualEnd()

    def bound_ops(self) -> Iterator[BoundOp]:
        yield BoundOp(self._begin, self, ())
        yield from super().bound_ops()
        yield BoundOp(self._end, self, ())

    def exchanged(self, ops: Mapping[Op, Op]) -> dict[str, Any]:
        return {**super().exchanged(ops), "_begin": ops.get(self._begin, self._begin), "_end": ops.get(self._end, self._end)}

    def holders(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        return [(self, ()), *super().holders(), (self, ())]

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        return super()._pipelines() if self.open else []

    def forward(
        self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None, *, extra_inputs: Sequence[torch.Tensor] = ()
    ) -> Any:
        if self.open:
            return super().forward(x, seq_lens, cache, extra_inputs=extra_inputs)
        parts = list(self._chain())
        passage = Passage(type(self).__name__, parts, x, extra_inputs, ChainCall(seq_lens, cache))
        return go_through(passage, [*parts, lambda y: x + y])
