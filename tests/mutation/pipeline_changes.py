"""Wrong pipelines: one change at a time in the source of plans, fusions, scaling state, weights' 8-bit copies and replay; and samples of them.

Beside the operators, constants and calls that ``source`` changes in kernels there is what code of this kind gets wrong: a part left out of a key, an
attribute that is not kept, an argument that is not passed on, an operand of a condition that is not asked, a lock that is not taken.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from source import Changer

__all__ = ["FILES", "ROOT", "Mutation", "changed_source", "mutations", "sample"]

ROOT = Path(__file__).parents[2]

FILES = (
    # plans
    *(f"compute_pipeline/{name}.py" for name in ("execution", "explain", "inference", "matching", "pipeline", "plan", "regions", "request", "results",
      "sharded_rows", "sides", "partial_pass")),
    *(f"pytorch/engine/{name}.py" for name in ("runner", "bound", "batch", "borders", "call", "call_inputs", "chain", "channels", "fast_path")),
    "pytorch/ops/fuser.py",
    # fusions
    *(f"fusions/{name}.py" for name in ("add_activation", "gelu_mmt", "high_precision", "make_extra", "mmt_add", "mmt_gelu", "mmt_scale",
      "registry")),
    # scaling state, and how checkpoints hold it
    "quantized/state.py", "pytorch/engine/scaling.py", "pytorch/checkpoint.py",
    # weights in 8 bits: copies, fingerprints, and those that are held so alone
    "pytorch/engine/weights.py", "pytorch/quantized_parameters.py", "tex/backends/cpu/fingerprint.py",
    # replay
    *(f"pytorch/engine/{name}.py" for name in ("executors", "listing", "native_programs", "replay", "steps")),
    "tex/interface/kernel_calls.py", "tex/interface/specialize.py", "tex/backends/cpu/kernel_calls.py", "tex/backends/cpu/layouts.py",
)  # fmt: skip
"""Below ``src/fusible``. ``pytorch/engine/xla_executor.py`` and ``pytorch/engine/compiled.py`` are other roads to the same
plans, by other compilers."""


@dataclass(frozen=True)
class Mutation:
    """The change number ``place`` of a function's source. ``lines``: where it is; ``around``: the function. The text, which tells it from all others,
    has no line numbers."""

    file: str
    function: str
    place: int
    what: str
    lines: tuple[int, int]
    around: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.file} | {self.function} | {self.what}"


class _PipelineChanger(Changer):
    """Also changes what refuses, and what only such code has: keys, attributes, keywords, locks."""

    def __init__(self, wanted: int | None) -> None:
        super().__init__(wanted)
        self.lines: list[tuple[int, int]] = []

    def _here(self, node: Any, what: str) -> bool:
        self.lines.append((node.lineno, node.end_lineno))
        return super()._here(node, what)

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.Raise | ast.arguments | ast.JoinedStr) or _invariant(node):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node
        if isinstance(node, ast.FunctionDef):
            node.body = [self.visit(statement) for statement in node.body]
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
            return node
        for change in (self._changed, self._left_out, self._other):
            if (changed := change(node)) is not None:
                return changed
        return self.generic_visit(node)

    def _left_out(self, node: Any) -> Any:
        """A part of a key, an operand, a keyword, a condition of a comprehension, an end of a slice."""
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
            return self._without(node, node.elts)
        if isinstance(node, ast.Call):
            return self._without(node, node.keywords)
        if isinstance(node, ast.BoolOp):
            return self._without(node, node.values)
        if isinstance(node, ast.comprehension):
            return self._without(node, node.ifs, of=node.iter)
        if isinstance(node, ast.Dict) and len(node.keys) > 1:
            for i, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
                if self._here(value, f"without {ast.unparse(key) if key else '**'} in {ast.unparse(node)}"):
                    del node.keys[i], node.values[i]
                    return node
        if isinstance(node, ast.Slice):
            for name in ("lower", "upper"):
                if (end := getattr(node, name)) is not None and self._here(end, f"no {name} end in {ast.unparse(node)}"):
                    setattr(node, name, None)
                    return node
        return None

    def _without(self, node: Any, parts: list[Any], of: Any = None) -> Any:
        for i, part in enumerate(parts):
            if not _invariant(part) and self._here(of or node, f"without {ast.unparse(part)}"):
                del parts[i]
                return node.values[0] if isinstance(node, ast.BoolOp) and len(parts) == 1 else node
        return None

    def _other(self, node: Any) -> Any:
        if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple) and self._here(node, "not assigned"):
            return ast.Pass()
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            other = ast.NotIn if isinstance(node.ops[0], ast.In) else ast.In
            if self._here(node, other.__name__):
                node.ops[0] = other()
                return node
        if isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
            if self._here(node.items[0].context_expr, "not entered"):
                return ast.If(ast.Constant(True), node.body, [])
        if isinstance(node, ast.While | ast.Delete) and self._here(node.test if isinstance(node, ast.While) else node, "dropped"):
            return ast.Pass()
        if isinstance(node, ast.Break | ast.Continue) and self._here(node, "otherwise"):
            return ast.Continue() if isinstance(node, ast.Break) else ast.Break()
        return None


def _invariant(node: Any) -> bool:
    """What only checks ourselves: ``assert``, and ``zip(..., strict=True)``."""
    return isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict")


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "src/fusible" / file).read_text())


def _functions(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Functions and methods with their qualified names; those inside of a function belong to it."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            yield f"{name}{part.name}", part
        elif isinstance(part, ast.ClassDef):
            yield from _functions(part, f"{name}{part.name}.")


def _wrong(definition: ast.FunctionDef, place: int | None) -> _PipelineChanger:
    changer = _PipelineChanger(place)
    changer.visit(definition)
    return changer


def mutations(file: str) -> dict[str, list[Mutation]]:
    """By function every change of it."""
    found: dict[str, list[Mutation]] = {}
    for name, definition in _functions(_tree(file)):
        changer = _wrong(copy.deepcopy(definition), None)
        times = Counter[str]()
        around = definition.lineno, definition.end_lineno
        every = []
        for place, (what, lines) in enumerate(zip(changer.found, changer.lines, strict=True)):
            times[what] += 1
            every.append(Mutation(file, name, place, what if times[what] == 1 else f"{what} ({times[what]})", lines, around))
        if every:
            found[f"{file} {name}"] = every
    return found


def changed_source(mutation: Mutation) -> str:
    """The file with the change."""
    tree = copy.deepcopy(_tree(mutation.file))
    (definition,) = [node for name, node in _functions(tree) if name == mutation.function][:1]
    _wrong(definition, mutation.place)
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(count: int, seed: int) -> list[Mutation]:
    """``count`` mutations, one of each function in turn. Those of a function, and the order of the functions, follow from the seed and from their own
    text: another line elsewhere changes nothing."""
    left = [sorted(every, key=partial(_draw, seed)) for file in FILES for every in mutations(file).values()]
    left.sort(key=lambda every: _draw(seed, f"{every[0].file} {every[0].function}"))
    chosen: list[Mutation] = []
    while left and len(chosen) < count:
        for every in left:
            if len(chosen) < count:
                chosen.append(every.pop())
        left = [every for every in left if every]
    return chosen


def _draw(seed: int, what: Any) -> bytes:
    return hashlib.sha256(f"{seed} {what}".encode()).digest()
