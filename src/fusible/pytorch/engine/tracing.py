"""Modules within a call that ``torch.compile`` traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.engine.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.engine.chain import ChainCall, ChainPart, check_extra_inputs
from fusible.pytorch.engine.compiled import breaks_graph, traced_call, trains_quantized
from fusible.pytorch.engine.lowered import is_exporting, is_lowered, lowered_call

__all__ = ["TracedRun"]


class TracedRun(ChainPart):
    """Modules whose ops are the ``part``-th pipeline of ``owner``, as what a compiler traces calls it: ``traced_call``, or as it is where that breaks
    the graph (``breaks_graph``). ``outside``: what it follows outside of every ``autocast``."""

    clears_padding = True

    def __init__(self, owner: Any, part: int, modules: Sequence[Any], outside: autocast | None = None) -> None:
        self._owner, self._part, self._modules, self._outside = owner, part, modules, outside

    @property
    def public_extra_inputs(self) -> int:
        return sum(module.public_extra_inputs for module in self._modules)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        check_extra_inputs(self.public_extra_inputs, len(extra), type(self._owner).__name__)
        if call.keywords:
            do = "leave them out, or the operation out of the compiled part"
            raise ArgumentError(expected("no keyword arguments of operations", of="a call that torch.compile traces", got="some", do=do))
        context = current_autocast()
        context = self._outside if self._outside is not None and context is OUTSIDE else context
        if is_exporting() and is_lowered(runner := self._owner.pipeline(self._part), context):
            return lowered_call(runner, x, extra, call, context)
        key, holders = context.key, [holder for module in self._modules for holder in module.holders()]
        if breaks_graph(self._owner._handle, self._part, key) or trains_quantized(holders):
            from fusible.pytorch.engine.untraced import call_as_it_is  # noqa: PLC0415 - for what it costs: it brings the compiler, which is there by now

            return call_as_it_is(self._owner, self._part, x, extra, call)
        return traced_call(self._owner, self._part, holders, x, extra, call.seq_lens, call.cache, key)[0]
