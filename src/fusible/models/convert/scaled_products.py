"""Scaled dot products: Fusible's attention as an implementation of transformers', by the name "fusible" in its ``AttentionInterface``.

It takes the calls that it is the faster one for, and hands the others on to ``sdpa``, transformers' usual one, argument for argument.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusible import ops
from fusible.models.convert.joining import Stand
from fusible.models.convert.pipelines import ConvertedModule, ConvertedRunner
from fusible.models.convert.swapping import when_read
from fusible.pytorch.engine.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.engine.batch import Batch
from fusible.pytorch.engine.bound import BoundOp
from fusible.tex.calls.transaction import Write

__all__ = ["NAME", "attention_configs", "attention_writes", "fusible_attention", "register", "register_anew", "why_no_attention"]

NAME = "fusible"
"""Of the implementation, in transformers' configurations."""
FORMER = "sdpa"
TEXT = "scaled dot products by Fusible on CPUs, with gradients or in fp32; with a mask, dropout or keys of a cache by sdpa"
_KEY = "_attn_implementation_internal"
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_known: dict[str, Any] = {}
"""transformers' functions by their names there; from ``register`` on."""
_pipelines: WeakKeyDictionary[nn.Module, dict[Any, ConvertedRunner]] = WeakKeyDictionary()


class _Nothing(Stand):
    """Stands for a module of which an op takes nothing: a pipeline of it does not keep the module."""

    @property
    def training(self) -> bool:
        return False  # dropout is not computed here, and nothing else asks


def fusible_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``softmax(scaling * query @ key^T) @ value`` of ``[batch, heads, tokens, width]``: ``[batch, tokens, heads, width]``, and None for the weights.

    The arguments are those of transformers' ``sdpa_attention_forward``, which computes what this does not.
    """
    tokens = query.shape[2]
    causal = tokens > 1 and attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[2] > tokens:  # of a static cache that was empty: what lies behind is of nobody
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    context = _context(module)
    if not _takes(query, key, value, context) or attention_mask is not None or dropout or any(more.get(name) is not None for name in _OTHERS):
        return _known[FORMER](module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more)
    heads, groups, width = query.shape[1], key.shape[1], query.shape[3]
    runner = _pipeline(module, context, heads=heads, head_width=width, groups=groups, causal=causal, scale=scaling)
    batch, rows = len(query), torch.cat([_rows(part) for part in (query, key, value)], 1)
    y = runner.run(rows, (), {}, Batch(rows, (batch, tokens), None, tokens))[0]
    return y.view(batch, tokens, heads, width), None


_OTHERS = ("position_bias", "softcap", "s_aux")


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: autocast) -> bool:
    """Whether Fusible's is there for operands of this form, and is the faster one: on CPUs in fp32, and where there are gradients; or whether 8-bit
    operands are asked for."""
    if torch.compiler.is_compiling() or query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return False
    if not query.shape[2:] == key.shape[2:] == value.shape[2:] or query.shape[2] < 2 or len(query) != len(key):
        return False
    in_8_bits = context.recipe is not None and context.recipe.fp8_dpa
    with_gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return in_8_bits or (query.is_cpu and (query.dtype is torch.float32 or with_gradients))


def _context(module: nn.Module) -> autocast:
    context = current_autocast()
    return module._own if context is OUTSIDE and isinstance(module, ConvertedModule) else context


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, tokens, width]`` as ``[batch * tokens, heads * width]``."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1] * x.shape[3])


def _pipeline(module: nn.Module, context: autocast, **options: Any) -> ConvertedRunner:
    """The pipeline of one attention op with these options, which lives as long as the module."""
    key = (context.key, *options.values())
    runners = _pipelines.setdefault(module, {})
    runner = runners.get(key)
    if runner is None:
        runner = runners[key] = ConvertedRunner([BoundOp(ops.DotProductAttention(**options), _Nothing(), ())], context)
    return runner


def register() -> None:
    """Make the implementation known to transformers, which is loaded: it has the masks of ``sdpa``."""
    _known[FORMER] = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    masks = importlib.import_module("transformers.masking_utils")
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(NAME, fusible_attention)
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)


@when_read
def register_anew() -> None:
    """The same in a process that has unpickled a model, or a part of one: where that is one of transformers, its classes have been loaded."""
    if not _known and "transformers.modeling_utils" in sys.modules:
        register()


def attention_configs(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """The names of the models of transformers in ``model``, with them and their configurations; each configuration once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if hasattr(type(module), "_can_set_attn_implementation") and _KEY in getattr(config, "__dict__", {}) and id(config) not in seen:
            seen.add(id(config))
            yield name, module, config


def why_no_attention(module: Any, config: Any) -> str:
    """Why a model's attention is left as it is; empty where it becomes Fusible's."""
    implementation = vars(config)[_KEY]
    if implementation not in (FORMER, NAME):
        return f"its implementation is {implementation!r}"
    return "" if module._can_set_attn_implementation() else "its class takes no other implementation"


def attention_writes(configs: list[Any], *, undo: bool = False) -> list[Write]:
    """What sets the implementation of configurations, or with ``undo`` gives back the former one."""
    former, name = (NAME, FORMER) if undo else (FORMER, NAME)
    return [partial(vars(config).__setitem__, _KEY, name) for config in configs if vars(config)[_KEY] == former]
