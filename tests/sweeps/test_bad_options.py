"""Recipes, contexts, optimizers and caches refuse an option that they cannot take, in one sentence that names it or whose it is."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from scores import Scores, score
from wrong_values import others

import fusible
from fusible import pytorch, quantized


def _recipes() -> dict[str, type]:
    named = {name: getattr(pytorch, name) for name in pytorch.__all__}
    own = {quantized.Recipe, quantized.CustomRecipe}
    return {name: cls for name, cls in named.items() if isinstance(cls, type) and issubclass(cls, quantized.Recipe) and cls not in own}


def _options(made: Any, **given: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(made):
        fields = [field.name for field in dataclasses.fields(made) if field.init and not field.name.startswith("_")]
        return {name: getattr(made(), name) for name in fields}
    return {name: given.get(name, p.default) for name, p in inspect.signature(made).parameters.items() if name != "params"}


def _subjects() -> dict[str, tuple[Any, dict[str, Any]]]:
    cache = _options(fusible.KVCache, sequences=2, capacity=8, page_size=4, pages=4, dtype=torch.float32)
    del cache["device"]  # of numbers and names torch says which are devices, here or elsewhere
    return {
        **{name: (cls, _options(cls)) for name, cls in _recipes().items()},
        "autocast": (fusible.autocast, {"enabled": True, "recipe": fusible.DelayedScaling()}),
        "quantized_model_init": (fusible.quantized_model_init, _options(fusible.quantized_model_init)),
        "KVCache": (fusible.KVCache, cache),
        "FusedAdam": (lambda **given: fusible.FusedAdam([torch.nn.Parameter(torch.ones(4))], **given), _options(fusible.FusedAdam)),
        "FusedSGD": (lambda **given: fusible.FusedSGD([torch.nn.Parameter(torch.ones(4))], **given), _options(fusible.FusedSGD, lr=0.1)),
    }


ALLOWED = {"None", "99", "2.5", "-1"}
"""A default, or a number for a number."""


def test_every_option_refuses_what_it_cannot_take() -> None:
    scores = Scores()
    for name, (made, options) in _subjects().items():
        made(**options)
        for option, good in options.items():
            for what, bad in others(good):
                try:
                    made(**{**options, option: bad})
                except Exception as error:
                    scores.add(f"{name}: {option} {what}", score(error, {name, option}), error)
                else:
                    scores.add(f"{name}: {option} {what}", "accepted" if what in ALLOWED else "accepted without a reason")
    print(dict(scores.counts))
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 300 and scores.counts["accepted"] < 60


def test_every_recipe_is_swept() -> None:
    assert len(_recipes()) >= 6 and "DelayedScaling" in _recipes()
