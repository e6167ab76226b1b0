"""The checks of optimizer kernels beyond ``check_lists``: whatever has ``shape`` and ``dtype`` is a tensor here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.checks import check_lists

__all__ = ["check_typed_lists"]


def check_typed_lists(tensor_lists: Sequence[Sequence[Any]], types: Sequence[Sequence[Any] | None], function: str, single: int = 0) -> None:
    """Raise unless there is a list for each entry of ``types``, whose tensors are of one of these dtypes (None: of any).

    Tensors that belong together agree in size; the last ``single`` lists hold one number per tensor.
    """
    check_lists(tensor_lists, (len(types),), function, lambda _: 0)
    alike = len(types) - single
    check_lists(tensor_lists[:alike], (alike,), function, lambda x: math.prod(x.shape))
    for place, (tensors, dtypes) in enumerate(zip(tensor_lists, types, strict=True)):
        for x in tensors:
            if dtypes is not None and x.dtype not in dtypes:
                wanted = " or ".join(map(str, dtypes))
                raise DTypeError(expected(wanted, of=f"list {place} of {function}", got=x.dtype, do="pass the lists in the order it documents"))
            if place >= alike and math.prod(x.shape) != 1:
                raise DTypeError(expected("one number", of=f"list {place} of {function}", got=list(x.shape), do="pass one per tensor"))
