"""Wrong formulas: one change at a time in the source of what the reference runs for a function, which is then compared with float64 alone.

The changed code takes the place of the true one for every caller: a record whose expectation came from the reference itself would see nothing.
What only refuses bad calls is left as it is: samples are calls that are served.
"""

from __future__ import annotations

import ast
import builtins
import copy
import gc
import hashlib
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from behaviour import Mutant
from score import REFERENCE, caught, kept

import fusible.tex

__all__ = ["Change", "Changed", "Changer", "changed", "changes", "is_in_source", "limited"]

_TEX = Path(fusible.tex.__file__).parent
_ROOMS = ("backends/torch_backend", "formulas", "formats", "calls")
"""Where the code is that computes for the reference: its own, and what it has in common with lazy tensors and with callers."""
_PLUMBING = frozenset({
    "backends/torch_backend/gpu_products.py", "backends/torch_backend/operands.py", "calls/attention_query.py", "calls/index_relations.py",
    "calls/inference_tensors.py", "calls/layout.py", "calls/memory_checks.py", "calls/transaction.py",
})  # fmt: skip
"""Files there in which no result is computed on a CPU: they look at arguments and their memory, and answer what is served."""
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor",
    "zeros": "ones", "zeros_like": "ones_like", "sin": "cos", "cos": "sin", "add_": "sub_", "mul_": "div_", "mul": "div", "sqrt": "rsqrt",
    "rsqrt": "sqrt", "any": "all", "all": "any",
}  # fmt: skip
_DROPPED = frozenset({"abs", "neg", "clone", "contiguous", "sum", "float", "exp", "log", "square", "t", "flip", "relu", "tanh"})


@dataclass(frozen=True)
class Change:
    """The change number ``place`` of a function's source; printed as where and what."""

    path: str
    name: str
    place: int
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"

    @property
    def file(self) -> str:
        """The file, from ``fusible/tex`` on."""
        return str(Path(self.path).relative_to(_TEX))


class Changer(ast.NodeTransformer):
    """Counts the places where something can be changed, and changes the one asked for."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.count, self.found = wanted, 0, []

    def _here(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        self.found.append(f"{ast.unparse(node)} -> {what}")
        return self.count - 1 == self.wanted

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.Raise | ast.arguments | ast.AnnAssign) or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[-1].startswith("check"):
            return node
        changed = self._changed(node)
        return self.generic_visit(node) if changed is None else changed

    def _changed(self, node: Any) -> Any:
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and (other := _OPERATORS.get(type(node.op))):
            if self._here(node, other.__name__):
                node.op = other()
                return node
        if isinstance(node, ast.Compare) and (other := _OPERATORS.get(type(node.ops[0]))) and self._here(node, other.__name__):
            node.ops[0] = other()
            return node
        if isinstance(node, ast.If | ast.IfExp) and self._here(node.test, "not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            if self._here(node, str(value)):
                return ast.Constant(value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not) and self._here(node, "without"):
            return node.operand
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._here(node, "dropped"):
            return ast.Pass()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _NAMES and self._here(node, _NAMES[node.func.attr]):
                node.func.attr = _NAMES[node.func.attr]
                return node
            if node.func.attr in _DROPPED and not node.args and self._here(node, "dropped"):
                return node.func.value
        if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args[:2]):
            if self._here(node, "first two swapped"):
                node.args[:2] = node.args[1::-1]
                return node
        return None


_EITHER_ORDER = frozenset({
    "transpose", "min", "max", "minimum", "maximum", "swapaxes", "isinstance", "logical_and", "logical_or", "plus", "times",
})  # fmt: skip
"""Whose first two arguments may change places, or are no values."""


def _refuses(statement: ast.stmt) -> bool:
    """Whether a statement can but raise: calls of checks, and branches and loops of them."""
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func).split(".")[-1].lstrip("_").startswith("check")
    return isinstance(statement, ast.If | ast.For) and all(map(_refuses, [*statement.body, *statement.orelse]))


class KernelChanger(Changer):
    """Of a kernel: what is the same in either order is left as it is; ``refusals`` are the places in what only refuses."""

    def __init__(self, wanted: int | None) -> None:
        super().__init__(wanted)
        self.refusals: set[int] = set()

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return node
        first, refuses = self.count, isinstance(node, ast.stmt) and _refuses(node)
        after = super().visit(node)
        if refuses:
            self.refusals.update(range(first, self.count))
        return after

    def _here(self, node: ast.AST, what: str) -> bool:
        if what == "first two swapped" and ast.unparse(node.func).split(".")[-1] in _EITHER_ORDER:  # type: ignore[attr-defined]
            return False
        return super()._here(node, what)


class _Noter(KernelChanger):
    """Changes nothing: the code tells which of the places where it could be changed are reached."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(None)
        self._key = path, name
        self._places: dict[int, tuple[Any, range]] = {}

    def visit(self, node: Any) -> Any:
        first = self.count
        after = super().visit(node)
        return after if first == self.count or id(node) not in self._places else self._noting(node, self._places[id(node)][1])

    def _changed(self, node: Any) -> Any:
        first = self.count
        super()._changed(node)
        if first < self.count:
            self._places[id(node)] = node, range(first, self.count)

    def _noting(self, node: Any, places: range) -> Any:
        if isinstance(node, ast.If | ast.IfExp):
            node.test = self._after_note(node.test, places)
        elif isinstance(node, ast.Expr | ast.AugAssign):
            node.value = self._after_note(node.value, places)
        else:
            return self._after_note(node, places)
        return node

    def _after_note(self, node: Any, places: range) -> ast.expr:
        """The expression, with a note before it."""
        told: list[ast.expr] = [ast.Constant(x) for x in (*self._key, places.start, places.stop)]
        call = ast.Call(ast.Name(_NOTE, ast.Load()), told, [])
        return ast.Subscript(ast.Tuple([call, node], ast.Load()), ast.Constant(1), ast.Load())


_NOTE = "__note_of_a_place__"


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _definition(tree: ast.Module, name: str) -> Any:
    """The function of that qualified name, or None."""
    node: Any = tree
    for part in name.replace(".<locals>", "").split("."):
        inside = ast.walk(node) if node is not None else ()
        node = next((x for x in inside if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == part), None)
    return node


def _only_refuses(definition: Any) -> bool:
    """Whether a function gives nothing and is there to raise: a check of arguments."""
    parts = list(ast.walk(definition))
    gives = any((isinstance(x, ast.Return) and x.value is not None) or isinstance(x, ast.Yield | ast.YieldFrom) for x in parts)
    return not gives and "check" in definition.name


def _run(function: str) -> set[tuple[str, str]]:
    """The files and names of the functions that the reference runs for the samples of a record, nested ones as parts of what they stand in."""
    found: set[tuple[str, str]] = set()
    rooms = tuple(f"{_TEX / room}/" for room in _ROOMS)

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(rooms) and "<" not in code.co_name:
            found.add((code.co_filename, code.co_qualname))

    samples = [sample for dtype in kept(function).dtypes for sample in kept(function).samples(dtype)]
    sys.setprofile(note)
    try:
        for sample in samples:
            getattr(REFERENCE, function)(**sample.arguments)
    finally:
        sys.setprofile(None)
    return {
        (path, name)
        for path, name in found
        if str(Path(path).relative_to(_TEX)) not in _PLUMBING
        and "as_kernel" not in name
        and not any((path, outer) in found for outer in _around(name))
        and (definition := _definition(_tree(path), name)) is not None
        and not _only_refuses(definition)
        and _places(path, name).count
    }


def _places(path: str, name: str) -> KernelChanger:
    """What finds where a function can be changed, after it has."""
    changer = KernelChanger(None)
    _edited(copy.deepcopy(_definition(_tree(path), name)), changer)
    return changer


def _around(name: str) -> list[str]:
    """The qualified names of the functions that a nested one stands in."""
    parts = name.split(".<locals>.")
    return [".<locals>.".join(parts[:i]) for i in range(1, len(parts))]


def _edited(definition: Any, changer: Changer) -> None:
    definition.body = [changer.visit(statement) for statement in definition.body]


@cache
def changes(function: str) -> list[Change]:
    """The changes to what the suite's calls of a function come to in the reference, in an order that is the same while that source is the same."""
    run = _run(function)
    reached: set[tuple[str, str, int]] = set()
    setattr(builtins, _NOTE, lambda path, name, start, stop: reached.update((path, name, place) for place in range(start, stop)))
    noting = []
    for path in {path for path, _ in run}:
        tree = copy.deepcopy(_tree(path))
        names = sorted(name for where, name in run if where == path)
        for name in names:
            _edited(_definition(tree, name), _Noter(path, name))
        noting.append(Changed(path, tree, names))
    with ExitStack() as stack:
        for each in noting:
            stack.enter_context(each.applied())
        fault = caught(function, Mutant("none", lambda method: method))
    assert fault is None, f"{function} with notes: {fault}"
    every: list[tuple[bytes, Change]] = []
    for path, name in sorted(run):
        changer = _places(path, name)
        places = [place for place in range(changer.count) if (path, name, place) in reached and place not in changer.refusals]
        for place in places:
            key = hashlib.sha256(f"{function} {name}: {changer.found[place]} {place}".encode()).digest()
            every.append((key, Change(path, name, place, _numbered(changer.found, place))))
    return [change for _, change in sorted(every, key=lambda pair: pair[0])]


def _numbered(found: list[str], place: int) -> str:
    """What is changed there, with its number where the same is found before it."""
    number = found[: place + 1].count(found[place])
    return found[place] if number == 1 else f"{found[place]} ({number})"


def is_in_source(file: str, name: str, what: str) -> bool:
    """Whether there is such a change of the function of that qualified name, in a file from ``fusible/tex`` on."""
    path = str(_TEX / file)
    if not Path(path).exists() or _definition(_tree(path), name) is None:
        return False
    found = _places(path, name).found
    return what in (_numbered(found, place) for place in range(len(found)))


def changed(change: Change) -> Changed:
    """The change, compiled."""
    tree = copy.deepcopy(_tree(change.path))
    _edited(_definition(tree, change.name), KernelChanger(change.place))
    return Changed(change.path, tree, [change.name])


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


@cache
def _live(path: str) -> list[FunctionType]:
    """The functions whose code is of a file."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen is not among the objects
    found = [x for x in gc.get_objects() if type(x) is FunctionType and x.__code__.co_filename == path]
    if frozen:
        gc.freeze()
    return found


def _compiled(path: str, tree: ast.Module) -> dict[tuple[str, int], CodeType]:
    """The codes of a file, by name and line."""
    made = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, flags=annotations.compiler_flag)
    return {(x.co_qualname, x.co_firstlineno): x for x in _codes(made)}


def _place(function: FunctionType) -> tuple[str, int]:
    return function.__code__.co_qualname, function.__code__.co_firstlineno


class Changed:
    """Changed functions of a file, to be put in the place of the true ones and taken out: those of the names, what they stand in, and what stands in
    them."""

    def __init__(self, path: str, tree: ast.Module, names: list[str]) -> None:
        codes, around = _compiled(path, tree), {outer for name in names for outer in _around(name)}
        live = [x for x in _live(path) if _place(x)[0] in around or any(f"{_place(x)[0]}.".startswith(f"{name}.") for name in names)]
        # A closure keeps its variables: what no longer reads one of them mentions it.
        lost = {_place(x)[0]: x.__code__.co_freevars for x in live if _place(x) in codes and codes[_place(x)].co_freevars != x.__code__.co_freevars}
        for name, variables in lost.items():
            _definition(tree, name).body.append(ast.If(ast.Constant(False), [ast.Expr(ast.Name(each, ast.Load())) for each in variables], []))
        codes = _compiled(path, tree) if lost else codes
        self._codes = [(x, x.__code__, codes[_place(x)]) for x in live if _place(x) in codes and codes[_place(x)] != x.__code__]
        assert self._codes, f"nobody runs {names} of {path}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts, every such function has the changed code."""
        for x, _, new in self._codes:
            x.__code__ = new
        try:
            yield
        finally:
            for x, former, _ in self._codes:
                x.__code__ = former

    def wrap(self, method: Any) -> Any:
        """``method`` with the change, which nobody else sees; a call without an end fails."""

        def wrong(**arguments: Any) -> Any:
            with self.applied(), limited(_SECONDS):
                return method(**arguments)

        return wrong


_SECONDS = 3.0
"""Of this process's time in a call, which takes milliseconds: a changed loop may have no end, and fill the memory on its way."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` where the block takes longer, and once more after as long again: the first may be lost in an object's ``__del__``. For
    the same reason no garbage is collected meanwhile: callbacks of others are called then (hypothesis has one), and what they raise is lost."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the call takes more than {seconds} s")

    collects, former = gc.isenabled(), signal.signal(signal.SIGVTALRM, stop)
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
        if collects:
            gc.enable()
