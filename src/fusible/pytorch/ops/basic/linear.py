"""``BasicLinear`` and ``Bias``: the two parts of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.errors import NotServedError, expected
from fusible.nvte import is_quantized_type, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.ops.basic.parallel import TensorParallel, parallel_product, share
from fusible.pytorch.ops.basic.parameters import WithParameters
from fusible.pytorch.quantized_init import as_parameter
from fusible.quantized import Quantizer, QuantizerRole

__all__ = ["BasicLinear", "Bias"]


class BasicLinear(WithParameters):
    """``y = x @ weight.T`` with ``x [*, in_features]``, ``weight [out_features, in_features]``; ``dx = dy @ weight``, ``dweight = dy.T @ x``.

    ``tensor_parallel_mode``: each of the ``P`` processes of ``tensor_parallel_group`` (None: all) has a part of the weight.

    - ``"column"``: ``weight [out_features / P, in_features]``, ``y [*, out_features / P]``; ``x`` is the same in all, and ``dx`` is summed over them.
    - ``"row"``: ``weight [out_features, in_features / P]``, ``x [*, in_features / P]``; ``y`` is summed over them.

    ``sequence_parallel``: what is not shared out by columns (``x`` and ``dx``, or ``y`` and ``dy``) is then by rows: along the first dimension, rank
    r has the r-th part; see ``ops.ParallelMMT`` for what passes between the processes.

    ``accumulate_into_main_grad``: the product that gives the weight's gradient adds it to ``weight.main_grad``, or writes it over that
    where ``weight.overwrite_main_grad`` is true; ``weight.grad`` stays as it is.
    ``userbuffers_options`` ask for communication that overlaps with products, which is refused where there is any (``NotServedError``). Raises
    ``ShapeError`` for features that cannot be shared out equally, ``ArgumentError`` for an unknown mode and for a group of other processes.
    """

    fixed_options = frozenset(
        {
            "in_features",
            "local_in_features",
            "local_out_features",
            "out_features",
            "tensor_parallel_group",
            "tensor_parallel_mode",
            "tensor_parallel_size",
        }
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        parallel = TensorParallel.of(tensor_parallel_mode, tensor_parallel_group, sequence_parallel, "BasicLinear")
        self.tensor_parallel_mode, self.tensor_parallel_group, self.tensor_parallel_size, self.sequence_parallel = parallel
        self.local_in_features = share(in_features, parallel.size, "BasicLinear's in_features") if parallel.mode == "row" else in_features
        self.local_out_features = share(out_features, parallel.size, "BasicLinear's out_features") if parallel.mode == "column" else out_features
        if userbuffers_options and parallel.size > 1:
            do = "leave it out: the same is computed, one after the other"
            raise NotServedError(expected("no overlap with communication", of="userbuffers_options", got=repr(userbuffers_options), do=do))
        self.accumulating_parameters = ("weight",) if accumulate_into_main_grad else ()
        self._rng_state_tracker_function = rng_state_tracker_function
        self.weight = nn.Parameter(torch.empty(self.local_out_features, self.local_in_features, device=device, dtype=dtype))
        self._fill()

    def kept_names(self, op: Op) -> tuple[str, ...]:
        return "x", "weight"

    def unneeded(self, op: Op, name: str) -> bool:
        return not op.wants("weight" if name == "x" else "x")

    def told(self, op: Op, kept: Mapping[str, Any], lent: Quantizer | None) -> dict[str, Any]:
        names = {"input_quantizer": ("forward", 0), "weight_quantizer": ("forward", 1), "grad_output_quantizer": ("backward", 0)}
        quantized = is_quantized_type(op.dy_dtype) and op.override is None
        quantizers = {name: self.get_quantizer(*place) if quantized else None for name, place in names.items()}  # type: ignore[arg-type]
        return {**super().told(op, kept, lent), "with_quantized_compute": quantized, "backward_override": op.override, **quantizers}

    def reset_parameters(self) -> None:
        """Draw the weight: uniform in ``+-1/sqrt(in_features)``. One on the meta device is made first, on the default device. Within
        ``quantized_model_init`` it is quantized then."""
        self._materialize()
        with torch.no_grad():
            self._draw_weight(self.weight)
        self.weight = as_parameter(self.weight)

    def make_op(self) -> Op:
        return parallel_product(make_nvte_tensor(self.weight), self.tensor_parallel_mode, self.tensor_parallel_group, self.sequence_parallel)

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        return [QuantizerRole("linear", name) for name in (("input", "weight") if mode == "forward" else ("grad_output",))]

    def extra_repr(self) -> str:
        shared = f", {self.tensor_parallel_mode} of {self.tensor_parallel_size}" if self.tensor_parallel_mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{shared}"


class Bias(WithParameters):
    """``y = x + bias`` with ``x [*, size]``, ``bias [size]``; ``dx = dy``, ``dbias`` = the sum of ``dy`` over all rows.

    ``tensor_parallel``: each of the ``P`` processes of ``tensor_parallel_group`` (None: all) has ``size / P`` columns of ``x`` and of ``bias``.
    Raises ``ShapeError`` where these cannot be shared out equally.
    """

    fixed_options = frozenset({"local_size", "size", "tensor_parallel", "tensor_parallel_group", "tensor_parallel_size"})

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self.size = size
        parallel = TensorParallel.of("column" if tensor_parallel else None, tensor_parallel_group, False, "Bias")
        self.tensor_parallel, self.tensor_parallel_group, self.tensor_parallel_size = parallel.size > 1, parallel.group, parallel.size
        self.local_size = share(size, parallel.size, "Bias' size")
        self.bias = nn.Parameter(torch.empty(self.local_size, device=device, dtype=dtype))
        self._fill()

    def reset_parameters(self) -> None:
        """Zeros. A bias on the meta device is made first, on the default device."""
        self._materialize()
        nn.init.zeros_(self.bias)

    def make_op(self) -> Op:
        return ops.Add(make_nvte_tensor(self.bias))

    def extra_repr(self) -> str:
        return f"size={self.size}"
