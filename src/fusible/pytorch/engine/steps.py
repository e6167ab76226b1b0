"""The calls of a pass as data, and as a Python function with a line for each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fusible.tex.calls.call_text import compiled_once
from fusible.tex.interface.kernel_calls import KernelCalls

__all__ = ["Run", "Step", "last_uses", "taken", "written"]

Run = Callable[[list[Any]], list[Any]]


class Step(NamedTuple):
    """``call(*values of sources)`` is put into ``target``, of which parts go on to other places: ``(what to write after it, place)``.

    ``specialized``: what may be done instead. ``assembles``: the call only puts its arguments together, for others to take. ``kernels``: what the
    call comes to, where it is no more than calls of native kernels.
    """

    call: Callable[..., Any]
    sources: tuple[int, ...]
    target: int
    parts: tuple[tuple[str, int], ...] = ()
    specialized: Step | None = None
    assembles: bool = False
    kernels: KernelCalls | None = None

    def as_specialized(self) -> Step:
        return self if self.specialized is None else self.specialized._replace(parts=self.parts)

    @property
    def places(self) -> tuple[int, ...]:
        """Where something is put."""
        return (self.target, *(place for _, place in self.parts))


def written(steps: Sequence[Step], constants: Mapping[int, Any], inputs: Sequence[int], outputs: Sequence[int]) -> Run:
    """The function that makes the calls of ``steps``: it takes the list of what is at the places ``inputs``, which it empties, and gives that of
    ``outputs``. ``constants``: what is at their places."""

    def name(place: int) -> str:
        return f"k{place}" if place in constants else f"v{place}"

    read = {*outputs, *(source for step in steps for source in step.sources)}
    lines = ["def run(inputs):"]
    if inputs:
        lines += [f"    {''.join(f'v{place}, ' for place in inputs)}= inputs", "    inputs.clear()"]
        lines += [f"    del v{place}" for place in inputs if place not in read]
    for number, (step, ends) in enumerate(zip(steps, last_uses(steps, {*outputs, *constants}), strict=True)):
        lines.append(f"    v{step.target} = c{number}({', '.join(map(name, step.sources))})")
        lines += [f"    v{place} = v{step.target}{part}" for part, place in step.parts]
        if ends:
            lines.append(f"    del {', '.join(map(name, ends))}")
    lines.append(f"    return [{', '.join(map(name, outputs))}]")
    names = {f"k{place}": value for place, value in constants.items()} | {f"c{number}": step.call for number, step in enumerate(steps)}
    return compiled_once("\n".join(lines) + "\n", f"{__file__}: pass", names)


def last_uses(steps: Sequence[Step], kept: Container[int]) -> list[list[int]]:
    """For each step the places, of those not ``kept``, that nobody reads after it."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for place in (*step.sources, *step.places):
            last[place] = number
    ending: list[list[int]] = [[] for _ in steps]
    for place, number in last.items():
        if place not in kept:
            ending[number].append(place)
    return ending


def taken(steps: Sequence[Step], outputs: Iterable[int]) -> list[Step]:
    """``steps`` without those that put together what nobody takes."""
    wanted = {*outputs}
    found: list[Step] = []
    for step in reversed(steps):
        if not step.assembles or step.target in wanted:
            found.append(step)
            wanted.update(step.sources)
    return found[::-1]
