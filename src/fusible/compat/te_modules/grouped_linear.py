"""``GroupedLinear``: the linear layers of the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from fusible.compat.te_modules.base import default_init, device_of, forked
from fusible.compat.te_modules.extra_state import DelayedExtraState
from fusible.compat.te_modules.parallel import Sharding, check_mode, layer_name, mark_shared, refuse
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.ops import Op
from fusible.pytorch import ops
from fusible.pytorch.engine.main_grads import first_microbatch
from fusible.pytorch.ops.buffers import gradient_into, into
from fusible.quantized import QuantizerRole
from fusible.tex.calls.constructors import check_forward

__all__ = ["GroupedLinear"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GroupedLinear(DelayedExtraState, ops.GroupedLinear):
    """``y_i = x_i @ weight_i.T + bias_i`` of the ``m_splits[i]`` rows of ``x`` that follow those of the groups before: ``weight0``, ``bias0``, ...
    (see ``fusible.pytorch.ops.GroupedLinear``).

    ``parallel_mode``: with ``"column"`` and ``"row"`` the weights are a process's parts; what passes between processes is the caller's. There is no
    bias then (``ArgumentError``). ``return_bias``: the biases (empty tensors without any) are not added, and returned beside ``y``.
    ``fuse_wgrad_accumulation``: as of ``Linear``. ``delay_wgrad_compute``: the weights' gradients are left to ``backward_dw``. ``use_grouped_tensor``
    and ``save_original_input`` change no result. ``NotServedError``: ``ub_overlap_rs`` and ``ub_overlap_ag``.
    """

    return_bias: bool
    parallel_mode: str | None
    name: str
    _draw: tuple[Callable[[torch.Tensor], Any], Callable[[], Any] | None]

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        refuse("GroupedLinear", ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag)
        check_mode(parallel_mode, "GroupedLinear")
        sharding = Sharding.of(tp_group, tp_size, sequence_parallel, type(self).__name__)
        if sharding.size > 1 and bias:
            raise ArgumentError(expected("bias=False", of=f"GroupedLinear in {sharding.size} processes", got=True, do="add it after the exchange"))
        vars(self).update(return_bias=return_bias, _draw=(init_method or default_init, forked(get_rng_state_tracker, rng_tracker_name)))
        vars(self).update(parallel_mode=parallel_mode, name=layer_name(name))
        super().__init__(
            num_gemms,
            sharding.share(in_features, parallel_mode, "row", "GroupedLinear's in_features"),
            sharding.share(out_features, parallel_mode, "column", "GroupedLinear's out_features"),
            bias=bias,
            device=device_of(device),
            dtype=params_dtype,
            accumulate_into_main_grad=fuse_wgrad_accumulation,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_gemms, self.apply_bias = num_gemms, bias and not return_bias
        self.tp_group, self.tp_size, self.sequence_parallel = sharding.group, sharding.size, sharding.sequence
        parameters = dict(self._parameters)
        if len(self._weight_names) == len(self._bias_names):  # group by group, as NVIDIA's module lists them
            ordered = [name for pair in zip(self._weight_names, self._bias_names, strict=True) for name in pair]
            self._parameters.clear()
            self._parameters.update({name: parameters[name] for name in ordered})

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """``accumulate_into_main_grad``, by the name that NVIDIA's modules give it."""
        return self.accumulate_into_main_grad

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        self.accumulate_into_main_grad = value

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return (*self._weight_names, *(() if self.return_bias else self._bias_names))

    def make_op(self) -> Op:
        return super().make_op().with_(layer=self.name or "")

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        return [replace(role, name=self.name or "") for role in super().get_quantizer_roles(mode)]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the weights, group after group; biases are 0. What is on the meta device is made first. ``defer_init``: do nothing."""
        if not defer_init:
            super().reset_parameters()
            for name in self._weight_names:
                mark_shared(self._parameters[name], dim=1 if self.parallel_mode == "row" else 0)

    def _draw_weight(self, weight: torch.Tensor) -> None:
        init, tracker = self._draw
        with tracker() if tracker is not None else nullcontext():
            init(weight)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The processes that share the weights out: nothing passes between them here."""
        self.tp_group = tp_group

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inp: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:
        """``inp [tokens, in_features] -> [tokens, out_features]``, with the biases after it where ``return_bias``. ``m_splits``: a list, or a
        tensor of integers ``[num_gemms]``. ``out``, ``dgrad_out``: memory for ``y``, whose rows beyond the last group stay as they are, and for the
        gradient of ``inp``. Raises ``ShapeError`` for another number of groups, ``DTypeError`` for numbers that are no integers."""
        splits = m_splits if isinstance(m_splits, torch.Tensor) else torch.tensor(m_splits, dtype=torch.int64, device="cpu")
        if tuple(splits.shape) != (self.num_groups,):
            do = "give one number of rows for each"
            raise ShapeError(expected(f"[{self.num_groups}]", of="m_splits of GroupedLinear", got=list(splits.shape), do=do))
        if splits.dtype not in _INTEGERS:
            do = "pass whole numbers of rows"
            raise DTypeError(expected("a tensor of integers", of="m_splits of GroupedLinear", got=splits.dtype, do=do))
        with first_microbatch() if is_first_microbatch else nullcontext():
            y = super().forward(gradient_into(inp, dgrad_out), splits.to(torch.int64))
        y = into(y, out, int(splits.sum()) if out is not None else 0)
        if not self.return_bias:
            return y
        biases = [getattr(self, name).to(y.dtype) for name in self._bias_names]
        if not biases:
            return y, [y.new_empty(0)] * self.num_groups
        return y, biases[0] if self.single_grouped_bias else biases


check_forward(GroupedLinear)
