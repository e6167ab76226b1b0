"""The state of delayed scaling: one scale and one window of amaxes per quantized tensor, as values.

Nothing here is changed in place. A pass reads ``scale``; what it observed enters by ``observe``; ``advance`` closes an iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusible import tex
from fusible.errors import CheckpointError, expected
from fusible.quantized.formats import FP8_MAX
from fusible.quantized.recipe import DelayedScaling
from fusible.tex import DType

__all__ = ["ScalingState"]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class ScalingState:
    """``scale``: fp32 ``[n]``; ``amax_history``: fp32 ``[window, n]``, whose row 0 collects the running iteration.

    ``slots`` names the ``n`` quantized tensors; ``fp8_dtype`` is the format of all of them.
    """

    slots: tuple[str, ...]
    fp8_dtype: DType
    scale: torch.Tensor
    amax_history: torch.Tensor

    @classmethod
    def create(cls, slots: tuple[str, ...], fp8_dtype: DType, window: int, device: torch.device) -> ScalingState:
        """Scales of 1 and an empty window."""
        n = len(slots)
        scale = torch.ones(n, dtype=torch.float32, device=device)
        return cls(slots, fp8_dtype, scale, torch.zeros(window, n, dtype=torch.float32, device=device))

    def observe(self, amaxes: Mapping[str, torch.Tensor]) -> ScalingState:
        """The state after ``amaxes`` (fp32 ``[1]`` by slot) were seen in the running iteration: ``history[0] = max(history[0], amax)``.

        A non-finite amax is not seen at all.
        """
        if not amaxes:
            return self
        unseen = torch.zeros_like(self.scale[:1])
        seen = torch.cat([amaxes.get(slot, unseen) for slot in self.slots])  # by an index, the host would wait for a GPU
        seen = torch.where(torch.isfinite(seen), seen, 0.0)
        history = self.amax_history.clone()
        torch.maximum(history[0], seen, out=history[0])
        return ScalingState(self.slots, self.fp8_dtype, self.scale, history)

    def advance(self, recipe: DelayedScaling) -> ScalingState:
        """Close the running iteration: the window rolls, and new scales follow from it (see ``DelayedScaling``)."""
        state = self.resized(recipe.amax_history_len)
        scale, history = state.scale.clone(), state.amax_history.clone()
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            scale, history = _advance_by_functions(scale, history, self.fp8_dtype, recipe)
        else:
            observed = history[0].clone()
            tex.fused_amax_and_scale_update_after_reduction(
                observed, [history], [scale], recipe.amax_compute_algo, self.fp8_dtype, float(recipe.margin)
            )
        return ScalingState(self.slots, self.fp8_dtype, scale, history)

    def resized(self, window: int) -> ScalingState:
        """The state with another window length: the latest entries are kept."""
        have = len(self.amax_history)
        if window == have:
            return self
        running, past = self.amax_history[:1], self.amax_history[1:]
        kept = past[max(0, len(past) - (window - 1)) :]
        filler = torch.zeros(window - 1 - len(kept), len(self.slots), dtype=torch.float32, device=self.scale.device)
        return ScalingState(self.slots, self.fp8_dtype, self.scale, torch.cat([running, filler, kept]))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is to save, copied to the CPU: the scales, the amaxes and the code of the format."""
        fields = {"scale": self.scale, "amax_history": self.amax_history, "fp8_dtype": torch.tensor([int(self.fp8_dtype)], device="cpu")}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in fields.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], slots: tuple[str, ...], direction: str) -> ScalingState:
        """The state that ``tensors`` gave. Raises ``CheckpointError`` unless it can be worked with; ``direction`` names it there."""
        scale, history, dtype = (tensors.get(field) for field in ("scale", "amax_history", "fp8_dtype"))
        if scale is None or history is None or dtype is None or scale.shape != (len(slots),):
            got = "none" if scale is None or history is None or dtype is None else ", ".join(map(str, scale.shape)) or "a scalar"
            raise _unusable(f"{len(slots)} {direction} scales", got, "load it into the model it was saved from")
        if history.dim() != 2 or not len(history) or history.shape[1:] != scale.shape:
            raise _unusable(f"{direction} amaxes [window, {len(slots)}]", f"shape {list(history.shape)}")
        for values, least in ((scale, 2.0**-149), (history, 0.0)):
            if values.dtype != torch.float32 or not (values.isfinite().all() and (values >= least).all()):
                got = str(values.dtype) if values.dtype != torch.float32 else f"values from {values.min().item():g} to {values.max().item():g}"
                raise _unusable(f"finite fp32 {direction} scales above 0 and amaxes of at least 0", got)
        code = dtype.tolist()
        if len(dtype.shape) != 1 or len(code) != 1 or code[0] not in FP8_MAX:
            raise _unusable("the code of an 8-bit format", f"{code}")
        return cls(slots, DType(code[0]), scale, history)

    def to(self, device: torch.device) -> ScalingState:
        """The state on another device; itself where it is there."""
        return self if self.scale.device == device else ScalingState(self.slots, self.fp8_dtype, self.scale.to(device), self.amax_history.to(device))

    def formatted(self, fp8_dtype: DType) -> ScalingState:
        """The state for another 8-bit format; scales follow it from the next iteration on."""
        return self if self.fp8_dtype == fp8_dtype else ScalingState(self.slots, fp8_dtype, self.scale, self.amax_history)


def _unusable(what: str, got: str, do: str = "use an intact checkpoint") -> CheckpointError:
    return CheckpointError(expected(what, of="a saved scaling state", got=got, do=do))


def _advance_by_functions(scale: torch.Tensor, history: torch.Tensor, fp8_dtype: DType, recipe: DelayedScaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The update with a user's own functions for the amax or the scale."""
    fp8_max = FP8_MAX[fp8_dtype]
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    else:
        amax = history.amax(dim=0) if recipe.amax_compute_algo == "max" else history[0]
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe)
    else:
        new = torch.clamp(fp8_max * 2.0**-recipe.margin / amax, max=_LARGEST)
    usable = torch.isfinite(amax) & (amax > 0) & torch.isfinite(new) & (new > 0)
    new = torch.where(usable, new, scale)
    rolled = torch.roll(history, -1, dims=0)
    rolled[0] = 0.0
    return new, torch.where(history[0] != 0, rolled, history)
