"""``Linear``: a linear layer as a fused operation of its parts."""

from __future__ import annotations

from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.ops.basic import AllReduce, BasicLinear, Bias, ReduceScatter
from fusible.pytorch.ops.basic.parallel import TensorParallel, share
from fusible.pytorch.ops.op import BasicOperation, FusedOperation

__all__ = ["Linear"]

_PARTS = {"weight": 0, "bias": 1}
"""Which part has the parameter of a name."""


def _of_part(name: str) -> Any:
    """The property of a ``Linear`` that is its part's parameter of the name; None without one."""

    def get(self: Linear) -> torch.nn.Parameter | None:
        return getattr(self.basic_ops[_PARTS[name]], name) if name == "weight" or self._has_bias else None

    return property(get, lambda self, value: self.register_parameter(name, value), lambda self: self.register_parameter(name, None))


class Linear(FusedOperation):
    """``y = x @ weight.T + bias``: ``BasicLinear`` and ``Bias``. ``weight`` and ``bias`` are theirs; a state dict has ``basic_ops.0.weight`` and
    ``basic_ops.1.bias``, and one with ``weight`` and ``bias`` is loaded too.

    ``tensor_parallel_mode="column"``: each process has a part of the columns of ``y``, of the rows of ``weight`` and of ``bias``.
    ``"row"``: each has a part of the columns of ``x`` and ``weight``, and a ``bias [out_features]`` of its own, and what they make is summed, so that
    the layer's bias is the sum of theirs. Then ``AllReduce``, or with ``sequence_parallel`` ``ReduceScatter``, is a part too. Other options are
    ``BasicLinear``'s, ``userbuffers_options`` excepted.
    """

    fixed_options = frozenset({"in_features", "out_features"})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        parallel = TensorParallel.of(tensor_parallel_mode, tensor_parallel_group, sequence_parallel, "Linear")
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        shared = {"tensor_parallel": parallel.mode is not None, "tensor_parallel_group": parallel.group}
        own = {"accumulate_into_main_grad": accumulate_into_main_grad, "rng_state_tracker_function": rng_state_tracker_function}
        parts: list[BasicOperation]
        if parallel.mode == "row":
            parts = [BasicLinear(share(in_features, parallel.size, "Linear's in_features"), out_features, **own, **options)]
            parts += [Bias(out_features * parallel.size, **shared, **options)] if bias else []
            parts.append(ReduceScatter(parallel.group) if parallel.sequence else AllReduce(parallel.group, reduce_in_backward=False))
        else:
            mode, group, _, sequence = parallel
            split = {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": sequence}
            parts = [BasicLinear(in_features, out_features, **split, **own, **options)]
            parts += [Bias(out_features, **shared, **options)] if bias else []
        super().__init__(parts)
        self.in_features, self.out_features, self._has_bias = in_features, out_features, bias

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """``weight`` and ``bias`` become those of the parts. Raises ``ArgumentError`` where that takes one part less, or one more."""
        if name not in _PARTS:
            super().register_parameter(name, param)
            return
        if name == "bias" and not self._has_bias:
            if param is not None:
                raise ArgumentError(expected("no bias", of="a Linear that was made without", got="one", do="make it with bias=True"))
            return
        if param is None:
            raise ArgumentError(expected("a parameter", of=f"{name} of Linear", got="none", do="make another layer, for one without bias=False"))
        setattr(self.basic_ops[_PARTS[name]], name, param)

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        """``weight`` and ``bias``, as other linear layers name them, are those of the parts."""
        for name, part in _PARTS.items() if self._has_bias else [("weight", 0)]:
            own = f"{prefix}basic_ops.{part}.{name}"
            if f"{prefix}{name}" in state_dict and own not in state_dict:
                state_dict[own] = state_dict.pop(f"{prefix}{name}")

    weight, bias = _of_part("weight"), _of_part("bias")
