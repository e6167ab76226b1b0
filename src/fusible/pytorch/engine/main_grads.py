"""``main_grad``: the tensor of a parameter in which a trainer keeps its gradient; the products that give the gradient write it there themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["MainGrad", "end_sums", "first_microbatch", "is_first_microbatch", "sums_so_far"]

_first: ContextVar[bool] = ContextVar("first_microbatch", default=False)


@contextmanager
def first_microbatch() -> Iterator[None]:
    """While open, calls are those of a step's first microbatch: the gradients of their weights are written over ``main_grad``."""
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)


def is_first_microbatch() -> bool:
    """Whether ``first_microbatch`` is open."""
    return _first.get()


class MainGrad(NamedTuple):
    """Where the gradient of a parameter goes. ``overwrites``: it is written over what is there, else added to it. A backward looks for it when it
    comes: a trainer may have put another tensor there since the forward."""

    tensor: torch.Tensor
    overwrites: bool

    @classmethod
    def of(cls, parameter: Any) -> MainGrad | None:
        """None for a parameter without a ``main_grad``. One with a true ``overwrite_main_grad`` (Megatron-FSDP sets it) has it written over. Raises
        ``DTypeError``, ``ShapeError`` or ``ArgumentError`` for one to which the gradient cannot be added."""
        tensor = getattr(parameter, "main_grad", None)
        if tensor is None:
            return None
        _check(parameter, tensor)
        return cls(tensor, _first.get() or bool(getattr(parameter, "overwrite_main_grad", False)))


_SUMS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DOUBLE = frozenset({torch.float64})


def _check(parameter: Any, tensor: Any) -> None:
    of = "main_grad of a parameter"
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(expected("a torch.Tensor", of=of, got=f"a {type(tensor).__qualname__}", do="allocate one of its shape, or leave it unset"))
    if tensor.dtype not in (_DOUBLE if parameter.dtype is torch.float64 else _SUMS):
        wanted = "float64, as the parameter" if parameter.dtype is torch.float64 else "float32, bfloat16 or float16"
        raise DTypeError(expected(wanted, of=of, got=str(tensor.dtype).removeprefix("torch."), do="allocate it as one of these"))
    if tensor.shape != parameter.shape:
        raise ShapeError(expected(f"its shape, {list(parameter.shape)}", of=of, got=list(tensor.shape), do="allocate it so"))
    if tensor.device != parameter.device:
        raise ArgumentError(expected(f"a tensor on {parameter.device}, as it is", of=of, got=f"one on {tensor.device}", do="allocate it there"))


def sums_so_far(main_grads: Sequence[MainGrad], *, in_place: bool) -> list[torch.Tensor]:
    """What the products of a backward add to, in the order of forward: the tensors themselves, emptied where they are written over.

    Two uses of one weight share a tensor, of which backward comes to the first last. What is written over is that one's in the end, as in NVIDIA's
    modules, so the others get zeros to add to, which are forgotten. Of an executor that does not add ``in_place`` they get zeros, too, and what comes
    of them is added by ``end_sums``.
    """
    sums: list[torch.Tensor] = []
    for place, (tensor, overwrites) in enumerate(main_grads):
        if (overwrites or not in_place) and _is_repeated(main_grads, place):
            sums.append(torch.zeros_like(tensor))
        else:
            sums.append(tensor.zero_() if overwrites else tensor)
    return sums


def end_sums(main_grads: Sequence[MainGrad], summed: Sequence[torch.Tensor | None]) -> None:
    """Bring to ``main_grads`` the sums that an executor made elsewhere, of those that ``sums_so_far`` gave it."""
    for place, ((tensor, overwrites), found) in enumerate(zip(main_grads, summed, strict=True)):
        if found is None or found.data_ptr() == tensor.data_ptr():
            continue
        if not _is_repeated(main_grads, place):
            tensor.copy_(found)
        elif not overwrites:
            tensor.add_(found)


def _is_repeated(main_grads: Sequence[MainGrad], place: int) -> bool:
    """Whether a tensor is that of an earlier place, too."""
    own = main_grads[place].tensor.data_ptr()
    return any(earlier.tensor.data_ptr() == own for earlier in main_grads[:place])
