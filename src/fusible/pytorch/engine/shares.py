"""The parameters of a module of which each process holds its share, as passes take them.

A module holds its share as ``DTensor``s, so that optimizers, clipping, checkpoints and ``fully_shard`` know what it is of. Passes work on what is
local. One autograd node lies between the two for all parameters of a pipeline. In backward it sums over the processes what is a sum over them, in one
message for each group and dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusible import tex
from fusible.pytorch.engine.parametrized import parameter_of
from fusible.quantized import QuantizedTensor

__all__ = ["Share", "gradient_sums", "laid_out_like", "local_of", "localized"]


@dataclass(frozen=True)
class Share:
    """How a module holds the share of a parameter that its op takes. ``names``: of its own parameters, which the op takes as one, joined along the
    first dimension. ``lines``: for each of them the range of the first dimension that this process takes, None for all that it holds. ``groups``: for
    each of them the processes over which its gradient is a sum, by their group's name; None where this process has all of it. ``factor``: what that
    sum, or else the gradient of this process, is multiplied by: a mean over processes is as large as one of them."""

    names: tuple[str, ...]
    lines: tuple[tuple[int, int] | None, ...]
    groups: tuple[str | None, ...]
    factor: float = 1.0

    @classmethod
    def all_of(cls, name: str) -> Share:
        """A parameter that the module holds as the op takes it."""
        return cls((name,), (None,), (None,))

    def joined(self, local: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the op takes, of what this process has of each parameter; of quantized ones by their bytes, where these are read alike."""
        taken = [part if lines is None else part[slice(*lines)] for part, lines in zip(local, self.lines, strict=True)]
        if len(taken) == 1:
            return taken[0]
        found = taken[0].joined(taken) if isinstance(taken[0], QuantizedTensor) else None
        return torch.cat(taken) if found is None else found


ModuleShare = tuple[Any, Share]
"""A module, and how it holds a parameter that its op takes."""


def localized(module_shares: Sequence[ModuleShare]) -> list[torch.Tensor]:
    """What the ops take as parameters, for each of ``module_shares``; autograd carries their gradients back."""
    parameters = [parameter_of(module, name) for module, share in module_shares for name in share.names]
    shares = [share for _, share in module_shares]
    return list(_Localized.apply(shares, *parameters)) if torch.is_grad_enabled() else _local(shares, parameters)  # type: ignore[no-untyped-call]


def gradient_sums(module_shares: Sequence[ModuleShare], wanted: Sequence[bool]) -> list[tuple[str, int]]:
    """The messages by which gradients are summed after backward: the names of the parameters, and the bytes of each. ``wanted``: whether anyone needs
    the gradient of each of ``module_shares``."""
    found: defaultdict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
    for (module, share), grad in zip(module_shares, wanted, strict=True):
        for name, group in zip(share.names, share.groups, strict=True):
            if group is not None and grad:
                parameter = _of_process(module._parameters[name])
                found[group, parameter.dtype, parameter.device].append((name, parameter.nbytes))
    return [(", ".join(dict.fromkeys(name for name, _ in of)), sum(nbytes for _, nbytes in of)) for of in found.values()]


def _local(shares: Sequence[Share], parameters: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    rest = iter(parameters)
    for share in shares:
        found.append(share.joined([_of_process(next(rest)) for _ in share.names]))
    return found


def local_of(tensor: Any) -> Any:
    """What this process has of a ``DTensor``; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def laid_out_like(parameter: Any, local: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A parameter of which this process has ``local``, as it has its part of ``parameter``."""
    if hasattr(parameter, "_local_tensor"):
        local = type(parameter)(local, parameter._spec, requires_grad=False)
    return torch.nn.Parameter(local, requires_grad)


def _of_process(parameter: Any) -> torch.Tensor:
    return local_of(parameter).detach()  # type: ignore[no-any-return]


class _Localized(torch.autograd.Function):
    """``apply(shares, *parameters) -> what the ops take``."""

    @staticmethod
    def forward(ctx: Any, shares: Sequence[Share], *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.shares, ctx.forms = shares, [_Form.of(parameter) for parameter in parameters]
        local = _local(shares, parameters)
        places = iter(range(len(parameters)))
        wanted = [[ctx.needs_input_grad[1 + next(places)] for _ in share.names] for share in shares]
        ctx.mark_non_differentiable(*(tensor for tensor, needed in zip(local, wanted, strict=True) if not any(needed)))
        return tuple(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        forms = iter(ctx.forms)
        of_parameters: list[torch.Tensor | None] = []
        sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for share, grad in zip(ctx.shares, grads, strict=True):
            own = [next(forms) for _ in share.names]
            if grad is None:
                of_parameters += [None] * len(own)
                continue
            grad = grad if share.factor == 1 else grad * share.factor
            for piece, group in zip(_split_gradient(grad, own, share.lines), share.groups, strict=True):
                if group is not None:
                    sums[group, grad.dtype, grad.device].append(len(of_parameters))
                of_parameters.append(piece)
        for (group, *_), places in sums.items():
            _sum(group, of_parameters, places)
        wrapped = [form.of_gradient(grad) for form, grad in zip(ctx.forms, of_parameters, strict=True)]
        return None, *(grad if needed else None for grad, needed in zip(wrapped, ctx.needs_input_grad[1:], strict=True))


@dataclass(frozen=True)
class _Form:
    """What a gradient has to be like: ``shape`` of what the process holds, and the class and the layout of the ``DTensor`` of which that is a share,
    if of one."""

    shape: torch.Size
    whole: tuple[Any, Any] | None

    @classmethod
    def of(cls, parameter: Any) -> _Form:
        if not hasattr(parameter, "_local_tensor"):
            return cls(parameter.shape, None)
        return cls(parameter._local_tensor.shape, (type(parameter), parameter._spec))

    def of_gradient(self, grad: torch.Tensor | None) -> Any:
        if grad is None or self.whole is None:
            return grad
        kind, layout = self.whole
        # As FSDP2 makes its own: `from_local` makes the layout anew and an autograd node, which takes 40 us for each of a model's parameters.
        return kind(grad, layout, requires_grad=False)


def _split_gradient(grad: torch.Tensor, forms: Sequence[_Form], lines: Sequence[tuple[int, int] | None]) -> list[torch.Tensor]:
    """The gradient of what parameters were joined to, as those of the parameters; 0 for lines that the process did not take."""
    sizes = [form.shape[0] if taken is None else taken[1] - taken[0] for form, taken in zip(forms, lines, strict=True)]
    pieces = grad.split(sizes) if len(sizes) > 1 else [grad]
    found: list[torch.Tensor] = []
    for piece, form, taken in zip(pieces, forms, lines, strict=True):
        if taken is None:
            found.append(piece)
            continue
        whole = piece.new_zeros(form.shape)
        whole[slice(*taken)] = piece
        found.append(whole)
    return found


def _sum(group: Any, grads: list[Any], places: Sequence[int]) -> None:
    """Replace gradients by their sums over the group, by one message."""
    flat = [grads[place].reshape(-1) for place in places]
    summed = tex.prim.all_reduce(torch.cat(flat) if len(flat) > 1 else flat[0], group)
    for place, part in zip(places, summed.split([len(each) for each in flat]), strict=True):
        grads[place] = part.view(grads[place].shape)
