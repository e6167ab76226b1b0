"""``BaseModule``: a module that is a list of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.fusions import Fusion
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, key_of, note_change, with_rows, without_memory
from fusible.pytorch.engine.chain import ChainCall, ChainPart
from fusible.pytorch.engine.compiled import handle_of, holders_of
from fusible.pytorch.engine.executors import make_executor
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.parametrized import lacks_parameter
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.shares import Share
from fusible.pytorch.engine.tracing import TracedRun
from fusible.pytorch.modules.dictionaries import quantized_as
from fusible.pytorch.modules.stateful import KeptState, StatefulModule
from fusible.tex.calls.constructors import check_constructor

__all__ = ["BaseModule", "ParameterInitMethod", "has_hooks", "hooks_of"]

ParameterInitMethod = Callable[[torch.Tensor], torch.Tensor]
"""Fills a new parameter and returns it: ``init(torch.empty(...))``."""


class BaseModule(StatefulModule, ChainPart):
    """A module that decomposes into ops. A subclass calls ``nn.Module.__init__``, assigns its parameters, then ``super().__init__(*ops)``.

    ``None`` stands for an op that is switched off. Called on its own it runs its ops as a pipeline; inside a ``Sequential`` they join that one's.
    ``forward(x, seq_lens=None)`` takes ``x [tokens, hidden]`` with ``seq_lens`` ``[sequences]``, of integers, ``x [tokens, hidden]`` as one sequence,
    or ``x [batch, seq, hidden]``; the output has the input's form. ``x [batch, seq, hidden]`` with ``seq_lens [batch]``, or with a bool mask
    ``[batch, seq]`` of the tokens in its place, is padded behind each sequence: padding takes no part, and is 0 in the output and in gradients.
    ``cache`` (``KVCache``): the sequences go on from what it holds of them. ``extra_inputs``: where operations with extra tensors are inside, those
    that no channel feeds, in order; what comes back is then ``y``, or a tuple of it and the extra outputs that are the caller's, in order.
    """

    remakes_op: ClassVar[bool] = False
    """Whether it is one op that it makes anew when its options change."""
    shares: Mapping[str, Share] = {}
    """By the name of an op's parameter how the module holds it, where it holds the share of one process."""
    amax_group: Any = None
    """The processes that scale tensors together under delayed scaling, unless ``autocast`` names others."""
    init_methods: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    """By the name of a parameter of the module's own what fills a new tensor with its first values, and returns it."""
    _changes: int = 0
    """The number of times that it has made its op anew."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls)

    def __init__(self, *ops: Op | None) -> None:
        wrong = next((op for op in ops if op is not None and not isinstance(op, Op)), None)
        if wrong is not None:
            of, got = f"the ops of {type(self).__name__}", f"a {type(wrong).__name__}"
            raise ArgumentError(expected("instances of Op, or None", of=of, got=got, do="make an op and pass it"))
        there = [op for op in ops if op is not None]
        self._bound = tuple(BoundOp(without_memory(op), self, self._names(op), place=self._place(i)) for i, op in enumerate(there))
        self._ops = tuple(b.op for b in self._bound)
        self._executor = "eager"
        self._runners: dict[tuple[Any, ...], PipelineRunner] = {}
        self._set_aside: dict[tuple[Any, ...], PipelineRunner] = {}
        self._kept_states: tuple[KeptState, ...] = ()
        self._handed_out: dict[str, int] = {}
        self._unread = False
        self._handle = handle_of(self)

    def _place(self, index: int) -> int | None:
        """``BoundOp.place`` of one of its ops."""
        return None

    def _names(self, op: Op) -> tuple[str, ...]:
        names = {id(tensor): name for name, tensor in (*self._parameters.items(), *self._buffers.items())}
        missing = [name for name, arg in zip(op.arg_names, op.args, strict=True) if id(arg.data) not in names]
        if missing:
            what, got = f"parameters and buffers of {type(self).__name__} alone", f"others for {', '.join(missing)}"
            raise ArgumentError(expected(what, of=repr(op), got=got, do="assign them as nn.Parameter before calling BaseModule.__init__"))
        return tuple(names[id(arg.data)] for arg in op.args)

    @property
    def open(self) -> bool:
        """Whether its ops can be part of an enclosing pipeline: nothing inside has to be called on its own."""
        return True

    def bound_ops(self) -> Iterator[BoundOp]:
        """The module's ops, in order, with the parameters behind them."""
        yield from self._bound

    def local_ops(self) -> tuple[BoundOp, ...]:
        """The ops that are the module's own, without those of modules inside."""
        return self._bound

    def holders(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """For each op the module that holds its parameters, and their names there."""
        return holders_of(self.bound_ops())

    def current(self, bound: BoundOp) -> BoundOp:
        """The bound op that takes the place of ``bound`` now."""
        return bound if bound.place is None else self._bound[bound.place]

    def local_passes(self, position: int) -> tuple[tuple[int, int, Fusion], ...]:
        """The passes of its op, at a position in a pipeline, that are code of the caller's, as of ``PlanRequest.fused``."""
        return ()

    def forget_plans(self) -> None:
        """Let go of what was made for the ops as they are: pipelines, and what they hold. Scaling states are kept for those to come."""
        vars(self).update(_kept_states=self._kept(), _runners={}, _set_aside={})
        note_change()  # for a pipeline around the model that is about to change

    def exchanged(self, ops: Mapping[Op, Op]) -> dict[str, Any]:
        """The module's attributes with other ops in the place of some of its own. Every module around it must have forgotten its plans
        (``forget_plans``)."""
        bound = tuple(b._replace(op=ops.get(b.op, b.op)) for b in self._bound)
        return {"_ops": tuple(ops.get(op, op) for op in self._ops), "_bound": bound}

    def unstacked(self) -> dict[str, Any]:
        """The module's attributes with a parameter for each of several matrices that it holds as one, if there are such; else nothing."""
        return {}

    def forward(
        self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None, *, extra_inputs: Sequence[torch.Tensor] = ()
    ) -> Any:
        if torch.compiler.is_compiling():
            return TracedRun(self, 0, [self]).in_chain(x, extra_inputs, ChainCall(seq_lens, cache))
        return self._runner()(x, seq_lens, cache, extra_inputs)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, call.seq_lens, call.cache, extra_inputs=extra) if extra else self(x, call.seq_lens, call.cache)

    def pipeline(self, part: int) -> PipelineRunner:
        """The ``part``-th of the pipelines that a call of the module, as it now stands, goes through."""
        return self._runner()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module.register_parameter``. Raises ``ArgumentError`` for None in the place of a parameter that an op of the module takes."""
        if param is None and name in self._taken():
            raise lacks_parameter(self, name)
        super().register_parameter(name, param)

    def _taken(self) -> set[str]:
        """The names of the module's own parameters that its ops take; none before these are made."""
        taken = [name for b in vars(self).get("_bound", ()) if b.module is self for name in b.parameters]
        return {own for name in taken for own in (self.shares[name].names if name in self.shares else (name,))}

    def reset_parameters(self) -> None:
        """Draw the module's own parameters anew, in the order of ``init_methods``, as when it was made; those of modules inside stay as they are."""
        with torch.no_grad():
            for name, method in self.init_methods.items():
                parameter = self._parameters[name]
                if parameter is not None:
                    parameter.copy_(method(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)))

    def explain(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> str:
        """What a training call on ``x`` would do: the fused passes and the type on every edge, under the ``autocast`` in force."""
        return self._runner().explain(x, seq_lens)

    def compile(self, executor: str = "xla") -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run this module's passes by ``executor`` from now on: ``"xla"`` as one program per pass and input shape, ``"eager"`` kernel by kernel.

        Returns the module. Raises ``ArgumentError`` for an unknown executor.
        """
        make_executor(executor)
        self._executor = executor
        for runner in (*self._runners.values(), *self._set_aside.values()):
            runner.executor = make_executor(executor)
        return self

    def _runner(self, bound: tuple[BoundOp, ...] | None = None) -> PipelineRunner:
        bound = with_rows(self.bound_ops()) if bound is None else bound
        key = key_of(bound)
        runner = self._runners.get(key)
        if runner is None:
            self.arrange()
            runner = self._runners.get(key)
        if runner is None:  # none of those that a call goes through
            runner = self._runners[key] = self._new_runner(bound)
            runner.scaling.unread = self._unread
        return runner

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        return PipelineRunner(bound, self._executor)

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        return [with_rows(self.bound_ops())]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """``to``, ``to_empty``, ``half`` and the like call this. A quantized parameter stays quantized, with another nominal dtype."""
        for runner in self._runners.values():
            runner.release_weights()  # torch exchanges a quantized parameter by another, to which nothing else may refer
        return super()._apply(lambda tensor: quantized_as(tensor, fn(tensor)), recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runners": {}, "_set_aside": {}, "_kept_states": self._kept()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)

    def __repr__(self) -> str:
        text = super().__repr__()
        ops = " -> ".join(type(b.op).__name__ for b in self.bound_ops()) if not self._modules else ""
        return f"{text}: {ops}" if ops and ops != type(self).__name__ else text


def has_hooks(module: nn.Module) -> bool:
    """Whether a user has hooked the module's forward or backward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The module's tables of hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
