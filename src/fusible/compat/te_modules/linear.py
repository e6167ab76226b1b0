"""``Linear`` and ``LayerNormLinear``: a product, with a normalization before it or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusible import ops
from fusible.compat.te_modules.base import TransformerEngineBaseModule, default_init, forked
from fusible.compat.te_modules.joined import Joined
from fusible.compat.te_modules.parallel import Sharding, check_mode, mark_shared, refuse, refuse_delay
from fusible.errors import ArgumentError, NotServedError, check_text, expected
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.quantized_init import current_model_init

__all__ = ["LayerNormLinear", "Linear"]


class _Product(TransformerEngineBaseModule):
    """Base of both linear layers: the product with its weight and bias, which are several parameters each where ``parameters_split`` is given."""

    def _begin_product(self, arguments: Mapping[str, Any]) -> None:
        """Take the options of the product from a constructor's arguments."""
        layer, mode = type(self).__name__, arguments["parallel_mode"]
        sharding = Sharding.of(arguments["tp_group"], arguments["tp_size"], arguments["sequence_parallel"], layer)
        check_mode(mode, layer)
        self._begin(arguments["name"], arguments["device"], arguments["params_dtype"], sharding)
        self.parallel_mode, self.use_bias, self.return_bias = mode, arguments["bias"], arguments["return_bias"]
        self.apply_bias = self.use_bias and not self.return_bias
        self.in_features = sharding.share(arguments["in_features"], mode, "row", f"{layer}'s in_features")
        self.out_features = sharding.share(arguments["out_features"], mode, "column", f"{layer}'s out_features")

    def _add_product(self, arguments: Mapping[str, Any]) -> None:
        """Register the weights and biases."""
        layer = type(self).__name__
        self.weight_names, self.bias_names, self.parameter_split_sizes = _parts(arguments["parameters_split"], arguments["out_features"], layer)
        self.fuse_wgrad_accumulation = arguments["fuse_wgrad_accumulation"]
        if len(self.weight_names) > 1:
            do = "leave parameters_split out"
            opened = current_model_init()
            self._check_fused()
            if opened is not None and opened.recipe is not None:
                raise NotServedError(expected("one weight", of=f"{layer} within quantized_model_init", got=self.weight_names, do=do))
        sizes = [self.sharding.share(size, self.parallel_mode, "column", f"a part of {layer}'s weight") for size in self.parameter_split_sizes]
        self.parameter_split_sizes = sizes
        for name, size in zip(self.weight_names, sizes, strict=True):
            tracker = forked(arguments["get_rng_state_tracker"], arguments.get("rng_tracker_name"))
            self._add(name, (size, self.in_features), arguments["init_method"] or default_init, tracker, weight=True)
        for name, size in zip(self.bias_names, sizes, strict=True):
            self._add_bias(name, size, use=self.use_bias)

    def _check_fused(self) -> None:
        """Raise ``ArgumentError`` for a ``main_grad`` of a weight that is in several parts."""
        if self.fuse_wgrad_accumulation and len(self.weight_names) > 1:
            of, do = f"{type(self).__name__} with fuse_wgrad_accumulation", "leave parameters_split out"
            raise ArgumentError(expected("one weight", of=of, got=self.weight_names, do=do))

    def made_anew(self, option: str) -> Mapping[Op, Op]:
        self._check_fused()
        return super().made_anew(option)

    def _finish(self, *before: Op) -> None:
        """Fill the parameters, and make the ops: those ``before`` the product, and it."""
        self.reset_parameters(defer_init=self._on_meta)
        joined = len(self.weight_names) > 1
        weight = self._stand_in(self.in_features) if joined else make_nvte_tensor(self._parameters[self.weight_names[0]])
        product = self.sharding.product(weight, self.parallel_mode).with_(layer=self._layer_of(self.weight_names[0]))
        if not self.apply_bias:
            shift = None
        elif joined:
            shift = ops.Add(self._stand_in())
        else:
            shift = self._shift(self.bias_names[0], use=True)
        BaseModule.__init__(self, *before, product, shift)
        if joined:
            joined = Joined(self, {"weight": self.weight_names, "bias": self.bias_names})
            self._bound = tuple(b._replace(module=joined) if not b.parameters or b.parameters[0] in _JOINED else b for b in self._bound)

    def _stand_in(self, *columns: int) -> Tensor:
        """A tensor without data, of the shape of parts that are one."""
        return make_nvte_tensor(torch.empty(self.out_features, *columns, dtype=self.params_dtype, device="meta"))

    def _names(self, op: Op) -> tuple[str, ...]:
        names = {ops.MMT: ("weight",), ops.ColumnParallelMMT: ("weight",), ops.RowParallelMMT: ("weight",), ops.Add: ("bias",)}
        return names[type(op)] if len(self.weight_names) > 1 and type(op) in names else super()._names(op)

    def _mark(self) -> None:
        for norm in ("layer_norm_weight", "layer_norm_bias"):
            if self._parameters.get(norm) is not None:
                self._parameters[norm].sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]
        for name in self.weight_names:
            mark_shared(self._parameters[name], dim=1 if self.parallel_mode == "row" else 0)
        for name in self.bias_names:
            bias: Any = self._parameters.get(name)
            if bias is not None and self.parallel_mode == "row":
                bias.sequence_parallel = self.sequence_parallel
            elif bias is not None and self.parallel_mode == "column":
                mark_shared(bias, dim=0)

    @property
    def accumulating_parameters(self) -> tuple[str, ...]:
        return ("weight",) if self.fuse_wgrad_accumulation else ()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False, fp8_grad: bool | None = False
    ) -> Any:
        """``inp [*, in_features] -> [*, out_features]``; then the bias where ``return_bias``, and the normalized input where it was asked for."""
        refuse(type(self).__name__, "take the output as it is", fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._with_bias(self._run(inp, is_first_microbatch))

    def _with_bias(self, outputs: list[torch.Tensor]) -> Any:
        """What ``forward`` returns: ``out``, then the bias where ``return_bias``, then the normalized input where that is asked for. A single tensor
        is returned without a tuple."""
        if not self.return_bias:
            return tuple(outputs) if len(outputs) > 1 else outputs[0]
        bias = [getattr(self, name) for name in self.bias_names]
        joined = (torch.cat(bias) if len(bias) > 1 else bias[0]).to(outputs[0].dtype)
        return outputs[0], joined if self.use_bias else self._without_bias(joined), *outputs[1:]

    def _without_bias(self, empty: torch.Tensor) -> torch.Tensor | None:
        """What ``return_bias`` returns for a layer without a bias."""
        return None

    @property
    def open(self) -> bool:
        return super().open and not self.return_bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


class Linear(_Product):
    """``y = x @ weight.T + bias``: ``weight [out_features, in_features]``, ``bias [out_features]``.

    ``parameters_split``: names of parts of the rows, which are parameters of their own (``query_weight``, ...), or a dictionary of names and rows.
    ``return_bias``: the bias is not added, and returned beside ``y``. ``parallel_mode``: ``"column"`` or ``"row"``, as of ``ops.ParallelMMT``; with
    ``"row"`` the bias is added to what was summed over the processes. ``init_method`` fills the weight (normal of standard deviation 0.023).
    ``fuse_wgrad_accumulation``: the weight's gradient is added to ``weight.main_grad``; where ``weight.overwrite_main_grad`` is true, and in a call
    with ``is_first_microbatch=True``, it is written over what is there.

    ``save_original_input``, ``symmetric_ar_type`` and ``ub_name`` change no result and are taken as they come, and nothing else depends on
    ``is_first_microbatch``: quantized weights are kept while they are known to be unchanged. Overlap with communication (``ub_...``) changes none
    either, as there is none here: a layer that communicates warns of that, once. ``NotServedError``: ``delay_wgrad_compute``, ``fp8_output`` and
    ``fp8_grad``.
    """

    def __init__(
        self,
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
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        arguments = locals()
        self._begin_product(arguments)
        refuse_delay(self, arguments)
        self._add_product(arguments)
        self._finish()


class LayerNormLinear(_Product):
    """``y = norm(x) @ weight.T + bias``: ``layer_norm_weight [in_features]``, ``layer_norm_bias [in_features]`` (of LayerNorm), and ``Linear``'s.

    ``normalization``: ``"LayerNorm"`` or ``"RMSNorm"``. ``return_layernorm_output``: what the normalization gave is returned last, unquantized. Other
    options are ``Linear``'s and the normalizations'.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        arguments = locals()
        self._begin_product(arguments)
        refuse_delay(self, arguments)
        self._begin_norm(normalization, eps, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered)
        self._add_norm(self.in_features)
        self._add_product(arguments)
        self._finish(*self._norm())

    def _without_bias(self, empty: torch.Tensor) -> torch.Tensor:
        return empty  # where Linear gives None, as NVIDIA's do


_JOINED = ("weight", "bias")


def _parts(split: Sequence[str] | Mapping[str, int] | None, features: int, layer: str) -> tuple[list[str], list[str], list[int]]:
    """The names of the weights and biases, and their rows."""
    if split is None:
        return ["weight"], ["bias"], [features]
    if not split:
        raise ArgumentError(expected("at least one name", of=f"parameters_split of {layer}", got=split, do="give None for one weight"))
    sizes = dict(split) if isinstance(split, Mapping) else dict.fromkeys(split, features // len(split))
    for name in sizes:
        check_text(name, f"a name in parameters_split of {layer}")
    names = [name.rstrip("_") for name in sizes]
    if sum(sizes.values()) != features:
        of, do = f"parameters_split of {layer}", "name parts that make up the rows"
        raise ArgumentError(expected(f"sizes that add up to {features}", of=of, got=f"{sizes}", do=do))
    return [f"{name}_weight" for name in names], [f"{name}_bias" for name in names], list(sizes.values())
