"""What optimizer kernels of all backends share: checks beyond ``check_lists``, and the numbers of an Adam step. Whatever has ``shape`` and
``dtype`` is a tensor here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.calls.checks import adam_corrections, check_lists
from fusible.tex.interface.declare import CallArguments

__all__ = ["AdamRule", "check_float_lists", "check_typed_lists"]


@dataclass(frozen=True)
class AdamRule:
    """The rule of a call of ``multi_tensor_adam`` or one of its kind; ``lr`` and the corrections are numbers, or tensors of one number."""

    lr: Any
    beta1: float
    beta2: float
    epsilon: float
    correction1: Any
    correction2: Any
    l2: float
    decoupled: float

    @classmethod
    def of(cls, call: CallArguments, lr: Any = None, corrections: tuple[Any, Any] | None = None) -> AdamRule:
        """The rule of a call. ``lr`` and ``corrections`` replace those of the call where they are tensors.

        Raises ``ArgumentError`` for an unknown mode.
        """
        known = adam_corrections(call.mode, call.bias_correction, 0 if corrections else call.step, call.beta1, call.beta2)
        decays = (call.weight_decay, 0.0) if call.mode == 0 else (0.0, call.weight_decay)
        return cls(call.lr if lr is None else lr, call.beta1, call.beta2, call.epsilon, *(corrections or known), *decays)


def check_float_lists(
    tensor_lists: Sequence[Sequence[Any]], counts: tuple[int, ...], function: str, alike: Callable[[Any], Any], floating: Collection[Any]
) -> None:
    """``check_lists`` of tensors whose dtypes are all among ``floating``, the backend's values of fp32, bf16 and fp16."""
    check_lists(tensor_lists, counts, function, alike)
    for place, tensors in enumerate(tensor_lists):
        for x in tensors:
            if x.dtype not in floating:
                raise DTypeError(expected("float32, bfloat16 or float16", of=f"tensor_lists[{place}] of {function}", got=x.dtype, do="cast it"))


def check_typed_lists(tensor_lists: Sequence[Sequence[Any]], types: Sequence[Sequence[Any] | None], function: str, single: int = 0) -> None:
    """Raise unless there is a list for each entry of ``types``, whose tensors are of one of these dtypes (None: of any).

    Tensors that belong together agree in size; the last ``single`` lists hold one number per tensor.
    """
    check_lists(tensor_lists, (len(types),), function, lambda _: 0)
    alike = len(types) - single
    check_lists(tensor_lists[:alike], (alike,), function, lambda x: math.prod(x.shape))
    for place, (tensors, dtypes) in enumerate(zip(tensor_lists, types, strict=True)):
        of = f"tensor_lists[{place}] of {function}"
        for x in tensors:
            if dtypes is not None and x.dtype not in dtypes:
                wanted = " or ".join(map(str, dtypes))
                raise DTypeError(expected(wanted, of=of, got=x.dtype, do="pass the lists in the order it documents"))
            if place >= alike and math.prod(x.shape) != 1:
                raise DTypeError(expected("one number", of=of, got=list(x.shape), do="pass one per tensor"))
