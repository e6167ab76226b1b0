"""The products of two quantized operands that a program has ``fusible.tex`` do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusible import tex


def _is_quantized(kind: Any) -> bool:
    """Whether an operand of this kind holds 8 bits: a kind of a plain tensor is its device and dtype."""
    return isinstance(kind, tuple) and len(kind) == 3


@contextmanager
def quantized_products() -> Iterator[list[Any]]:
    """A list that the products are put into as they are called."""
    found: list[Any] = []
    with tex.record() as calls:
        yield found
    found += [call for call in calls if call.function == "generic_gemm" and _is_quantized(call.request["A"]) and _is_quantized(call.request["B"])]
