"""Call inputs: the values of a whole call beside ``x`` and parameters (sequences, seed), in the form that passes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusible.compute_pipeline import Plan
from fusible.nvte import DType, Sequences, Tensor, make_nvte_tensor
from fusible.pytorch.engine.batch import Batch

__all__ = ["CallInputs", "NO_CALL_INPUTS", "call_input_values", "draw_seed", "of_mask", "of_tokens", "unflatten_call_inputs"]


@dataclass(frozen=True, eq=False)
class CallInputs:
    """The values of a whole call, taken apart: their tensors by name, and what puts them together again (hashable)."""

    tensors: dict[str, list[torch.Tensor]]
    static: dict[str, Any]

    @classmethod
    def of(cls, values: dict[str, Any]) -> CallInputs:
        tensors: dict[str, list[torch.Tensor]] = {}
        static: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Sequences):
                tensors[name] = [value.cu_seqlens.data]
                static[name] = (value.count, value.max_seqlen, value.uniform)
            else:
                tensors[name] = [value.data]
                static[name] = None
        return cls(tensors, static)

    def leaves(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [leaf for name in names for leaf in self.tensors[name]] if names else []

    def key(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple([self.static[name] for name in names]) if names else ()


NO_CALL_INPUTS = CallInputs({}, {})


def unflatten_call_inputs(names: Sequence[str], key: Sequence[Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """The inverse of ``CallInputs``, of tensors that may be another framework's, for values of these names."""
    values: dict[str, Any] = {}
    for name, static, leaf in zip(names, key, leaves, strict=True):
        tensor = make_nvte_tensor(leaf)
        values[name] = Sequences(tensor, *static) if static is not None else tensor
    return values


def draw_seed(device: torch.device) -> torch.Tensor:
    """int64 ``[1]``, drawn from torch's default generator."""
    return torch.randint(2**62, (1,), device="cpu").to(device)


def call_input_values(plan: Plan, x: torch.Tensor, batch: Batch | None, seed: torch.Tensor | None) -> dict[str, Any]:
    """The values of the whole call that the plan's ops take. ``seed``: None where it is yet to be drawn."""
    call_inputs: dict[str, Any] = {}
    if "sequences" in plan.call_inputs:
        assert batch is not None, "who calls a pass with attention reads the batch"
        call_inputs["sequences"] = batch.sequences()
    if "seed" in plan.call_inputs:
        call_inputs["seed"] = Tensor(draw_seed(x.device) if seed is None else seed, DType.Int64)
    return call_inputs


def of_tokens(value: torch.Tensor, keeps_padding: bool, batch: Batch, shape: torch.Size) -> torch.Tensor:
    """A side value of a batch whose input came in ``shape``. Where it has a row for each row of the input, the rows of padding are left out; one that
    ``keeps_padding`` is returned as it came."""
    return value if keeps_padding or value.shape[:-1] != shape[:-1] else batch.tokens(value)


def of_mask(mask: torch.Tensor) -> torch.Tensor:
    """A mask as numbers that are added to scores: of bools, 0 where True (seen) and -inf where False, in fp32."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else mask
