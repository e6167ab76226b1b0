"""Rotary positions as configurations say them: bases, partial heads, and contexts that are longer than those of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fusible.models.families.config import Config

__all__ = ["Rotation", "rotary_options", "rotation"]


def rotary_options(config: Config, head_width: int, layer_type: str | None = None, scale: float | None = None) -> dict[str, Any]:
    """The options of ``pytorch.DotProductAttention`` that say how a layer's heads are rotated, and its scale, where it is another one than usual:
    ``scale`` is that of heads that are not rotated.

    ``rope_parameters``, of the model or of each ``layer_type``; in older files ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``.
    """
    by = rotation(config, head_width, layer_type)
    options: dict[str, Any] = {"rope_base": by.base} | ({} if scale is None else {"scale": scale})
    if by.width != head_width:
        options["rope_width"] = by.width
    if by.factors:
        options["rope_factors"] = by.factors
    if by.magnitude != 1.0:  # the products of q and k are multiplied by its square, where all columns are rotated
        if by.width != head_width:
            raise config.refuse("partial_rotary_factor", "1 with positions that scale attention", by.width / head_width)
        options["scale"] = by.magnitude**2 * (head_width**-0.5 if scale is None else scale)
    return options


class Rotation(NamedTuple):
    """How heads are rotated: ``width`` columns, pair i by ``base**(-2 i / width) * factors[i]`` a position, or without ``factors`` by the first;
    ``magnitude``: what cosines and sines are multiplied by; ``mean``: by what YaRN has it that all scores are multiplied (``mscale_all_dim``)."""

    base: float
    width: int
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    mean: float = 1.0


def rotation(config: Config, head_width: int, layer_type: str | None = None) -> Rotation:
    """The rotation that a configuration tells of. Raises ``CheckpointError`` for a kind that is not known."""
    if not config.has("rope_parameters") and layer_type == "sliding_attention" and config.has("rope_local_base_freq"):
        return Rotation(config.number("rope_local_base_freq"), head_width)
    name, scaling = _parameters(config, layer_type)
    base = (scaling if scaling.has("rope_theta") else config).number("rope_theta", 10000.0)
    share = (scaling if scaling.has("partial_rotary_factor") else config).number("partial_rotary_factor", 1.0)
    width = int(head_width * share)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _FACTORS:
        raise config.refuse(name, f"rope_type {', '.join(_FACTORS)}")
    if kind == "default":
        return Rotation(base, width)
    mean = _magnitude(scaling.number("mscale_all_dim", 0.0), scaling.number("factor", 1.0)) ** 2
    return Rotation(base, width, *_FACTORS[kind](scaling, base, width, config), mean)


def _parameters(config: Config, layer_type: str | None) -> tuple[str, Config]:
    """What is said of a layer's rotation, and under which name. What somebody has added by the former name holds in the place of the other, as in
    transformers; so does a context of training that stands beside them."""
    name = "rope_scaling" if config.entries.get("rope_scaling") else "rope_parameters"
    told = config.part("rope_parameters")
    of_layers = told is not None and layer_type is not None and isinstance(told.entries.get(layer_type), dict)
    if told is not None and not of_layers and config.has("rope_local_base_freq"):
        raise config.refuse("rope_parameters", "those of full_attention and of sliding_attention")
    if of_layers and name == "rope_scaling":
        raise config.refuse(name, "none beside rope_parameters of each kind of layer")
    found = told.part(layer_type) if of_layers else config.part(name)  # type: ignore[union-attr, arg-type]  # pyright: ignore
    trained = "original_max_position_embeddings"
    beside = {trained: config.entries[trained]} if config.has(trained) else {}
    return name, Config({**({} if found is None else found.entries), **beside})


_Factors = tuple[tuple[float, ...], float]


def _none(scaling: Config, base: float, width: int, config: Config) -> _Factors:
    return (), 1.0


def _linear(scaling: Config, base: float, width: int, config: Config) -> _Factors:
    """Positions are divided by ``factor`` (Chen et al. 2023, arXiv:2306.15595)."""
    return (1 / scaling.number("factor"),) * (width // 2), 1.0


def _llama3(scaling: Config, base: float, width: int, config: Config) -> _Factors:
    """Long waves are slower by ``factor``, short ones as they were, those between interpolated (Llama 3.1, arXiv:2407.21783)."""
    factor, trained = scaling.number("factor"), scaling.number("original_max_position_embeddings")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    factors = []
    for pair in range(width // 2):
        turns = trained * base ** (-2 * pair / width) / (2 * math.pi)  # in a training context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append((1 - share) / factor + share)
    return tuple(factors), 1.0


def _yarn(scaling: Config, base: float, width: int, config: Config) -> _Factors:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): slower by ``factor`` where a wave turns fewer than ``beta_slow`` times in a training context, as
    it was where more than ``beta_fast``, on a ramp over the pairs between."""
    trained = scaling.number("original_max_position_embeddings")
    factor = scaling.number("factor", config.size("max_position_embeddings") / trained)

    def pair_of(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(scaling.number("beta_fast", 32.0)), pair_of(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = [min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0) for pair in range(width // 2)]
    return tuple(share / factor + 1 - share for share in ramp), _yarn_attention(scaling, factor)


def _yarn_attention(scaling: Config, factor: float) -> float:
    """By what cosines and sines are multiplied: ``1 + 0.1 ln factor``, unless the file says otherwise."""
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    if scaling.number("mscale", 0.0) and scaling.number("mscale_all_dim", 0.0):
        return _magnitude(scaling.number("mscale"), factor) / _magnitude(scaling.number("mscale_all_dim"), factor)
    return _magnitude(1.0, factor)


def _magnitude(weight: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


_FACTORS: dict[str, Callable[[Config, float, int, Config], _Factors]] = {"default": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
"""By ``rope_type``: the factor of each pair's frequency, and of cosines and sines."""
