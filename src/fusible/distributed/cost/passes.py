"""Running the passes of a plan on tensors that have shapes alone: what they keep for backward, and how much they hold at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fusible import nvte, tex
from fusible.compute_pipeline import Plan, quantize_args, run_backward, run_forward
from fusible.nvte import te_to_torch_dtype
from fusible.nvte.flatten import flatten_storage
from fusible.ops import Op
from fusible.quantized import QuantizedTensorStorage

__all__ = ["PassMemory", "pass_memory"]

_LONGEST = 128
"""Of the sequences on which a plan is run: what passes keep depends on the number of tokens alone, and short sequences are quickly walked."""


class PassMemory(NamedTuple):
    """Bytes that the passes of a plan hold. ``copies``: of parameters in the types of the products, whether before the passes or by them. ``kept``:
    from forward to backward, x among it, without parameters and their copies. ``y``: the result. ``backward``: the most that backward holds at
    once, what is still kept, ``dy`` and the gradients of parameters among it. ``written``: by both passes, all in all."""

    copies: int
    kept: int
    y: int
    backward: int
    written: int


@cache
def pass_memory(plan: Plan, rows: int, gathered: int = 1) -> PassMemory:
    """What the passes of ``plan`` hold on ``rows`` rows of x, ``gathered`` times as many where columns are shared out."""
    (forward,), (backward,) = plan.segments[0].forward, plan.segments[0].backward
    scales = {slot: torch.ones(1, dtype=torch.float32, device="meta") for slot in (*plan.state.forward, *plan.state.backward)}
    parameters, alive = _parameters(plan), _Alive()
    alive.leave_out(_tensors([*parameters, *scales.values()]))
    with alive.watching():
        args, quantized = list(parameters), quantize_args([parameters[arg.place] for arg in plan.quantized_args], plan.quantized_args, scales)[0]
    for arg, value in zip(plan.quantized_args, quantized, strict=True):
        args[arg.place] = value
    x = _empty((rows, plan.request.width), plan.activation)
    length = math.gcd(rows * gathered, _LONGEST)
    tokens = nvte.Sequences.equal(rows * gathered // length, length, x)
    alive.add(_tensors(x))
    with alive.watching():
        result = run_forward(plan, forward, x, args, {"sequences": tokens}, scales)
    contexts, y = result.contexts, sum(tensor.nbytes for tensor in _tensors(result.y))
    dy = _empty(tuple(result.y.shape), plan.activation)
    del result, x
    own = [ctx[name] for op, ctx in zip(plan.ops, contexts, strict=True) for name in op.arg_names if name in ctx]
    copies = alive.leave_out(_tensors([*quantized, *own]))
    kept = alive.now
    alive.add(_tensors(dy))
    with alive.watching():
        run_backward(plan, backward, contexts, dy, {"sequences": tokens}, scales)
    return PassMemory(copies, kept, y, alive.most, alive.written)


class _Alive:
    """The memory of results of tex calls that is in use: by its storages, which it refers to weakly."""

    def __init__(self) -> None:
        self._alive: dict[StorageWeakRef, int] = {}
        self._known: set[StorageWeakRef] = set()
        self.most = self.written = 0

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count the memory of these, which must live on, no more: the bytes of it that were counted."""
        places = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        self._known |= places
        return sum(self._alive.pop(place, 0) for place in places)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            place = StorageWeakRef(storage)
            if place not in self._known and place not in self._alive:
                self._alive[place] = storage.nbytes()
                self.written += storage.nbytes()
        self.most = max(self.most, self.now)

    @property
    def now(self) -> int:
        self._alive = {place: nbytes for place, nbytes in self._alive.items() if not place.expired()}
        return sum(self._alive.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.most = 0
        with tex.listening(lambda call: self.add(_tensors(call.result))):
            yield


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a tex call, or a pass, returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nvte.Tensor):
        yield from _tensors(value.data)
    elif isinstance(value, QuantizedTensorStorage):
        yield from flatten_storage(value)[0]
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _parameters(plan: Plan) -> list[nvte.Tensor]:
    """The parameters of all ops, in the types in which they come."""
    stored = (type for args in plan.request.args for type, _ in args)
    return [_empty(tuple(getattr(op, name).shape), type) for (op, name), type in zip(_names(plan), stored, strict=True)]


def _names(plan: Plan) -> list[tuple[Op, str]]:
    return [(op, name) for op in plan.ops for name in op.arg_names]


def _empty(shape: tuple[int, ...], type: Any) -> nvte.Tensor:
    return nvte.make_nvte_tensor(torch.empty(shape, dtype=te_to_torch_dtype(type), device="meta"))
