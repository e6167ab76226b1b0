"""Optimizer kernels over lists of tensors, compiled: all tensors of a call are split over the threads together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.layouts import HOST
from fusible.tex.calls.checks import adam_corrections
from fusible.tex.calls.memory_checks import check_no_inner_overlap
from fusible.tex.calls.optimizer import check_float_lists, check_held_lists, check_typed_lists
from fusible.tex.calls.transaction import Write, commit, run
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.optimizer import Optimizer

__all__ = ["OptimizerKernels"]

_FLOATS = torch.float32, torch.bfloat16, torch.float16
_FLOATING = frozenset(_FLOATS)


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        check_float_lists(tensor_lists, (2,), "multi_tensor_scale", Tensor.numel, _FLOATING)
        inputs, outputs = tensor_lists
        written = _Written(outputs)
        native.multi_tensor_scale(_contiguous(inputs), written.tensors, scale, noop_flag)
        written.copy_back()

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        check_float_lists(tensor_lists, (1,), "multi_tensor_l2norm", Tensor.numel, _FLOATING)
        total, each = native.multi_tensor_l2norm(_contiguous(tensor_lists[0]))
        norm = torch.tensor([total], dtype=torch.float64, device=HOST).float()
        if not norm.isfinite():
            noop_flag.fill_(1)
        return norm, torch.tensor(each if per_tensor_python else [], dtype=torch.float64, device=HOST).float()

    @by_name
    def multi_tensor_adam(self, call: CallArguments) -> None:
        check_float_lists(call.tensor_lists, (4, 5), "multi_tensor_adam", Tensor.numel, _FLOATING)
        corrections = adam_corrections(call.mode, call.bias_correction, call.step, call.beta1, call.beta2)
        gradients, *states = call.tensor_lists
        written = [_Written(tensors) for tensors in states]
        lists = [state.tensors for state in written]
        weights, first, second, masters = lists if len(lists) == 4 else [*lists, []]
        step = partial(
            native.multi_tensor_adam, _contiguous(gradients), weights, first, second, masters, call.lr, call.beta1, call.beta2, call.epsilon,
            *corrections, call.mode == 1, call.weight_decay,
        )  # fmt: skip
        commit([step, *(write for state in written for write in state.copies_back())])

    @by_name
    def multi_tensor_adam_param_remainder(self, call: CallArguments) -> None:
        check_typed_lists(call.tensor_lists, (_FLOATS, _FLOATS[1:2], _FLOATS, _FLOATS, (torch.int16,)), "multi_tensor_adam_param_remainder")
        g, p, m, v, remainder = call.tensor_lists
        unscaled = [torch.empty(0, dtype=torch.float32, device=HOST) for _ in p]
        self._step_scaled(call, [g, p, m, v, unscaled, unscaled, remainder, unscaled])

    @by_name
    def multi_tensor_adam_scaled(self, call: CallArguments) -> None:
        check_held_lists(call.tensor_lists, "multi_tensor_adam_scaled", _FLOATS, (torch.uint8,), torch.int16)
        self._step_scaled(call, call.tensor_lists)

    def _step_scaled(self, call: CallArguments, tensor_lists: Sequence[Sequence[Tensor]]) -> None:
        corrections = adam_corrections(call.mode, call.bias_correction, call.step, call.beta1, call.beta2)
        gradients, *states = tensor_lists
        written = [_Written(tensors) for tensors in states]
        lists = [state.tensors for state in written]
        step = partial(
            native.multi_tensor_adam_scaled, _contiguous(gradients), *lists, *([[], []] if len(lists) == 5 else []), call.lr, call.beta1, call.beta2,
            call.epsilon, *corrections, call.mode == 1, call.weight_decay,
        )  # fmt: skip
        commit([step, *(write for state in written for write in state.copies_back())])

    @by_name
    def multi_tensor_sgd(self, call: CallArguments) -> None:
        check_float_lists(call.tensor_lists, (3, 4), "multi_tensor_sgd", Tensor.numel, _FLOATING)
        if call.noop_flag.any():
            return
        gradients, *states = call.tensor_lists
        written = [_Written(tensors) for tensors in states]
        weights, momenta, *copies = [state.tensors for state in written]
        step = partial(
            native.multi_tensor_sgd, _contiguous(gradients), weights, momenta, copies[0] if copies else [], float(call.lr), call.momentum,
            call.dampening, call.wd, call.scale, bool(call.nesterov), bool(call.first_run), bool(call.wd_after_momentum),
        )  # fmt: skip
        changed = written if call.momentum else [state for i, state in enumerate(written) if i != 1]
        commit([step, *(write for state in changed for write in state.copies_back())])


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]


class _Written:
    """Tensors that a kernel writes: themselves, or contiguous copies where they are not contiguous, whose results are copied back afterwards.

    Raises ``ArgumentError`` for a tensor that cannot be written back to.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            if not x.is_contiguous():
                check_no_inner_overlap(x, "tensor_lists")
        self._originals = tensors
        self.tensors = _contiguous(tensors)

    def copy_back(self) -> None:
        """Let the results be where they are expected, and torch know that these tensors have changed."""
        run(self.copies_back())

    def copies_back(self) -> list[Write]:
        """The writes that do so."""
        pairs = zip(self._originals, self.tensors, strict=True)
        copies = [partial(original.detach().copy_, written) for original, written in pairs if not original.is_contiguous()]
        return [*copies, partial(torch._C._increment_version, [x for x in self._originals if not x.is_inference()])]
