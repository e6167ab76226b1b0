"""Checks of optimizers: of parameters and groups when they are added; and of a step's tensors after it has failed, as to look at every tensor before
each step would cost more than all other checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.optimizer_batches import local, needs_own_step
from fusible.pytorch.optimizer_states import is_scaled, scale_of

__all__ = ["check_floats", "check_held", "check_masters", "check_steppable", "listed", "listed_group", "no_state"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HELD = (torch.uint8, torch.int16)
"""What states may be of, too: codes, and the lower words of masters."""


def listed(params: Any, title: str) -> list[Any]:
    """``params`` as a list of parameters, of pairs of a name and a parameter, or of groups. Raises ``ArgumentError`` where it is none of these."""
    wanted, of, do = "a list of parameters or of groups", f"params of {title}", "pass model.parameters()"
    if isinstance(params, torch.Tensor | str | Mapping) or not hasattr(params, "__iter__"):
        raise ArgumentError(expected(wanted, of=of, got=f"a {type(params).__name__}", do=do))
    found = list(params)
    if not found:
        raise ArgumentError(expected(wanted, of=of, got="an empty one", do=do))
    groups = [isinstance(item, dict) for item in found]
    if any(groups) and not all(groups):
        raise ArgumentError(expected(wanted, of=of, got="both", do=do))
    if not any(groups):
        _check_parameters(found, title)
    return found


def listed_group(group: Any, title: str, taken: Iterable[Any]) -> dict[str, Any]:
    """A group with its parameters as a list. Raises ``ArgumentError`` for one without, and for a parameter that is ``taken``, or there twice."""
    of, do = f"a group of params of {title}", "pass {'params': [...]}"
    if not isinstance(group, dict) or "params" not in group:
        raise ArgumentError(expected("a dictionary with 'params'", of=of, got=f"a {type(group).__name__} without", do=do))
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    if isinstance(params, str | set | Mapping) or not hasattr(params, "__iter__"):
        raise ArgumentError(expected("a list of parameters", of=of, got=f"a {type(params).__name__}", do=do))
    params = list(params)
    _check_parameters(params, title)
    ids = [id(item[1] if isinstance(item, tuple) else item) for item in params]
    if len(set(ids)) < len(ids) or not set(ids).isdisjoint(map(id, taken)):
        raise ArgumentError(expected("each parameter once", of=f"params of {title}", got="one of them twice", do="leave it out where it comes again"))
    return {**group, "params": params}


def _check_parameters(params: Sequence[Any], title: str) -> None:
    for place, item in enumerate(params):
        p = item[1] if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else item
        of = f"params[{place}] of {title}"
        if not isinstance(p, torch.Tensor):
            raise ArgumentError(expected("a parameter", of=of, got=f"a {type(p).__name__}", do="pass tensors that require gradients"))
        if not (p.is_leaf or p.retains_grad):
            got = "a result of differentiable operations"
            raise ArgumentError(expected("a parameter", of=of, got=got, do="pass the tensor that it was computed from"))


def check_floats(dtype: torch.dtype, title: str) -> None:
    """Raise ``ArgumentError`` for a dtype that has no gradients to follow."""
    if not dtype.is_floating_point:
        of, do = f"parameters of {title} and their gradients", "leave out what has none"
        raise ArgumentError(expected("floating-point numbers", of=of, got=dtype, do=do))


def check_masters(parameters: Sequence[Any], masters: Sequence[Any], title: str) -> None:
    """Raise ``ArgumentError`` where parameters cannot take the values of their masters: kernels see the masters alone."""
    if len(set(map(id, parameters))) < len(parameters):
        raise ArgumentError(expected("each parameter once", of=f"params of {title}", got="one of them twice", do="leave it out"))
    for p, master in zip(parameters, masters, strict=True):
        check_floats(p.dtype, title)
        if local(p).shape != master.shape:
            of, do = f"a parameter of {title} and its master_param", "load a state dict of its own"
            raise ArgumentError(expected("equal shapes", of=of, got=f"{list(local(p).shape)} and {list(master.shape)}", do=do))


def no_state(got: Any, title: str) -> ArgumentError:
    """The error for a parameter's state that is no dictionary."""
    of, do = f"the state of a parameter of {title}", "load a state dict of its own"
    return ArgumentError(expected("a dictionary", of=of, got=f"a {type(got).__name__}", do=do))


def check_steppable(
    groups: Sequence[Any], states: Mapping[Any, Any], slots: Sequence[str], title: str, gradient: str = "grad", scaled: bool = False
) -> None:
    """Raise ``ArgumentError`` where the groups, their parameters and their states cannot be stepped, for reasons that the step does not see.
    ``gradient``: the attribute that has the gradients. ``scaled``: states may be codes, or remainders."""
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list):
            do = "leave the list that the optimizer made"
            raise ArgumentError(expected("a list", of=f"params of a group of {title}", got=f"a {type(params).__name__}", do=do))
        _check_parameters(params, title)
        if len(set(map(id, params))) < len(params):
            do = "leave it out where it comes again"
            raise ArgumentError(expected("each parameter once", of=f"params of {title}", got="one of them twice", do=do))
        for p in params:
            if getattr(p, gradient, None) is not None:
                _check_tensors(p, getattr(p, gradient), states.get(p), slots, title, (*_FLOATS, *_HELD) if scaled else _FLOATS)


def _check_tensors(p: Any, gradient: Any, state: Any, slots: Sequence[str], title: str, held: tuple[torch.dtype, ...]) -> None:
    do = "load a state dict of its own, or make the optimizer anew"
    if state is not None and not isinstance(state, dict):
        raise no_state(state, title)
    named = {"gradient": gradient, "parameter": p, **{name: (state or {}).get(name) for name in (*slots, "master_param") if state and name in state}}
    for name, x in named.items():
        of = f"{name} of a parameter of {title}" if name != "parameter" else f"a parameter of {title}"
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(expected("a tensor", of=of, got=f"a {type(x).__name__}", do=do))
        own = local(x)
        known = _FLOATS if name in ("gradient", "parameter") else held
        if not needs_own_step(own) and (own.layout is not torch.strided or own.dtype not in known or own.device != p.device):
            got = f"one of {own.dtype}, {own.layout}, on {own.device}"
            raise ArgumentError(expected(f"a dense tensor of fp32, bf16 or fp16 on {p.device}", of=of, got=got, do=do))
        if tuple(x.shape) != tuple(gradient.shape):
            got = f"{list(x.shape)} beside {list(gradient.shape)}"
            raise ArgumentError(expected("equal shapes", of=f"{of} and of its gradient", got=got, do=do))


def check_held(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, name: str, title: str) -> None:
    """Raise ``ArgumentError`` unless an entry of a state is held in ``dtype``, and has just the scale that belongs to it."""
    do, of = "load a state dict of its own, or make the optimizer anew", f"of a parameter of {title}"
    if x.dtype is not dtype:
        raise ArgumentError(expected(str(dtype), of=f"{name} {of}", got=x.dtype, do=do))
    wanted = int(is_scaled(dtype))
    fits = isinstance(scale, torch.Tensor) and (scale.dtype, scale.layout, scale.device) == (torch.float32, torch.strided, x.device)
    if not fits or scale.numel() != wanted:
        got = f"{scale.dtype} {list(scale.shape)} on {scale.device}" if isinstance(scale, torch.Tensor) else f"a {type(scale).__name__}"
        raise ArgumentError(expected(f"{wanted} dense numbers in fp32 on {x.device}", of=f"{scale_of(name)} {of}", got=got, do=do))
