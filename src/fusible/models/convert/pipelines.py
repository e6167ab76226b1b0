"""Pipelines of converted modules: by which recipe they run, and how a module of any form of input calls one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusible.models.convert.as_found import AsFound
from fusible.models.convert.swapping import Swapped
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.engine.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.compiled import handle_of
from fusible.pytorch.engine.lowered import own_parameter
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.tracing import TracedRun
from fusible.pytorch.modules.base import BaseModule
from fusible.quantized import QuantizedTensor, Recipe

__all__ = ["ConvertedModule", "ConvertedRunner", "placeholder", "quantizes"]


class ConvertedRunner(PipelineRunner):
    """Runs a converted module's ops: under the ``autocast`` in force, and outside of every one by the module's own recipe."""

    batched = False

    def __init__(self, bound: Sequence[BoundOp], own: autocast) -> None:
        super().__init__(bound)
        self.own = own

    def _context_of_call(self, repeated: bool) -> autocast:
        context = current_autocast()
        if context is OUTSIDE:
            if repeated and self._context is not OUTSIDE:
                return self._context
            context = self.own
        self._context = context
        return context


def placeholder(parameter: torch.Tensor) -> Tensor:
    """What stands for a parameter in an op: its shape and dtype. The parameter itself is the module's, and may be another one by the next call."""
    return make_nvte_tensor(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def quantizes(recipe: Recipe | None) -> bool:
    """Whether operations compute otherwise by a recipe than without one."""
    return recipe is not None and not (recipe.high_precision() and getattr(recipe, "lowest", None) is None)


class ConvertedModule(Swapped, BaseModule):
    """A module of another library whose ops are one pipeline. ``forward`` is called as that of its former class, on ``x [*, width]``.

    Outside of every ``autocast`` it follows the recipe that ``convert`` was given; ``autocast(enabled=False)`` switches that off. Its state dict is
    that of its former class: scaling states are no part of it, so that files of other libraries stay theirs (``scaling_states``).
    """

    # The state dict is that of the former class, and so are the ways in and out of one, and how parameters begin.
    kept = ("_save_to_state_dict", "_load_from_state_dict", "load_state_dict", "named_buffers", "reset_parameters", "extra_repr", "compile")
    kept += ("register_parameter",)  # a forward of the former class may do without one
    _recipe: Recipe | None
    """Of the conversion: what it follows outside of every ``autocast``."""
    _own: autocast
    """The same as a context."""
    _latest: Recipe | None
    """What the latest call followed, which a forward that backward repeats follows too."""

    @classmethod
    def attributes(cls, module: nn.Module, bound: Sequence[tuple[Op, Any, tuple[str, ...]]], recipe: Recipe | None) -> dict[str, Any]:
        """The attributes that ``BaseModule.__init__`` sets, of ops whose parameters a holder has under the names that stand beside them."""
        made = tuple(BoundOp(op, holder, names) for op, holder, names in bound)
        return {
            "_ops": tuple(b.op for b in made),
            "_bound": made,
            "_executor": "eager",
            "_runners": {},
            "_set_aside": {},
            "_kept_states": (),
            "_handed_out": {},
            "_unread": False,
            "_handle": handle_of(module),
            "_recipe": recipe,
            "_own": autocast(recipe is not None, recipe),
            "_latest": None,
        }

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        return ConvertedRunner(bound, self._own)

    def follow(self, recipe: Recipe | None) -> None:
        """Follow another recipe from now on."""
        own = autocast(recipe is not None, recipe)
        vars(self).update(_recipe=recipe, _own=own)
        for runner in self._runners.values():
            if isinstance(runner, ConvertedRunner):
                runner.own = own

    def _in_force(self) -> Recipe | None:
        """The recipe that a call follows which begins now."""
        context = current_autocast()
        if torch.compiler.is_compiling():
            return self._recipe if context is OUTSIDE else context.recipe
        if context is not OUTSIDE:
            recipe = context.recipe
        elif torch._C._current_graph_task_id() != -1:  # repeated by activation checkpointing
            return self._latest
        else:
            recipe = self._recipe
        vars(self)["_latest"] = recipe
        return recipe

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """The pipeline's output for ``x [*, width]``."""
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        y = self._in_graph(rows) if torch.compiler.is_compiling() else self._pipeline_now().run(rows, (), {})[0]
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _pipeline_now(self) -> PipelineRunner:
        runners = self._runners
        return next(iter(runners.values())) if len(runners) == 1 else self._runner()

    def _in_graph(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, where ``torch.compile`` traces the call."""
        return TracedRun(self, 0, [self], self._own).in_chain(rows, (), ChainCall())

    def _goes_with(self, found: AsFound) -> bool:
        """Whether it may compute for layers: they are converted still, by the same recipe, and what was read of them holds."""
        own = self._recipe
        for layer, _ in found.forms:
            if not isinstance(layer, ConvertedModule) or not (layer._recipe is own or layer._recipe == own):
                return False
        return found.holds()

    def _is_plain(self, recipe: Recipe | None) -> bool:
        """Whether the former class computes what is asked: nothing is quantized, and no parameter is held in 8 bits."""
        return not quantizes(recipe) and not any(isinstance(own_parameter(self, name), QuantizedTensor) for name in self._parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_own": None, "_latest": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self)["_own"] = autocast(self._recipe is not None, self._recipe)
