"""``convert``: the layers of any torch model compute by Fusible, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from fusible.errors import ArgumentError, DTypeError, check_switch, expected
from fusible.models.convert.activation import activation_swap, find_activation, is_like_activation
from fusible.models.convert.linear import linear_swap, why_no_linear
from fusible.models.convert.norm import find_norm, is_like_norm, norm_swap
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.report import Layer, Report
from fusible.models.convert.selection import HIGH_PRECISION, Filter, Selection, check_names, filters_of, is_like_linear, kept_in_high_precision
from fusible.models.convert.swapping import Swap, Swapped, restore, swap
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
    keep_high_precision: Filter | Iterable[Filter] = HIGH_PRECISION,
    undo: bool = False,
) -> M:
    """Let the linear layers, norms and activations of ``model`` compute by Fusible, and give the model back. It is changed in place, in all or, where
    this raises, in nothing.

    Every module and every parameter stays the object that it was: names, tied weights, optimizers, hooks, ``state_dict``, ``save_pretrained`` and
    what asks ``isinstance(module, nn.Linear)`` go on as before. ``recipe``: how products are quantized, outside of every ``fusible.autocast``; inside
    of one, that one's holds. Without one, nothing is quantized, and linear layers stay torch's to the bit. A model that is converted already takes
    the new recipe. ``conversion_report(model)`` says what was converted, and why the rest was not.

    ``include`` and ``exclude``: the modules to look at, and those to leave alone, by name (``"mlp"`` is every module that is called so, and all
    inside; wildcards are those of a shell) or by a function ``(name, module) -> bool``. ``keep_high_precision``: linear layers that stay as they are:
    ``"first"`` and ``"last"``, those before and behind the repeated blocks, or the first and the last of a model without blocks; ``"router"``;
    ``"head"``; and names as above. ``undo``: give all modules their classes back. Raises ``DTypeError`` and ``ArgumentError``.
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(expected("an nn.Module", of="model of convert", got=f"a {type(model).__name__}", do="give the model itself"))
    if recipe is not None and not isinstance(recipe, Recipe):
        do = "give e.g. fusible.DelayedScaling() or Float8CurrentScaling()"
        raise DTypeError(expected("a recipe", of="recipe of convert", got=f"a {type(recipe).__name__}", do=do))
    check_switch(undo, "undo of convert")
    if undo:
        return _undone(model, recipe)
    selection, keep = Selection.of(include, exclude), filters_of(keep_high_precision, "keep_high_precision")
    selection.check(model)
    check_names([("keep_high_precision", one) for one in keep if one not in HIGH_PRECISION], model)
    settled = recipe.settled() if recipe is not None else None
    swaps, layers = _planned(model, settled, selection, keep)
    converted = [module for module in model.modules() if isinstance(module, ConvertedModule)]
    swap(swaps)
    for module in converted:
        module.follow(settled)
    vars(model)[_REPORT] = Report(str(settled) if settled is not None else "none, so nothing is quantized", tuple(layers))
    return model


def conversion_report(model: nn.Module) -> Report:
    """What the latest ``convert`` of a model, or of one inside it, did. Raises ``ArgumentError`` where there was none."""
    found = next((vars(module)[_REPORT] for module in model.modules() if _REPORT in vars(module)), None)
    if found is None:
        raise ArgumentError(expected("a model that fusible.convert converted", of="conversion_report", got="another", do="convert it first"))
    return found


def _undone(model: M, recipe: Recipe | None) -> M:
    if recipe is not None:
        raise ArgumentError(expected("no recipe", of="convert with undo", got=str(recipe), do="leave it out"))
    restore(model.modules())
    for module in model.modules():
        vars(module).pop(_REPORT, None)
    return model


def _planned(model: nn.Module, recipe: Recipe | None, selection: Selection, keep: tuple[Filter, ...]) -> tuple[list[Swap], list[Layer]]:
    """The swaps to make, and what is said of each layer. Nothing is changed."""
    kept = kept_in_high_precision(model, keep)
    swaps: list[Swap] = []
    layers: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            layers.append(Layer(name, "layer", "converted", f"{module.original.__name__}, earlier"))
            continue
        kind = _kind(module)
        if not kind:
            continue
        why = selection.why_not(name, module)
        if why:
            layers.append(Layer(name, kind, "left", why))
        elif name in kept:
            layers.append(Layer(name, kind, "kept", kept[name]))
        else:
            one, text = _swap_of(kind, module, recipe)
            swaps += [one] if one is not None else []
            layers.append(Layer(name, kind, "converted" if one is not None else "left", text))
    return swaps, layers


def _kind(module: nn.Module) -> str:
    """What kind of layer a module looks like; empty where Fusible has none of the kind."""
    if is_like_linear(module):
        return "linear"
    if is_like_norm(module):
        return "norm"
    return "activation" if is_like_activation(module) else ""


def _swap_of(kind: str, module: nn.Module, recipe: Recipe | None) -> tuple[Swap | None, str]:
    """The swap of a layer and what it computes then; or None and why there is none."""
    if kind == "linear":
        wrong = why_no_linear(module)
        return (None, wrong) if wrong else (linear_swap(module, recipe), _sizes(module))
    if kind == "norm":
        found = find_norm(module)
        return (None, found.wrong) if found.wrong else (norm_swap(module, found, recipe), f"{type(module).__name__} as {found.text}")
    name = find_activation(module)
    if not name:
        return None, f"{type(module).__name__} computes none of the activations of fusible.tex"
    return activation_swap(module, name, recipe), f"{type(module).__name__} as {name}"


def _sizes(module: Any) -> str:
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
    return f"{type(module).__name__} {sizes[0]} -> {sizes[1]}"
