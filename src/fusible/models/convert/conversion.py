"""``convert``: the layers of any torch model compute by Fusible, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from fusible.errors import ArgumentError, DTypeError, check_switch, expected
from fusible.models.convert.attention import ConvertedAttention
from fusible.models.convert.experts import ConvertedExperts
from fusible.models.convert.mlp import ConvertedMLP
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.planning import Planner
from fusible.models.convert.report import Report
from fusible.models.convert.scaled_products import attention_configs, attention_writes, register
from fusible.models.convert.selection import HIGH_PRECISION, Filter, Selection, check_names, filters_of
from fusible.models.convert.swapping import restore, swap
from fusible.quantized import Recipe

__all__ = ["conversion_report", "convert"]

M = TypeVar("M", bound=nn.Module)

_REPORT = "_fusible_report"


def convert(
    model: M,
    recipe: Recipe | None = None,
    *,
    include: Filter | Iterable[Filter] | None = None,
    exclude: Filter | Iterable[Filter] | None = None,
    keep_high_precision: Filter | Iterable[Filter] | None = HIGH_PRECISION,
    undo: bool = False,
) -> M:
    """Let the linear layers, norms, activations, MLPs, experts and attention of ``model`` compute by Fusible, and give the model back. It is changed
    in place, in all or, where this raises, in nothing.

    Every module and every parameter stays the object that it was: names, tied weights, optimizers, hooks, ``state_dict``, ``save_pretrained`` and
    what asks ``isinstance(module, nn.Linear)`` go on as before. ``recipe``: how products are quantized, outside of every ``fusible.autocast``;
    inside of one, that one's holds. Without one, nothing is quantized, and linear layers stay torch's to the bit. A model that is converted already
    takes the new recipe, and its weights that one product takes are put together again, but for what ``include`` and ``exclude`` leave alone.
    ``conversion_report(model)`` says what was converted, and why the rest was not.

    What is adjacent is computed together: an MLP as one pipeline, and queries, keys and values as one product. Their weights are moved to lie one
    behind another for that. Where somebody has hooked or replaced a layer, as PEFT's LoRA does, layers are called one by one. Attention is an
    implementation in the configuration of transformers' model, as ``set_attn_implementation`` sets one: a model that shares the configuration takes
    it, too. Scaling states of delayed scaling are no part of ``state_dict``: ``scaling_states``. For inference,
    ``fusible.quantize_parameters(model)`` holds weights in 8 bits alone, and in a block of ``fusible.frozen_weights()`` they are not read at each
    call to see whether they have changed. transformers' FP8 modules keep their weights as they lie; of them a recipe, whichever, says that
    activations are quantized, too, as their checkpoint has it. torch's own encoder layers call the layers inside them in inference, too, where they
    would be one call of torch's.

    ``include`` and ``exclude``: the modules to look at, and those to leave alone, by name (``"mlp"`` is every module that is called so, and all
    inside; wildcards are those of a shell) or by a function ``(name, module) -> bool``. ``keep_high_precision``: linear layers that stay as they
    are: ``"first"`` and ``"last"``, those before and behind the repeated blocks, or the first and the last of a model without blocks; ``"router"``;
    ``"head"``; and names as above; none of them where it is None or empty. ``undo``: give all modules their classes back; it takes none of these
    options, but any part of a model. Raises ``DTypeError`` and ``ArgumentError``.
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(expected("an nn.Module", of="model of convert", got=f"a {type(model).__name__}", do="give the model itself"))
    if recipe is not None and not isinstance(recipe, Recipe):
        do = "give e.g. fusible.DelayedScaling() or Float8CurrentScaling()"
        raise DTypeError(expected("a recipe", of="recipe of convert", got=f"a {type(recipe).__name__}", do=do))
    check_switch(undo, "undo of convert")
    if undo:
        kept = None if keep_high_precision is HIGH_PRECISION else keep_high_precision
        _check_nothing_given(recipe=recipe, include=include, exclude=exclude, keep_high_precision=kept)
        return _undone(model)
    selection, keep = Selection.of(include, exclude), filters_of(keep_high_precision, "keep_high_precision")
    selection.check(model)
    check_names([("keep_high_precision", one) for one in keep if one not in HIGH_PRECISION], model)
    fixed_recipe = recipe.immutable() if recipe is not None else None
    plan = Planner(model, fixed_recipe, selection, keep)
    earlier = [one for name, one in model.named_modules() if isinstance(one, ConvertedModule) and not selection.why_not(name, one)]
    if plan.configs:
        register()
    swap(plan.swaps, attention_writes(plan.configs))
    try:
        for one in plan.swaps:
            if isinstance(one.module, ConvertedMLP | ConvertedAttention):
                one.module.join()
        for relay in plan.relays:
            relay.link()
    except BaseException:
        restore((one.module for one in plan.swaps), attention_writes(plan.configs, undo=True))
        raise
    for module in earlier:
        module.follow(fixed_recipe)
        if isinstance(module, ConvertedMLP | ConvertedAttention):  # somebody may have moved their weights since
            module.join()
    vars(model)[_REPORT] = Report(str(fixed_recipe) if fixed_recipe is not None else "none, so nothing is quantized", plan.layers)
    return model


def conversion_report(model: nn.Module) -> Report:
    """What the latest ``convert`` of a model, or of one inside it, did. Raises ``ArgumentError`` where there was none.

    A stack of experts that its own class computes, unquantized, is among those that are left, with the reason: what is known of it when it is
    converted, or of its latest call.
    """
    found = next((module for module in model.modules() if _REPORT in vars(module)), None)
    if found is None:
        raise ArgumentError(expected("a model that fusible.convert converted", of="conversion_report", got="another", do="convert it first"))
    report: Report = vars(found)[_REPORT]
    return report.with_left({name: one.fell_back for name, one in found.named_modules() if isinstance(one, ConvertedExperts) and one.fell_back})


def _check_nothing_given(**options: Any) -> None:
    """Raise ``ArgumentError`` where there are options that ``undo`` would pass over."""
    for name, value in options.items():
        if value is not None:
            do = "leave it out" if name == "recipe" else "undo the part that you mean, as convert(model.get_submodule(name), undo=True)"
            raise ArgumentError(expected(f"no {name}", of="convert with undo", got=repr(value), do=do))


def _undone(model: M) -> M:
    restore(model.modules(), attention_writes([config for _, _, config in attention_configs(model)], undo=True))
    for module in model.modules():
        vars(module).pop(_REPORT, None)
    return model
