"""A recipe's quantizers for the slots of one layer, with the state that delayed scaling needs. The interface is that of ``transformer_engine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusible.errors import ArgumentError, CheckpointError, DTypeError, expected
from fusible.quantized.quantizer import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from fusible.quantized.recipe import DelayedScaling, Recipe
from fusible.quantized.roles import TENSOR_TYPES, DelayedScalingRequest, QuantizerRequest, QuantizerRole, quantizer_for_role
from fusible.quantized.state import ScalingState
from fusible.tex import DType

__all__ = ["RecipeState"]

_BY_POSITION = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}


class RecipeState:
    """The quantizers of ``num_quantizers`` slots of a layer in one direction, ``mode`` ``"forward"`` or ``"backward"``.

    ``roles`` says what each slot is. Where a role names no tensor of a matrix product, its position does: input, weight, output, input ... or
    grad_output, grad_input, grad_output ...; the factory of a ``CustomRecipe`` gets the roles as they are, ``QuantizerRole()`` where there are none.

    The slots under delayed scaling share ``scale``, fp32 ``[n]``, and ``amax_history``, fp32 ``[window, n]``, of which their quantizers hold views:
    row 0 collects amaxes, and ``tex.fused_amax_and_scale_update_after_reduction`` advances both in place. ``delayed_recipe`` has their options. All
    three are None where no slot is under delayed scaling.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        if not isinstance(recipe, Recipe):
            raise DTypeError(expected("a recipe", of="RecipeState", got=repr(recipe), do="give e.g. MXFP8BlockScaling()"))
        if mode not in _BY_POSITION:
            raise ArgumentError(expected("'forward' or 'backward'", of="RecipeState's mode", got=repr(mode), do="name one"))
        if roles is not None and len(roles) != num_quantizers:
            raise ArgumentError(expected(f"{num_quantizers} roles", of="RecipeState", got=len(roles), do="give one per quantizer, or none"))
        self.recipe = recipe.immutable()
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = torch.empty(0, device=device).device
        self.roles = None if roles is None else list(roles)
        self._made = [quantizer_for_role(recipe, self._role(i)) for i in range(num_quantizers)]
        self._delayed = [i for i, made in enumerate(self._made) if isinstance(made, DelayedScalingRequest)]
        self.delayed_recipe = self._shared_recipe()
        self.scale: torch.Tensor | None = None
        self.amax_history: torch.Tensor | None = None
        if self.delayed_recipe is not None:
            self.scale = torch.ones(len(self._delayed), dtype=torch.float32, device=self.device)
            self.amax_history = torch.zeros(self.delayed_recipe.amax_history_len, len(self._delayed), dtype=torch.float32, device=self.device)

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """The state of ``recipe``, with scales of 1 and an empty window; ``device`` is torch's default where it is None.

        Raises ``DTypeError`` for no recipe, ``ArgumentError`` for an unknown mode, another number of roles, or delayed scaling of several kinds.
        """
        return cls(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    @property
    def dtype(self) -> DType | None:
        """The format of the slots under delayed scaling."""
        if self.delayed_recipe is None:
            return None
        fp8_format = self.delayed_recipe.fp8_format
        return fp8_format.forward if self.mode == "forward" else fp8_format.backward

    def make_quantizers(self) -> list[Quantizer | None]:
        """One quantizer per slot, of its own; None for a slot in high precision."""
        return [self._quantizer(i, made) for i, made in enumerate(self._made)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is to be saved: copies on the CPU of ``scale``, ``amax_history`` and the code of the format; nothing for a recipe without state."""
        state = self._scaling_state()
        return {} if state is None else state.tensors()

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``state_dict`` gave, in place, so that quantizers made before follow; a window of another length keeps its latest entries.

        Raises ``CheckpointError`` for anything else, and changes nothing then.
        """
        state = self._scaling_state()
        if state is None:
            if saved:
                do = "load it into the recipe it was saved from"
                raise CheckpointError(expected("nothing", of=f"the saved state of {self.recipe!r}", got=", ".join(map(str, saved)), do=do))
            return
        read = ScalingState.from_tensors(saved, state.slots, self.mode).to(self.device).resized(len(state.amax_history))
        state.scale.copy_(read.scale)
        state.amax_history.copy_(read.amax_history)

    def _role(self, slot: int) -> QuantizerRole | None:
        role = QuantizerRole() if self.roles is None else self.roles[slot]
        if self.recipe.custom() or (role is not None and role.tensor_type in TENSOR_TYPES):
            return role
        by_position = _BY_POSITION[self.mode]  # which tells nothing of the kind of layer
        return QuantizerRole(tensor_type=by_position[slot % len(by_position)], name=role.name if role is not None else "")

    def _shared_recipe(self) -> DelayedScaling | None:
        requests = [made for made in self._made if isinstance(made, DelayedScalingRequest)]
        for request in requests[1:]:
            if request != requests[0]:
                do = "give the same to each of them"
                raise ArgumentError(expected(repr(requests[0]), of="every slot under delayed scaling of a layer", got=repr(request), do=do))
        if not requests:
            return None
        return self.recipe if isinstance(self.recipe, DelayedScaling) else requests[0].recipe()

    def _quantizer(self, slot: int, made: Quantizer | QuantizerRequest | None) -> Quantizer | None:
        if isinstance(made, DelayedScalingRequest):
            assert self.scale is not None and self.amax_history is not None and self.dtype is not None
            i = self._delayed.index(slot)
            return Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], self.dtype)
        assert made is None or isinstance(made, Quantizer)
        quantizer = made.copy() if made is not None else None
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and quantizer.device is None:
            quantizer.device = self.device
        return quantizer

    def _scaling_state(self) -> ScalingState | None:
        if self.scale is None or self.amax_history is None or self.dtype is None:
            return None
        return ScalingState(tuple(map(str, self._delayed)), self.dtype, self.scale, self.amax_history)
