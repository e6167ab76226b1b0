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

__all__ = ["AdamRule", "FP16_RANGE", "HELD", "LEAST_SCALE", "check_float_lists", "check_held_lists", "check_typed_lists"]


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


FP16_RANGE = 65504 / 2
"""What the largest number of a tensor becomes that is held in fp16 with a scale."""
LEAST_SCALE = 2.0**-126
"""The smallest normal number, whose inverse is finite."""
HELD = ((2, 4), (3, 5), (6, 7))
"""Where ``multi_tensor_adam_scaled`` has what is held in few bits (moments and masters), and where the scales of it."""


def check_held_lists(
    tensor_lists: Sequence[Sequence[Any]], function: str, floats: tuple[Any, Any, Any], codes: Collection[Any], remainder: Any
) -> None:
    """Raise unless the lists are those of ``multi_tensor_adam_scaled``. ``floats`` are the backend's fp32, bf16 and fp16, ``codes`` what E4M3 may lie
    in, and ``remainder`` is its int16."""
    fp32, bf16, fp16 = floats
    check_lists(tensor_lists, (6, 8), function, lambda _: 0)
    pairs = HELD[: (len(tensor_lists) - 2) // 2]
    check_lists([tensor_lists[i] for i in (0, 1, *(held for held, _ in pairs))], (2 + len(pairs),), function, lambda x: math.prod(x.shape))
    do = "pass the lists in the order it documents"
    for place, tensors in enumerate(tensor_lists[:2]):
        for x in tensors:
            if x.dtype not in floats:
                of = f"tensor_lists[{place}] of {function}"
                raise DTypeError(expected("float32, bfloat16 or float16", of=of, got=x.dtype, do=do))
    for held, scales in pairs:
        for p, x, scale in zip(tensor_lists[1], tensor_lists[held], tensor_lists[scales], strict=True):
            of = f"tensor_lists[{held}] of {function}"
            if x.dtype == remainder and held == HELD[-1][0]:
                if p.dtype != bf16:
                    raise DTypeError(expected("a remainder of a bfloat16 parameter", of=of, got=f"one of {p.dtype}", do="hold the master in fp32"))
            elif x.dtype not in (*floats, *codes):
                raise DTypeError(expected("float32, bfloat16, float16 or uint8", of=of, got=x.dtype, do=do))
            scaled = x.dtype == fp16 or x.dtype in codes
            if scale.dtype != fp32 or math.prod(scale.shape) != int(scaled):
                got, of = f"{scale.dtype} {list(scale.shape)}", f"tensor_lists[{scales}] of {function}, beside {x.dtype}"
                raise DTypeError(expected("one number in float32" if scaled else "an empty tensor of float32", of=of, got=got, do=do))
