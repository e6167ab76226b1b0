"""Operations within a call that ``torch.compile`` traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.compiled import traced_call
from fusible.pytorch.kv_cache import KVCache
from fusible.pytorch.modules.base import BaseModule

__all__ = ["traced_operations"]


def traced_operations(
    module: BaseModule,
    part: int,
    modules: Iterable[BaseModule],
    x: torch.Tensor,
    extra: Sequence[torch.Tensor],
    kwargs: Mapping[Any, Any],
    seq_lens: torch.Tensor | None = None,
    cache: KVCache | None = None,
) -> torch.Tensor:
    """``traced_call`` of the fuser of ``modules``. Raises ``ArgumentError`` for keyword arguments."""
    if kwargs:
        do = "leave them out, or the operation out of the compiled part"
        raise ArgumentError(expected("no keyword arguments of operations", of="a call that torch.compile traces", got="some", do=do))
    return traced_call(module, part, [holder for each in modules for holder in each.holders()], x, extra, seq_lens, cache)[0]
