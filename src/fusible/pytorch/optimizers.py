"""Optimizers whose step is one fused call on all parameters: ``FusedAdam`` and ``FusedSGD``, eagerly by tex or as one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fusible import tex
from fusible.errors import ArgumentError, check_number, expected
from fusible.pytorch.executors import Executor, make_executor
from fusible.tex.protocol import is_quantized

__all__ = ["FusedAdam", "FusedSGD"]

_CHUNK = 2048 * 32
_L2, _DECOUPLED = 0, 1


class _FusedOptimizer(torch.optim.Optimizer):
    """Parameters, gradients and state as lists of tensors, stepped at once.

    With ``master_weights``, parameters of 16 bits have fp32 copies in the state that the step works on. A quantized parameter has always one, and is
    quantized anew from it.
    """

    _slots: tuple[str, ...]

    def __init__(self, params: Any, defaults: dict[str, Any], master_weights: bool, executor: str) -> None:
        for name in ("lr", "weight_decay", "eps", "momentum", "dampening"):
            if name in defaults:
                check_number(defaults[name], f"{name} of {type(self).__name__}", least=None if name == "dampening" else 0)
        self.master_weights = master_weights
        self._executor: Executor = make_executor(executor)
        super().__init__(params, defaults)

    def compile(self, executor: str = "xla") -> None:
        """Run the steps from now on by ``executor``: with ``"xla"`` each group's step is one executable, whose learning rate and count are inputs."""
        self._executor = make_executor(executor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient. Raises ``ArgumentError`` for a sparse gradient, before anything is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, parameters in groups:
            for p in parameters:
                if p.grad is not None and p.grad.is_sparse:
                    do = "make the gradient dense"
                    raise ArgumentError(expected("dense gradients", of=type(self).__name__, got=f"a sparse one of shape {list(p.shape)}", do=do))
        for group, parameters in groups:
            if parameters:
                self._step(group, parameters)
                increment_version(parameters)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._state_of(p) for p in parameters]
        gradients = [p.grad for p in parameters]
        moving = [state.get("master_param", p) for p, state in zip(parameters, states, strict=True)]
        lists = [gradients, moving, *([state[name] for state in states] for name in self._slots)]
        self._run(group, lists)
        for p, value in zip(parameters, moving, strict=True):
            if value is not p:
                p.copy_(value)

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            wide = self.master_weights and p.dtype is not torch.float32
            if wide or is_quantized(p):
                state["master_param"] = (p.dequantize() if is_quantized(p) else p).float().clone()
            for name in self._slots:
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        return state

    def _run(self, group: dict[str, Any], lists: list[list[torch.Tensor]]) -> None:
        raise NotImplementedError

    def _run_compiled(self, key: tuple[Any, ...], numbers: list[torch.Tensor], lists: list[list[torch.Tensor]], step: Callable[..., None]) -> None:
        """``step(numbers, lists)`` as one program that gives the tensors of all lists but the first, the gradients; they are copied back."""
        count, length = len(numbers), len(lists[0])

        def program(inputs: list[Any]) -> tuple[list[Any], Any]:
            given, flat = inputs[:count], inputs[count:]
            step(given, [flat[i : i + length] for i in range(0, len(flat), length)])
            return flat[length:], None

        own = [x for tensors in lists[1:] for x in tensors]
        results, _ = self._executor((type(self).__name__, length, *key), program, [*numbers, *lists[0], *own])
        for x, result in zip(own, results, strict=True):
            x.copy_(result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer`` does, but fp32 state stays fp32 beside parameters of 16 bits."""
        super().load_state_dict(state_dict)
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[p][name] = value.to(p.device, torch.float32, copy=True)


def _number(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=like.device)


class FusedAdam(_FusedOptimizer):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with ``adam_w_mode``, on all parameters of a group in one call.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``p -= lr (m / bc1 / (sqrt(v / bc2) + eps) + weight_decay p)`` with ``bc = 1 - b^step``,
    or 1 without ``bias_correction``; without ``adam_w_mode`` ``weight_decay p`` is added to ``g`` instead. Computed in fp32, whatever the parameters
    are; the moments are fp32. Raises ``ArgumentError`` for a rate, decay or betas that are out of range.
    """

    _slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        executor: str = "eager",
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(expected("two numbers from 0 to below 1", of="betas of FusedAdam", got=betas, do="pass for instance (0.9, 0.999)"))
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        self.adam_w_mode = adam_w_mode
        super().__init__(params, defaults, master_weights, executor)

    def _run(self, group: dict[str, Any], lists: list[list[torch.Tensor]]) -> None:
        group["step"] += 1
        beta1, beta2 = group["betas"]
        options = (beta1, beta2, group["eps"])
        rule = (_DECOUPLED if self.adam_w_mode else _L2, int(group["bias_correction"]), group["weight_decay"])
        like = lists[1][0]
        noop = _number(0, torch.int32, like)
        if self._executor.in_place:
            tex.multi_tensor_adam(_CHUNK, noop, lists, float(group["lr"]), *options, group["step"], *rule)
            return

        def step(numbers: list[Any], of: list[list[Any]]) -> None:
            flag, lr, count, one = numbers
            tex.multi_tensor_adam_capturable(_CHUNK, flag, of, lr, *options, count, *rule, one)

        lr, count, one = (group["lr"], torch.float32), (group["step"], torch.int32), (1.0, torch.float32)
        numbers = [noop, *(_number(value, dtype, like) for value, dtype in (lr, count, one))]
        self._run_compiled((options, rule), numbers, lists, step)


class FusedSGD(_FusedOptimizer):
    """Stochastic gradient descent with momentum (Polyak 1964; Nesterov: Sutskever et al. 2013), on all parameters of a group in one call.

    ``d = g + weight_decay p``; ``buf = momentum buf + (1 - dampening) d``, at first ``d``; ``p -= lr buf``, or ``lr (d + momentum buf)`` with
    ``nesterov``. Computed in fp32, with fp32 buffers. Raises ``ArgumentError`` for options out of range.
    """

    _slots = ("momentum_buffer",)
    _begins = True
    """Whether the parameters of the step at hand have no buffers yet."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master_weights: bool = False,
        executor: str = "eager",
    ) -> None:
        if nesterov and (momentum <= 0 or dampening):
            got = f"momentum={momentum}, dampening={dampening}"
            raise ArgumentError(expected("a momentum and no dampening", of="FusedSGD with nesterov", got=got, do="pass momentum=0.9"))
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, master_weights, executor)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Those whose first gradient this is begin their buffers with it; the others go on."""
        new = {p for p in parameters if not self.state[p]}
        for self._begins in (True, False):
            chosen = [p for p in parameters if (p in new) is self._begins]
            if chosen:
                super()._step(group, chosen)

    def _run(self, group: dict[str, Any], lists: list[list[torch.Tensor]]) -> None:
        like = lists[1][0]
        noop = _number(0, torch.int32, like)
        before = (group["weight_decay"], group["momentum"], group["dampening"])
        after = (group["nesterov"], self._begins, False, 1.0)
        if self._executor.in_place:
            tex.multi_tensor_sgd(_CHUNK, noop, lists, *before, float(group["lr"]), *after)
            return

        def step(numbers: list[Any], of: list[list[Any]]) -> None:
            flag, lr = numbers
            tex.multi_tensor_sgd(_CHUNK, flag, of, *before, lr.reshape(()), *after)

        self._run_compiled((before, after), [noop, _number(float(group["lr"]), torch.float32, like)], lists, step)
