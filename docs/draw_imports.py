"""Draws ``docs/import_diagram.svg``: which room imports which, read from the source. ``make diagram`` runs it; a test sees that it is current.

Rooms stand in a column, the highest on top. An arc leads from a room to one that it imports; its width grows with the number of modules that do.
The one dashed arc leads upwards: importing ``tex`` registers the backends of this package.
"""

from __future__ import annotations

import ast
import math
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "fusible"
DIAGRAM = Path(__file__).with_name("import_diagram.svg")

ROOMS = {
    "cli": "command line, reports",
    "plugin": "tex in NVIDIA's package",
    "compat": "other names, NVIDIA's package, a GPU's requests",
    "models": "families of models, checkpoints, tokenizers",
    "distributed": "meshes, and how a model is laid out on one",
    "pytorch": "modules, Sequential, autocast, operations",
    "pytorch.engine": "runner, calls, executors, replay, scaling",
    "pytorch.lowering": "ops as torch's functions, for exports",
    "compute_pipeline": "type inference, fusion, plans, execution",
    "fusions": "fused passes",
    "ops": "operations",
    "nvte": "Tensor, types, functions",
    "conformance": "what every backend must agree with",
    "quantized": "quantizers, tensors, recipes, state",
    "tex.backends": "torch, cpu, xla, nvidia, flaggems",
    "tex": "interface, formats, calls, selection",
    "cpp_extensions": "compiled kernels",
    "lazy": "trace, FlatIR, StableHLO, engine",
    "knobs": "environment variables",
    "files": "how files are read and written",
    "errors": "exceptions and their wording",
    "ending": "the end of processes that had groups",
    "locks": "a lock that a forked child can take",
    "machine": "what the operating system tells",
    "version": "the version of the package",
    "facade": "how a package says what it offers",
}
BOX_WIDTH, BOX_HEIGHT, GAP, LEFT, TOP = 330, 38, 16, 24, 20


def room_of(module: str) -> str | None:
    """The room of a module ``fusible.a.b.c``: the longest room name that begins it."""
    inside = module.removeprefix("fusible.")
    fitting = [room for room in ROOMS if inside == room or inside.startswith(f"{room}.")]
    return max(fitting, key=len, default=None)


def imported(path: Path) -> set[str]:
    """The modules of this package that a source file imports, by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("fusible.")}


def edges() -> Counter[tuple[str, str]]:
    """How many modules of one room import something of another."""
    counted: Counter[tuple[str, str]] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        here = room_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        there = {room_of(name) for name in imported(path)}
        counted.update((here, room) for room in there if here and room and room != here)
    return counted


def draw() -> str:
    """The diagram as SVG."""
    y = {room: TOP + i * (BOX_HEIGHT + GAP) for i, room in enumerate(ROOMS)}
    height = TOP + len(ROOMS) * (BOX_HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" viewBox="0 0 720 {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#475569"/></marker></defs>',
    ]
    right = LEFT + BOX_WIDTH
    for (here, there), count in sorted(edges().items()):
        down = y[there] > y[here]
        start, end = y[here] + BOX_HEIGHT * 0.6, y[there] + BOX_HEIGHT * (0.4 if down else 0.8)
        reach = right + 24 + 0.62 * abs(end - start) ** 0.95
        dashed = "" if down else 'stroke-dasharray="4 3" '
        width = 0.8 + 0.7 * math.log2(count)
        parts.append(
            f'<path d="M{right} {start:.1f} C{reach:.1f} {start:.1f} {reach:.1f} {end:.1f} {right + 2} {end:.1f}" fill="none" stroke="#475569" '
            f'{dashed}stroke-width="{width:.2f}" stroke-opacity="0.65" marker-end="url(#arrow)"><title>{here} imports {there}: {count}</title></path>'
        )
    for room, says in ROOMS.items():
        fill = "#e0f2fe" if room in ("lazy", "tex", "tex.backends", "cpp_extensions") else "#f1f5f9"
        if room in ("ending", "errors", "files", "knobs", "locks", "machine", "version"):
            fill = "#fef3c7"
        parts.append(f'<rect x="{LEFT}" y="{y[room]}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#94a3b8"/>')
        parts.append(f'<text x="{LEFT + 12}" y="{y[room] + 17}" font-size="14" font-weight="bold" fill="#0f172a">{room}</text>')
        parts.append(f'<text x="{LEFT + 12}" y="{y[room] + 31}" font-size="11" fill="#475569">{says}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    DIAGRAM.write_text(draw())
    sys.stdout.write(f"{DIAGRAM.relative_to(ROOT)}: {len(edges())} arcs\n")
