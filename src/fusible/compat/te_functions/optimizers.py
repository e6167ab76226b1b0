"""``transformer_engine.pytorch.optimizers``: Fusible's, with the package's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fusible.compat.te_modules.parallel import refuse
from fusible.errors import ArgumentError, expected
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
    """``fusible.pytorch.optimizers.FusedAdam``, with the package's arguments, in its order.

    ``NotServedError``: ``amsgrad``. ``capturable`` changes no result; ``ArgumentError`` where it excludes how state is held, as in the package.
    Remainders are stored where there are masters of fp32; elsewhere the option has no effect.
    """

    _options = (*optimizers.FusedAdam._options, "capturable", "set_grad_none")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedAdam", "leave it out", amsgrad=amsgrad)
        of_masters = master_weight_dtype if master_weights else torch.float32
        remainders = store_param_remainders and master_weights and of_masters is torch.float32
        if capturable:
            _check_capturable(of_masters, (exp_avg_dtype, exp_avg_sq_dtype), remainders)
        if set_grad_none is not None:
            warnings.warn(_OLD, DeprecationWarning, stacklevel=2)
        self.capturable, self.set_grad_none = capturable, set_grad_none
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode,
            weight_decay,
            master_weights=master_weights,
            master_weight_dtype=of_masters,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            store_param_remainders=remainders,
            use_decoupled_grad=use_decoupled_grad,
        )

    @property
    def master_weight_dtype(self) -> torch.dtype:
        return self.holding.master_param

    @property
    def exp_avg_dtype(self) -> torch.dtype:
        return self.holding.exp_avg

    @property
    def exp_avg_sq_dtype(self) -> torch.dtype:
        return self.holding.exp_avg_sq

    @property
    def store_param_remainders(self) -> bool:
        return self.holding.remainders

    def get_unscaled_state(self, param: Any, state_name: str, skip_unscale: bool = False) -> Any:
        """As Fusible's; with ``skip_unscale`` what has no scale is given in its own dtype."""
        value = self.state.get(param, {}).get(state_name)
        return value if skip_unscale and value is not None and value.dtype is torch.bfloat16 else super().get_unscaled_state(param, state_name)

    def initialize_state(self, param: Any, store_param_remainders: bool) -> None:
        """Begin the state of a parameter: moments of zero, and a master where there are masters. Raises ``ArgumentError`` where
        ``store_param_remainders`` is not what this optimizer does with it."""
        if self.master_weights and bool(store_param_remainders) != self._splits(param):
            of, do = "store_param_remainders of initialize_state", "choose it when the optimizer is made"
            raise ArgumentError(expected(repr(self._splits(param)), of=of, got=repr(store_param_remainders), do=do))
        self._keep(param, self._new_state(param))


def _check_capturable(of_masters: torch.dtype, of_moments: tuple[torch.dtype, torch.dtype], remainders: bool) -> None:
    of, do = "FusedAdam with capturable", "leave capturable out"
    if of_masters is not torch.float32 or remainders:
        got = "remainders" if remainders else of_masters
        raise ArgumentError(expected("masters held in torch.float32", of=of, got=got, do=do))
    if of_moments not in ((torch.float32,) * 2, (torch.bfloat16,) * 2):
        got = " and ".join(map(str, of_moments))
        raise ArgumentError(expected("both moments held in torch.float32, or both in torch.bfloat16", of=of, got=got, do=do))


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
