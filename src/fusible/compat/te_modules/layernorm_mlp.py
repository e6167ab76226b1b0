"""``LayerNormMLP``: a normalization, a product, an activation and a product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusible import ops
from fusible.compat.te_modules.base import TransformerEngineBaseModule, default_init, forked
from fusible.compat.te_modules.parallel import Sharding, mark_shared, refuse_delay
from fusible.errors import ArgumentError, expected
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.modules.base import BaseModule
from fusible.tex.activations import ACTIVATIONS

__all__ = ["LayerNormMLP"]

_ACTIVATIONS: dict[str, tuple[Callable[..., Op], int]] = {
    row.name: (getattr(ops, row.title), 2 if row.gated else 1) for row in ACTIVATIONS if row.name != "situglu"
}
"""By NVIDIA's name: the op, and how many columns it takes for each that it gives. NVIDIA's module knows no SiTUGLU."""
_KINDS: tuple[Any, ...] = tuple(made for made, _ in _ACTIVATIONS.values())


class LayerNormMLP(TransformerEngineBaseModule):
    """``y = activation(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``.

    ``layer_norm_weight [hidden_size]``, ``layer_norm_bias [hidden_size]`` (of LayerNorm), ``fc1_weight [ffn_hidden_size, hidden_size]``, twice
    the rows for a gated activation, whose gate is the first half; ``fc2_weight [hidden_size, ffn_hidden_size]``. ``activation_params``: options of
    ``"clamped_swiglu"`` (``limit``, ``alpha``, ``glu_linear_offset``). ``set_parallel_mode``: the first product is shared out by columns, the
    second by rows. ``return_bias``: ``fc2_bias`` (None without one) is not added, and returned beside ``y``. ``return_layernorm_output``: what the
    normalization gave comes last.

    ``seq_length``, ``micro_batch_size`` and ``checkpoint`` change no result and are taken as they come. What is refused is said of ``Linear``.
    """

    read_options = TransformerEngineBaseModule.read_options | {"activation", "activation_params"}
    fc1_weight: torch.nn.Parameter
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        self._begin(name, device, params_dtype, Sharding.of(tp_group, tp_size, sequence_parallel, type(self).__name__))
        refuse_delay(self, locals())
        self._begin_norm(normalization, eps, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered)
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.activation, self.activation_params, self.set_parallel_mode = activation, activation_params, set_parallel_mode
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        middle, columns = _activation(activation, activation_params)
        width = self.sharding.share(ffn_hidden_size, "column", "column", "LayerNormMLP's ffn_hidden_size")
        self.size_per_partition, tracker = width, forked(get_rng_state_tracker)
        self._add_norm(hidden_size)
        self._add("fc1_weight", (columns * width, hidden_size), init_method or default_init, tracker, weight=True)
        self._add_bias("fc1_bias", columns * width, use=bias)
        self._add("fc2_weight", (hidden_size, width), output_layer_init_method or default_init, tracker, weight=True)
        self._add_bias("fc2_bias", hidden_size, use=bias)
        self.reset_parameters(defer_init=self._on_meta)
        products = [self._product(name, mode) for name, mode in (("fc1_weight", "column"), ("fc2_weight", "row"))]
        first, last = self._shift("fc1_bias", use=bias), self._shift("fc2_bias", use=self.apply_bias)
        BaseModule.__init__(self, *self._norm(), products[0], first, middle, products[1], last)

    def _product(self, name: str, mode: str) -> Op:
        product = self.sharding.product(make_nvte_tensor(getattr(self, name)), mode if self.set_parallel_mode else None)
        return product.with_(layer=self._layer_of(name))

    def _layer_of(self, weight: str) -> str:
        return ".".join(filter(None, (self.name, weight.removesuffix("_weight"))))

    def _mark(self) -> None:
        for name, dim in (("fc1_weight", 0), ("fc2_weight", 1), ("fc1_bias", 0)):
            if self._parameters.get(name) is not None:
                mark_shared(self._parameters[name], dim)
        partial = ("layer_norm_weight", "layer_norm_bias", *(("fc2_bias",) if self.set_parallel_mode else ()))
        for parameter in [self._parameters.get(name) for name in partial]:
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    @property
    def accumulating_parameters(self) -> tuple[str, ...]:
        return ("fc1_weight", "fc2_weight") if self.fuse_wgrad_accumulation else ()

    def made_anew(self, option: str) -> Mapping[Op, Op]:
        if option not in ("activation", "activation_params"):
            return super().made_anew(option)
        now = next(op for op in self._ops if isinstance(op, _KINDS))
        made, columns = _activation(self.activation, self.activation_params)
        if columns * self.fc2_weight.shape[-1] != self.fc1_weight.shape[0]:
            wanted, of = "one gated as it is, or not gated as it is", "activation of LayerNormMLP that is made"
            raise ArgumentError(expected(wanted, of=of, got=repr(self.activation), do="make another module: fc1_weight has other rows"))
        return {now: made}

    @property
    def open(self) -> bool:
        return super().open and not self.return_bias

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``inp [*, hidden_size]``, and the output like it; then ``fc2_bias`` where ``return_bias``, and the normalized input where asked for."""
        outputs: list[Any] = self._run(inp, is_first_microbatch)
        if self.return_bias:
            outputs.insert(1, self.fc2_bias.to(outputs[0].dtype) if self.use_bias else None)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def extra_repr(self) -> str:
        return f"hidden_size={self.fc1_weight.shape[-1]}, ffn_hidden_size={self.size_per_partition * self.tp_size}, activation={self.activation}"


def _activation(name: str, options: dict[str, Any] | None) -> tuple[Op, int]:
    if name not in _ACTIVATIONS:
        raise ArgumentError(expected(f"one of {', '.join(_ACTIVATIONS)}", of="activation of LayerNormMLP", got=repr(name), do="name one of these"))
    if options and name != "clamped_swiglu":
        do = "leave it out, or take clamped_swiglu"
        raise ArgumentError(expected("no activation_params", of=f"LayerNormMLP with {name}", got=options, do=do))
    made, columns = _ACTIVATIONS[name]
    return made(**(options or {})), columns
