"""The products of two quantized operands that a program has ``fusible.tex`` do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusible import tex


def _is_quantized(kind: Any) -> bool:
    """Whether an operand of this kind holds 8 bits: a kind of a plain tensor is its device and dtype."""
    return isinstance(kind, tuple) and len(kind) == 3


def _operands(call: Any) -> list[Any]:
    """The kinds of what a call multiplies; those of lists, in a grouped product, are the kinds that are in them."""
    request = call.request
    if call.function == "te_general_grouped_gemm":
        return [*request["A"], *request["B"]]
    return [request["A"], request["B"]] if call.function == "generic_gemm" else [None]


@contextmanager
def quantized_products() -> Iterator[list[Any]]:
    """A list that the products are put into as they are called."""
    found: list[Any] = []
    with tex.record() as calls:
        yield found
    found += [call for call in calls if all(map(_is_quantized, _operands(call)))]
