"""Interrupts at any bytecode: what a ``KeyboardInterrupt`` leaves behind must be the state before a call or the state after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch


class _Tracer:
    """Counts the bytecodes of Python code, and raises at one of them; once, for Python drops a trace function that raises."""

    def __init__(self, at: int | None = None) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self


def _apart(call: Callable[[], Any]) -> Iterator[Any]:
    """A generator knows by itself which errors are being handled: one that an interrupt leaves there, at the very end of an ``except``, goes with it,
    and is not taken for the context of each later error of this thread."""
    yield call()


def traced(call: Callable[[], Any], at: int | None = None) -> tuple[int, bool]:
    """Call; interrupted at the ``at``-th bytecode. How many were run, and whether it was interrupted."""
    tracer, former = _Tracer(at), sys.gettrace()
    interrupted = False
    try:
        sys.settrace(tracer)
        next(_apart(call))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(former)
        torch.set_grad_enabled(True)  # torch's own no_grad leaves it off where an interrupt hits its entrance
    return tracer.count, interrupted


def same(a: Any, b: Any) -> bool:
    """Whether two states (tensors in dicts and lists, numbers) are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def check_interrupts(make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]], count: int, phase: int = 0) -> int:
    """``make() -> (call, state)``, anew each time and always alike. Interrupt the call at ``count`` bytecodes, evenly spread; each time its state is
    that before or that after. How many interrupts came before it, and after."""
    call, state = make()
    before = state()
    for _ in range(2):  # what the first call of a kind prepares for all others is not to be counted
        call, state = make()
        length, _ = traced(call)
    after = state()
    assert not same(before, after)
    done = hits = 0
    for i in range(count):
        call, state = make()
        at = 1 + (phase + i * length // count) % length
        hits += traced(call, at)[1]
        left = state()
        assert same(left, before) or same(left, after), f"an interrupt at bytecode {at} of {length}"
        done += same(left, after)
    assert hits >= count // 2  # calls differ by some bytecodes, and what hits a callback of the interpreter's is lost
    return done
