"""A summary of the calls of a training step: which backends served them, and the precision of the matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fusible import tex

__all__ = ["join_summaries", "summarize_calls"]

_DIRECTIONS = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
"""Direction of a GEMM by (transA, transB): the layouts TN, NN and NT."""

_PRECISIONS = {"float8": "fp8", "block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Precision of a matrix product by the format of its operands."""


def summarize_calls(calls: Sequence[tex.Call], matrix_products: int, passes: int = 1) -> dict[str, Any]:
    """``backend``: the one that served most of the matrix products. ``calls``: their number by backend. ``gemms``: by precision and direction.

    ``matrix_products`` is the number of MMTs in the plan: where ``gemms["fp8"]`` (or ``"fp4"``) has it in all three directions and
    ``gemms["other"]`` is zero, every one of them ran on such operands. A compiled step calls tex only while it is traced, so each counts once there
    too. ``passes``: how often the step went through the model, of which ``gemms`` counts one.
    """
    gemms = [call for call in calls if call.function == "generic_gemm"]
    serving = Counter(call.backend for call in gemms) or Counter(call.backend for call in calls)
    counts = {precision: dict.fromkeys(_DIRECTIONS.values(), 0) for precision in ("fp8", "fp4", "other")}
    for call in gemms:
        request = call.request
        direction = _DIRECTIONS.get((bool(request["transA"]), bool(request["transB"])))
        if direction is not None:
            counts[_precision(request["A"], request["B"])][direction] += 1
    return {
        "backend": serving.most_common(1)[0][0] if serving else tex.get_backend().name,
        "calls": dict(sorted(Counter(call.backend for call in calls).items())),
        "matrix_products": matrix_products,
        "gemms": {precision: {way: count // passes for way, count in ways.items()} for precision, ways in counts.items()},
    }


def join_summaries(of: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a step that several processes took together, each with other modules. ``backend``: the first's."""
    calls: Counter[str] = Counter()
    for each in of:
        calls.update(each["calls"])
    first = of[0]
    gemms = {precision: {way: sum(each["gemms"][precision][way] for each in of) for way in ways} for precision, ways in first["gemms"].items()}
    return {**first, "calls": dict(sorted(calls.items())), "matrix_products": sum(each["matrix_products"] for each in of), "gemms": gemms}


def _precision(*operands: Any) -> str:
    """The precision of a product: "fp8" or "fp4" if both operands have such formats, else "other"."""
    found = {_PRECISIONS.get(kind[0], "other") if isinstance(kind, tuple) else "other" for kind in operands}
    return found.pop() if len(found) == 1 else "other"
