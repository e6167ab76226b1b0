"""What NVIDIA's package asks a plugin for when it imports its attention: which attention serves a problem, and what stands for its FlashAttention.

Both are answered by the backends, best first under the policy in force at that call: a backend set later, or before, is asked alike. Where none has
an answer, NVIDIA's own does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fusible.errors import NotServedError, expected
from fusible.tex.selection.registry import registry

__all__ = ["HOOKS", "flash_attention", "get_attention_backend"]

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def get_attention_backend(attention_params: Any = None) -> Any:
    """Which attention serves the problem that ``attention_params``, NVIDIA's ``AttentionParams``, describes, as its function of that name gives it.

    The first backend whose ``get_attention_backend(attention_params)`` is not None decides; without one, NVIDIA's function. Raises
    ``NotServedError`` where NVIDIA's package has not loaded its attention with the plugin.
    """
    for backend in registry.serving():
        answer = backend.get_attention_backend(attention_params)
        if answer is not None:
            return answer
    return _of_nvidia("utils", "_original_get_attention_backend")(attention_params)


def flash_attention(*arguments: Any, **options: Any) -> Any:
    """An instance of the class that stands for NVIDIA's ``FlashAttention``, made of its arguments.

    The class is that of the first backend whose ``get_flash_attention_class()`` is not None; without one, NVIDIA's. Raises ``NotServedError`` where
    NVIDIA's package has not loaded its attention.
    """
    for backend in registry.serving():
        made = backend.get_flash_attention_class()
        if made is not None:
            return made(*arguments, **options)
    return _of_nvidia("backends", "FlashAttention")(*arguments, **options)


def _of_nvidia(module: str, name: str) -> Callable[..., Any]:
    found = getattr(sys.modules.get(f"{_ATTENTION}.{module}"), name, None)
    if found is None:
        do = "set NVTE_PLUGIN=fusible.plugin before transformer_engine is imported, or use a backend that has the hook"
        raise NotServedError(expected(f"{_ATTENTION}.{module}.{name}", of="a hook of fusible.plugin", got="none", do=do))
    return found


HOOKS: dict[str, Callable[..., Any]] = {"flash_attention": flash_attention, "get_attention_backend": get_attention_backend}
"""By the name under which NVIDIA's package looks for it in ``transformer_engine_torch``."""
