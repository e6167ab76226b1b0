"""``TransformerEngineBaseModule``: parameters under NVIDIA's names, and their ops as one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusible import ops
from fusible.compat.te_modules.extra_state import DelayedExtraState
from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.compat.te_modules.parallel import Sharding, layer_name
from fusible.compat.te_modules.set_options import SetOptions
from fusible.compute_pipeline import Extras
from fusible.errors import ArgumentError, DTypeError, NotServedError, expected
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.engine.autocast import current_autocast
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.compiled import traced_call
from fusible.pytorch.engine.lowered import is_exporting, is_lowered, lowered_call
from fusible.pytorch.engine.main_grads import first_microbatch
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.sequence_parallel import materialized
from fusible.pytorch.engine.torch_autocast import is_in_force
from fusible.pytorch.quantized_init import as_parameter
from fusible.quantized import QuantizerRole

__all__ = ["Init", "TransformerEngineBaseModule", "constant", "default_init", "device_of", "forked"]

Init = Callable[[torch.Tensor], Any]
"""Fills a parameter in place."""


def default_init(weight: torch.Tensor) -> torch.Tensor:
    """Normal values of standard deviation 0.023, as NVIDIA's modules draw weights."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def constant(value: float) -> Init:
    """Fills with ``value``; it can be pickled with a module."""
    return partial(nn.init.constant_, val=value)


def device_of(device: torch.device | str | None) -> torch.device | str | None:
    """The device on which a module is made. ``"cuda"``, the default of NVIDIA's modules, becomes None (torch's default device) on a machine that has
    no CUDA device."""
    asked = device is not None and torch.device(device).type == "cuda"
    return None if asked and not torch.cuda.is_available() else device


def forked(tracker: Callable[[], Any] | None, name: str | None = None) -> Callable[[], Any] | None:
    """A function that opens the context in which a weight is filled: the tracker's ``fork``, of the state ``name`` or its default one. None without
    a tracker. ``tracker``: what the module was given as ``get_rng_state_tracker``."""
    if tracker is None:
        return None
    return partial(_fork, tracker, name)


def _fork(tracker: Callable[[], Any], name: str | None) -> Any:
    return tracker().fork(name) if name is not None else tracker().fork()


class _Own(NamedTuple):
    """How a parameter is filled. ``tracker`` opens the context for it (``forked``). ``weight``: it is the weight of a product, which may be held
    quantized."""

    init: Init
    tracker: Callable[[], Any] | None
    weight: bool


class _Runner(PipelineRunner):
    """A pipeline that takes an input of any rank, ``[*, features]``, and returns its module's extra outputs, too."""

    batched = False
    argument = "inp"


class TransformerEngineBaseModule(FastSetattr, DelayedExtraState, SetOptions):
    """Base of the modules with NVIDIA's names, signatures, parameters and state dicts. What they compute are the ops of Fusible, in one pipeline:
    inside a ``fusible.Sequential`` or ``fusible.ops.Sequential`` these join the neighbours'.

    ``device="cuda"``, the default, is torch's default device where there is no CUDA device. Parameters and input have one dtype, unless
    ``torch.autocast`` is open (``DTypeError``). The output has that dtype, or the one of ``torch.autocast``.
    """

    activation_dtype: torch.dtype | None = None
    """The last input dtype that was checked against the parameters: the next call with it skips the check."""
    _owned: dict[str, _Own]

    def _begin(self, name: str | None, device: torch.device | str | None, dtype: torch.dtype | None, sharding: Sharding) -> None:
        """A constructor calls this first; then it adds parameters, and calls ``BaseModule.__init__`` last."""
        nn.Module.__init__(self)
        self.name, self._owned = layer_name(name), {}
        self.params_dtype = torch.get_default_dtype() if dtype is None else dtype
        self._device = device_of(device)
        self.sharding = sharding

    @property
    def tp_group(self) -> Any:
        return self.sharding.group

    @property
    def tp_size(self) -> int:
        return self.sharding.size

    @property
    def sequence_parallel(self) -> bool:
        return self.sharding.sequence

    def _add(self, name: str, shape: Sequence[int], init: Init, tracker: Callable[[], Any] | None = None, *, weight: bool = False) -> None:
        """Register a parameter; ``reset_parameters`` fills it."""
        self._owned[name] = _Own(init, tracker, weight)
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, device=self._device, dtype=self.params_dtype)))

    def _add_bias(self, name: str, features: int, *, use: bool) -> None:
        """Register a bias of zeros. Where it is not used, the attribute is an empty tensor, which is no parameter."""
        if use:
            self._add(name, (features,), constant(0.0))
        else:
            setattr(self, name, torch.empty(0, device=self._device, dtype=self.params_dtype))

    def _begin_norm(self, kind: str, eps: float, zero_centered_gamma: bool, return_output: bool, gathered: bool = False) -> None:
        """Take the options of a normalization before the products."""
        layer = type(self).__name__
        if kind not in ("LayerNorm", "RMSNorm"):
            raise ArgumentError(expected("'LayerNorm' or 'RMSNorm'", of=f"normalization of {layer}", got=repr(kind), do="name one of these"))
        if self.sequence_parallel and return_output and gathered:
            do = "gather what return_layernorm_output gives"
            raise NotServedError(expected("return_layernorm_output_gathered=False", of=f"{layer} with sequence_parallel", got=True, do=do))
        self.normalization, self.eps, self.zero_centered_gamma, self.return_layernorm_output = kind, eps, zero_centered_gamma, return_output

    def _add_norm(self, features: int) -> None:
        """``layer_norm_weight``, and ``layer_norm_bias`` (None for RMSNorm)."""
        self._add("layer_norm_weight", (features,), constant(float(not self.zero_centered_gamma)))
        if self.normalization == "LayerNorm":
            self._add("layer_norm_bias", (features,), constant(0.0))
        else:
            self.layer_norm_bias = None

    def _norm(self) -> Iterator[Op]:
        """The op of the normalization; where ``return_layernorm_output``, also the op that makes its output an extra output of the pipeline."""
        weight = make_nvte_tensor(self.layer_norm_weight)
        options: dict[str, Any] = {"eps": self.eps, "zero_centered_gamma": self.zero_centered_gamma}
        if self.normalization == "RMSNorm":
            yield ops.RMSNorm(weight, **options)
        else:
            yield ops.LayerNorm(weight, make_nvte_tensor(self.layer_norm_bias), **options)
        if self.return_layernorm_output:
            yield ops.MakeExtra("layernorm_output")

    def made_anew(self, option: str) -> Mapping[Op, Op]:
        if option in ("fuse_wgrad_accumulation", "name"):  # by an op of its own a pipeline looks for ``accumulating_parameters`` again
            return {b.op: b.op.with_(layer=self._layer_of(b.parameters[0])) for b in self._bound if isinstance(b.op, ops.MMT)}
        return dict(zip(self._ops, self._norm(), strict=False))

    def _layer_of(self, weight: str) -> str:
        """The name of the product with that weight, by which a ``CustomRecipe`` knows the roles of its tensors."""
        return self.name or ""

    def _shift(self, name: str, *, use: bool) -> Op | None:
        """The op that adds the bias ``name``; None where it is not used."""
        return ops.Add(make_nvte_tensor(getattr(self, name))) if use else None

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill all parameters anew, in the order in which they were added. Parameters on the meta device are first made on the default device. Within
        ``quantized_model_init`` the weights are quantized once they are filled. ``defer_init``: do nothing."""
        if defer_init:
            return
        for name, own in self._owned.items():
            parameter: Any = self._parameters[name]
            if parameter.is_meta:
                parameter = materialized(parameter)
            with torch.no_grad(), nullcontext() if own.tracker is None else own.tracker():
                own.init(parameter)
            self._parameters[name] = as_parameter(parameter, QuantizerRole("linear", "weight", self._layer_of(name))) if own.weight else parameter
        self._mark()

    @property
    def _on_meta(self) -> bool:
        return any(parameter is not None and parameter.is_meta for parameter in self._parameters.values())

    def _mark(self) -> None:
        """Set the attributes by which frameworks (Megatron) know how each parameter is sharded."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group of a layer that was made with ``tp_size`` alone."""
        self.sharding = self.sharding._replace(group=tp_group)
        self.forget_plans()
        self._bound = tuple(b._replace(op=b.op.with_(group=tp_group)) if isinstance(b.op, ops.ParallelMMT) else b for b in self._bound)
        self._ops = tuple(b.op for b in self._bound)

    def bound_ops(self) -> Iterator[BoundOp]:
        for b in super().bound_ops():
            yield b._replace(extras=_TO_CALLER) if isinstance(b.op, ops.MakeExtra) else b

    @property
    def open(self) -> bool:
        return self._one_output

    @property
    def _one_output(self) -> bool:
        return not any(isinstance(op, ops.MakeExtra) for op in self._ops)

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        return _Runner(bound, self._executor)

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x)

    def _run(self, inp: torch.Tensor, first: bool | None = None) -> list[torch.Tensor]:
        """The pipeline's output, then its extra outputs. ``torch.compile`` traces the pipeline where it has one output and its parameters are not
        split (``parameters_split``); any other it calls eagerly, with a break of the graph. ``first``: whether it is the first microbatch, whose
        gradients are written over each ``main_grad``; no traced call has one."""
        if is_exporting() and is_lowered(self._runner(), current_autocast()):
            return [lowered_call(self._runner(), inp, (), ChainCall(), current_autocast())]
        if torch.compiler.is_compiling() and self._one_output and all(b.module is self for b in self._bound):
            return [traced_call(self, 0, self.holders(), inp)[0]]
        return self._run_eagerly(inp, first)  # pyright: ignore[reportReturnType, reportCallIssue, reportArgumentType] - it is a method still

    @torch.compiler.disable
    def _run_eagerly(self, inp: torch.Tensor, first: bool | None) -> list[torch.Tensor]:
        self.sharding.check(type(self).__name__)
        self._check_dtype(inp)
        runner = self._runner()
        try:
            with first_microbatch() if first else nullcontext():
                return list(runner.run(inp, (), {}))
        except Exception as error:
            runner.refuse(error, inp, ())
            raise

    def _check_dtype(self, inp: torch.Tensor) -> None:
        if inp.dtype == self.activation_dtype or is_in_force(inp.device.type):
            return
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.dtype != inp.dtype:
                of = f"inp of {type(self).__name__}, outside of torch.autocast"
                do = f"cast it, or open torch.autocast: {name} has that dtype"
                raise DTypeError(expected(str(parameter.dtype), of=of, got=str(inp.dtype), do=do))
        vars(self)["activation_dtype"] = inp.dtype

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        vars(self)["activation_dtype"] = None
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        vars(self)["activation_dtype"] = None
        return super()._apply(fn, recurse)


_TO_CALLER = Extras((), (None,), (True,), "the normalization")
