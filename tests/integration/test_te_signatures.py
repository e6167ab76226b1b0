"""Every call that NVIDIA's Python package makes of ``transformer_engine_torch`` binds to a function of ``fusible.tex``: read from its source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusible import tex
from fusible.tex.interface.declare import DECLARATIONS

MODULE = "transformer_engine_torch"
LACKING = {"LayerNorm"}
"""What the package reads and NVIDIA's own module has not either."""

APPLIER = "multi_tensor_applier"
"""``multi_tensor_applier(op, flag, lists, *rest)`` calls ``op(chunk_size, flag, lists, *rest)``."""


@dataclass(frozen=True)
class Use:
    """A call of ``name``, or a mention of it where ``call`` is None. ``skipped``: arguments before those of the call."""

    name: str
    where: str
    call: ast.Call | None = None
    skipped: int = 0


def sources() -> list[Path]:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("NVIDIA's Python package is not installed")
    root = Path(spec.origin).parent
    return [path for path in sorted(root.rglob("*.py")) if "jax" not in path.relative_to(root).parts]


def imported(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that stand for the module in a file, and those that it imports from the module."""
    aliases, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == MODULE}
        elif isinstance(node, ast.ImportFrom) and node.module == MODULE:
            names |= {alias.asname or alias.name for alias in node.names if alias.name != "*"}
    return aliases, names


def named(node: ast.AST, aliases: set[str], names: set[str]) -> str | None:
    """The name of the module's that ``node`` reads, or None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        kept = node.value.id == "self" and node.attr.startswith("multi_tensor_") and node.attr in DECLARATIONS
        return node.attr if node.value.id in aliases or kept else None  # kept: an optimizer's own attribute that holds the function
    return node.id if isinstance(node, ast.Name) and node.id in names else None


def uses() -> Iterator[Use]:
    for path in sources():
        tree = ast.parse(path.read_text())
        aliases, names = imported(tree)
        for node in ast.walk(tree) if aliases or names or APPLIER in path.read_text() else ():
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            name = named(node, aliases, names)
            if name is not None:
                yield Use(name, where)
            if isinstance(node, ast.Call):
                called = named(node.func, aliases, names)
                if called is not None:
                    yield Use(called, where, node)
                if isinstance(node.func, ast.Name) and node.func.id == APPLIER and node.args:
                    applied = named(node.args[0], aliases, names)
                    if applied is not None:
                        yield Use(applied, where, node, skipped=1)


def bind(use: Use) -> None:
    """Raise ``TypeError`` unless the call fits the function's signature; arguments of unknown number (``*args``) may be any."""
    assert use.call is not None
    signature = inspect.signature(getattr(tex, use.name))
    given = use.call.args[use.skipped :]
    positional = [0] * (sum(not isinstance(argument, ast.Starred) for argument in given) + use.skipped)
    keywords = {keyword.arg: 0 for keyword in use.call.keywords if keyword.arg is not None}
    open_ended = any(isinstance(argument, ast.Starred) for argument in given) or len(keywords) < len(use.call.keywords)
    (signature.bind_partial if open_ended else signature.bind)(*positional, **keywords)


def test_every_name_that_the_package_reads_is_there() -> None:
    missing = {use.name: use.where for use in uses() if not hasattr(tex, use.name)}
    assert missing.keys() == LACKING


def test_every_call_of_the_package_binds() -> None:
    refused: dict[str, str] = {}
    calls = [use for use in uses() if use.call is not None and inspect.isfunction(getattr(tex, use.name, None))]
    for use in calls:
        try:
            bind(use)
        except TypeError as error:
            refused[f"{use.where} {use.name}"] = str(error)
    assert not refused
    assert len(calls) > 220 and len({use.name for use in calls}) > 130, (len(calls), len({use.name for use in calls}))


@pytest.mark.parametrize(("name", "arguments"), [("nvfp4_group_quantize_with_amax", 8), ("get_fused_attn_backend", 1), ("thd_out_correction", 8)])
def test_what_nvidia_takes_by_position_binds_by_position(name: str, arguments: int) -> None:
    parameters = inspect.signature(getattr(tex, name)).parameters
    assert sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()) == arguments
    inspect.signature(getattr(tex, name)).bind(*[0] * arguments)


def test_what_has_no_default_behind_a_default_is_refused_when_missing() -> None:
    with pytest.raises(TypeError, match="Expected a tensor of rowwise_amax of nvfp4_group_quantize_with_amax, got None"):
        tex.nvfp4_group_quantize_with_amax(None, None, 1, None)
