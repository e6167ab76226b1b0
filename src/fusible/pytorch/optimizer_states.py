"""How ``FusedAdam`` holds its state between steps: in fp32, or in fewer bits with a scale for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.tex import DType
from fusible.tex.calls.optimizer import FP16_RANGE, LEAST_SCALE
from fusible.tex.protocol import FP8_MAX

__all__ = ["Holding", "held", "held_again", "is_scaled", "joined", "parted", "remainder", "scale_of", "values_of"]

_SCALED = {torch.float16: FP16_RANGE, torch.uint8: FP8_MAX[DType.kFloat8E4M3]}
"""What the largest number becomes: of E4M3 the largest there is, of fp16 half of it."""
_MOMENTS = (torch.float32, torch.bfloat16, *_SCALED)
_MASTERS = (torch.float32, torch.float16)
_SCALE = "_scale"


@dataclass(frozen=True)
class Holding:
    """The dtypes of moments and masters, ``torch.uint8`` being E4M3; with ``remainders`` the masters of bf16 parameters are their lower words alone.

    Raises ``ArgumentError`` for a dtype in which they are not held.
    """

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master_param: torch.dtype = torch.float32
    remainders: bool = False

    def __post_init__(self) -> None:
        names = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype", "master_param": "master_weight_dtype"}
        for slot, option in names.items():
            known, got = _MASTERS if slot == "master_param" else _MOMENTS, getattr(self, slot)
            if got not in known:
                wanted = f"{', '.join(map(str, known[:-1]))} or {known[-1]}"
                raise ArgumentError(expected(wanted, of=f"{option} of FusedAdam", got=got, do="choose one of them"))
        if self.remainders and self.master_param is not torch.float32:
            of, do = "master_weight_dtype of FusedAdam with store_param_remainders", "leave one of them out"
            raise ArgumentError(expected("torch.float32", of=of, got=self.master_param, do=do))

    @property
    def plain(self) -> bool:
        """Whether all of it is as torch has it: floats without scales, which every kernel steps."""
        return not self.remainders and _SCALED.keys().isdisjoint({self.exp_avg, self.exp_avg_sq, self.master_param})

    @property
    def wide(self) -> bool:
        """Whether all of it is fp32."""
        return self == Holding()


def scale_of(slot: str) -> str:
    """The name of the scale of an entry of a parameter's state."""
    return f"{slot}{_SCALE}"


def parted(states: Mapping[Any, Mapping[str, Any]]) -> tuple[dict[Any, dict[str, Any]], dict[Any, dict[str, Any]]]:
    """By parameters the entries of their states, and the scales of these; no parameter without one has an entry there."""
    entries = {p: {name: value for name, value in state.items() if not name.endswith(_SCALE)} for p, state in states.items()}
    scales = {p: {name: value for name, value in state.items() if name.endswith(_SCALE)} for p, state in states.items()}
    return entries, {p: of for p, of in scales.items() if of}


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether numbers that are held in ``dtype`` have a scale."""
    return dtype in _SCALED


def held(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 numbers in ``dtype``, and the scale that they are held with, fp32 ``[1]``, by the formula of ``tex.multi_tensor_adam_scaled``: ``codes =
    cast(values * (1 / s))`` with ``s = max(max |values| / r, 2^-126)``."""
    if not is_scaled(dtype):
        return values.to(dtype, copy=True), None
    largest = values.abs().amax().reshape(1) if values.numel() else values.new_zeros(1)
    scale = (largest / _SCALED[dtype]).clamp_min(LEAST_SCALE)
    inverse = scale.reciprocal()
    return _codes(values, inverse, dtype), inverse.reciprocal() if dtype is torch.uint8 else scale


def held_again(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``held``, but of numbers that were held so before the same codes and scale, to the bit: the formula's scale may be some units of its last place
    off, and one of its neighbours is what they had."""
    codes, scale = held(values, dtype)
    if scale is None:
        return codes, None
    units = scale.view(torch.int32)
    for offset in (0, 1, -1, 2, -2):
        near = (units + offset).view(torch.float32)
        found = _codes(values, near.reciprocal(), dtype)
        if torch.equal(values_of(found, near), values):
            return found, near
    return codes, scale


def _codes(values: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = values * inverse.reshape(())
    if dtype is torch.float16:
        return scaled.to(dtype)
    return scaled.clamp(-_SCALED[dtype], _SCALED[dtype]).to(torch.float8_e4m3fn).view(torch.uint8)


def values_of(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The fp32 numbers that ``codes`` hold; ``codes`` themselves, where they are fp32."""
    wide = (codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes).float()
    return wide if scale is None else wide * scale.reshape(())


def joined(p: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its remainder, int16: as bits ``(p << 16) + remainder``."""
    return ((p.detach().view(torch.int16).int() << 16) + words).view(torch.float32)


def remainder(master: torch.Tensor, p: torch.Tensor, of: str) -> torch.Tensor:
    """The lower words of an fp32 master, of which ``p`` is the rounding; of a tie that was rounded down the nearest that there is. Raises
    ``CheckpointError`` where ``p`` is not its rounding."""
    words = master.float().contiguous().view(torch.int32) - (p.detach().contiguous().view(torch.int16).int() << 16)
    if words.numel() and (words.amax() > 2**15 or words.amin() < -(2**15)):
        do = "load the parameters first, those that it was saved with"
        raise CheckpointError(expected("masters that round to the parameter", of=of, got="others", do=do))
    return words.clamp_max(2**15 - 1).to(torch.int16)
