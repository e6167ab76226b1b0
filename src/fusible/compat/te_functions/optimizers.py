"""``transformer_engine.pytorch.optimizers``: Fusible's, with the package's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fusible.compat.te_modules.parallel import refuse
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.pytorch import optimizers

__all__ = ["FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_applier"]

_OLD = "set_grad_none is called set_to_none now, and is an argument of zero_grad"


class _SetGradNone(torch.optim.Optimizer):
    """Mixin of both: the former ``set_grad_none`` of the constructor, where it is given, is what ``zero_grad`` does."""

    set_grad_none: bool | None

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As torch's. Raises ``ArgumentError`` for another choice than ``set_grad_none`` of the constructor."""
        former = self.set_grad_none
        if former is not None and set_to_none not in (None, former):
            of, do = f"set_to_none of {type(self).__name__}, which was made with set_grad_none", "leave one of them out"
            raise ArgumentError(expected(repr(former), of=of, got=repr(set_to_none), do=do))
        chosen = set_to_none if former is None else former
        super().zero_grad(set_to_none=True if chosen is None else chosen)


class FusedAdam(_SetGradNone, optimizers.FusedAdam):
    """``fusible.pytorch.optimizers.FusedAdam``, with the package's arguments.

    ``NotServedError``: ``amsgrad``; moments and master weights of another type than fp32; ``use_decoupled_grad``; ``store_param_remainders``.
    ``capturable`` changes no result.
    """

    _options = (*optimizers.FusedAdam._options, "capturable", "set_grad_none")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        wanted = {"master_weight_dtype": master_weight_dtype, "exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        for name, dtype in wanted.items():
            if dtype != torch.float32:
                raise NotServedError(expected("torch.float32", of=f"{name} of FusedAdam", got=dtype, do="leave it out"))
        others = {"use_decoupled_grad": use_decoupled_grad, "store_param_remainders": store_param_remainders}
        refuse("FusedAdam", "leave it out", amsgrad=amsgrad, **others)
        if set_grad_none is not None:
            warnings.warn(_OLD, DeprecationWarning, stacklevel=2)
        self.capturable, self.set_grad_none = capturable, set_grad_none
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, master_weights=master_weights)


class FusedSGD(_SetGradNone, optimizers.FusedSGD):
    """``fusible.pytorch.optimizers.FusedSGD``, with the package's arguments. ``NotServedError``: ``wd_after_momentum``.
    ``materialize_master_grads`` changes no result."""

    _options = (*optimizers.FusedSGD._options, "materialize_master_grads", "set_grad_none")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedSGD", "leave it out", wd_after_momentum=wd_after_momentum)
        if set_grad_none is not None:
            warnings.warn(_OLD, DeprecationWarning, stacklevel=2)
        self.materialize_master_grads, self.set_grad_none = materialize_master_grads, set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class MultiTensorApply:
    """``apply(op, noop_flag, tensor_lists, *args)``: ``op(chunk_size, noop_flag, tensor_lists, *args)`` of a function of ``tex`` on lists of tensors,
    without those that are empty; None where none is left. Of a ``DTensor`` the process's own part is taken."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
        lists = [[t._local_tensor if isinstance(t, DTensor) else t for t in tensors] for tensors in tensor_lists]
        if len({len(tensors) for tensors in lists}) > 1:
            got = [len(tensors) for tensors in lists]
            raise ArgumentError(expected("lists of one length", of="a MultiTensorApply", got=got, do="give a tensor for each in every list"))
        kept = [i for i, tensor in enumerate(lists[0]) if tensor.numel()]
        return op(self.chunk_size, noop_flag_buffer, [[tensors[i] for i in kept] for tensors in lists], *args) if kept else None


multi_tensor_applier = MultiTensorApply(2048 * 32)
