"""Which calls a backend says that it serves: it is asked for every sample, and with a quantizer of every format. Nothing is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fusible import tex
from fusible.conformance.cases.block_tensors import BLOCKED
from fusible.conformance.crossing import Crossing
from fusible.conformance.suite import crossing_for
from fusible.conformance.table import FLOATS, Record, load
from fusible.errors import ArgumentError, BackendError, expected
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from fusible.tex import DType
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.decision import Decision, refusal
from fusible.tex.selection.registry import registry

__all__ = ["Coverage", "QUANTIZERS", "coverage_of", "decisions", "markdown"]

QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "delayed": lambda: Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu"),
    **BLOCKED,
}
"""A function that makes a quantizer, by format."""

_QUANTIZER = "quantizer"
_LAZY = frozenset({"lazy"})


@dataclass(frozen=True)
class Coverage:
    """What a backend says of one function.

    ``served``: whether it serves any call. ``dtypes``: by dtype, how many calls it serves, of how many. ``formats``: those whose quantizers it takes;
    None where the function takes no quantizer. ``why``: why it lacks the function, or the most frequent reason for a refusal. ``instead``: the
    backends that serve the refused calls here.
    """

    function: str
    served: bool
    dtypes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    formats: tuple[str, ...] | None = None
    why: str = ""
    instead: tuple[str, ...] = ()


def decisions(record: Record, dtype: torch.dtype, cross: Callable[[], Crossing]) -> Iterator[tuple[str, Decision]]:
    """The decision of tex for each sample of a function in a dtype, labelled ``""``, and for the first sample with a quantizer of each format."""
    samples = record.samples(dtype)
    for sample in samples:
        yield "", tex.explain(record.function, **cross().enter(sample.arguments))
    if _QUANTIZER in DECLARATIONS[record.function].signature.parameters:
        for name, make in QUANTIZERS.items():
            arguments = {**samples[0].arguments, _QUANTIZER: make()}
            yield name, tex.explain(record.function, **cross().enter(arguments))


def coverage_of(
    backend: str, functions: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] | None = None, device: str | None = None
) -> Iterator[Coverage]:
    """The coverage of every function, or of those named, in all dtypes or those given, in the order of their names.

    Raises ``BackendError`` for a backend that is unknown or cannot run here, ``ArgumentError`` for a function that tex lacks.
    """
    table, found = load(), registry.find(backend)
    missing = registry.reason_unavailable(found)
    if missing is not None:
        raise BackendError(expected("a backend that can run here", of="coverage_of", got=f"{backend} ({missing})", do="ask where it can"))
    unknown = sorted(set(functions or ()) - DECLARATIONS.keys())
    if unknown:
        raise ArgumentError(expected("functions of tex", of="coverage_of", got=", ".join(unknown), do="see 'fusible info --tex'"))
    cross = crossing_for(backend, device)
    for name in sorted(DECLARATIONS if functions is None else functions):
        lacking = found.lacks(name)
        if lacking is not None or name not in table:
            instead = () if lacking is None else tuple(b.NAME for b in registry.serving() if b.DEVICES != _LAZY and b.lacks(name) is None)
            yield Coverage(name, lacking is None, why=lacking or "not asked: its calls take several processes", instead=instead)
        else:
            yield _asked(found, table[name], [dtype for dtype in table[name].dtypes if dtypes is None or dtype in dtypes], cross)


def _asked(backend: TEXBackendBase, record: Record, dtypes: Sequence[torch.dtype], cross: Callable[[], Crossing]) -> Coverage:
    counts: dict[str, tuple[int, int]] = {}
    taken: dict[str, bool] = {}
    reasons, instead = Counter[str](), Counter[str]()
    for dtype in dtypes:
        answers = [(label, refusal(backend, decision.request), decision.backend) for label, decision in decisions(record, dtype, cross)]
        plain = [reason for label, reason, _ in answers if not label]
        counts[str(dtype).removeprefix("torch.")] = sum(reason is None for reason in plain), len(plain)
        for label, reason, other in answers:
            if label:
                taken[label] = taken.get(label, False) or reason is None
            if reason is not None:
                reasons[reason] += 1
                instead[other or "nobody"] += 1
    formats = tuple(label for label, taken_by_it in taken.items() if taken_by_it) if taken else None
    why = reasons.most_common(1)[0][0] if reasons else ""
    served = any(count for count, _ in counts.values()) or bool(formats)
    return Coverage(record.function, served, counts, formats, why, tuple(name for name, _ in instead.most_common()))


def markdown(backend: str, rows: Sequence[Coverage]) -> str:
    """The rows as a Markdown table: whether all, some or none of the suite's calls are served in each dtype, and which quantizers are taken."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in FLOATS]
    lines = [_line("function", *dtypes, "quantizers", "what it does not serve", "served by"), _line(*["---"] * (len(dtypes) + 4))]
    for row in rows:
        cells = [_share(row.dtypes.get(dtype)) if row.served else "none" for dtype in dtypes]
        formats = "" if row.formats is None else "all" if len(row.formats) == len(QUANTIZERS) else ", ".join(row.formats) or "none"
        lines.append(_line(f"`{row.function.replace('prim_', 'prim.')}`", *cells, formats, row.why, ", ".join(row.instead)))
    served = sum(row.served for row in rows)
    lines += ["", f"{backend} serves {served} of {len(rows)} functions. A fraction: so many of the suite's calls, the others for the reason given."]
    return "\n".join(lines)


def _share(count: tuple[int, int] | None) -> str:
    if count is None:
        return ""
    served, asked = count
    return "all" if served == asked else "none" if not served else f"{served}/{asked}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
