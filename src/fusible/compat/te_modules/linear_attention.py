"""``GatedDeltaNetAttention``, ``GatedDeltaNet2Attention`` and ``GatedDeltaProductAttention``: attention by a state that gates and corrects itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fusible.compat import linear_attention
from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.compat.te_modules.parallel import Sharding
from fusible.compat.te_modules.recomputation import checkpoint
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.pytorch.ops.basic.parallel import share
from fusible.tex.calls.constructors import check_constructor

__all__ = ["GatedDeltaNet2Attention", "GatedDeltaNetAttention", "GatedDeltaProductAttention"]

_TOKENS = {"sbhd": 2, "bshd": 2, "thd": 1}
"""By layout: the dimensions that count tokens."""
_OPTIONS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "beta_guard", "safe_gate", "gate_domain"
)  # fmt: skip
"""Arguments of a call that its rule takes as they come, where it has them."""


class _LinearAttention(FastSetattr, nn.Module):
    """Base of the modules. ``num_attention_heads``: of q, k and v, sharded over ``tp_group``. ``kv_channels``: d of all, or a pair: d of q and k, and
    e of v. ``scale``: a factor of the output, by default ``d ** -0.5``. The modules have no parameters and are causal. They take any float type and
    compute in fp32; the output has q's type. Recipes change nothing."""

    _op: Callable[..., Any]

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        qkv_format: str = "sbhd",
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        sharding = Sharding.of(tp_group, tp_size, False, name)
        self.num_attention_heads, self.tp_size, self.tp_group = num_attention_heads, sharding.size, sharding.group
        self.num_attention_heads_per_partition = share(num_attention_heads, sharding.size, f"{name}'s heads")
        self.qk_head_dim, self.v_head_dim = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.qkv_format, self.layer_number = _format(qkv_format, name), 1 if layer_number is None else layer_number
        self.scale = self.qk_head_dim**-0.5 if scale is None else scale

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The processes that share out the heads: nothing passes between them here."""
        self.tp_group = tp_group

    def _attend(self, call: Mapping[str, Any], more: Mapping[str, tuple[int, ...]]) -> Any:
        """Check the arguments and apply the rule. ``call``: the arguments of ``forward`` by name. ``more``: by name, in the rule's order, the tensors
        that it takes beside q, with their dimensions after those of the tokens."""
        name, q = type(self).__name__, call["query_layer"]
        format_ = self.qkv_format if call["qkv_format"] is None else _format(call["qkv_format"], name)
        heads = self.num_attention_heads_per_partition
        leading = tuple(q.shape[: _TOKENS[format_]])
        shapes = {"query_layer": (heads, self.qk_head_dim), **more}
        for argument, trailing in shapes.items():
            _check(call[argument], (*leading, *trailing), f"{argument} of {name}")
        ends = _ends(q, format_, call["cu_seqlens"], name)
        states: list[Any] = [call.get(argument) for argument in ("initial_state", "a_log", "dt_bias")]
        if states[0] is not None:
            _check(states[0], (len(ends) - 1, heads, self.v_head_dim, self.qk_head_dim), f"initial_state of {name}")
        for argument, x in zip(("a_log", "dt_bias"), states[1:], strict=True):
            if x is not None:
                _check(x, (heads,), f"{argument} of {name}")
        options = {option: call[option] for option in _OPTIONS if option in call}

        def run(initial_state: torch.Tensor | None, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
            of_heads = {key: x for key, x in (("a_log", a_log), ("dt_bias", dt_bias)) if x is not None}
            rows = [_rows(x, format_) for x in tensors]
            o, state = self._of_rows(rows, ends, {**options, **of_heads, "initial_state": initial_state})
            o = o.reshape(*(leading[::-1] if format_ == "sbhd" else leading), heads * self.v_head_dim)
            o = o.transpose(0, 1).contiguous() if format_ == "sbhd" else o
            return (o, state) if options["output_final_state"] else o

        arguments = (*states, *(call[argument] for argument in shapes))
        return checkpoint(run, *arguments, use_reentrant=False) if call["checkpoint_core_attention"] else run(*arguments)

    def _of_rows(self, rows: list[torch.Tensor], ends: torch.Tensor, options: dict[str, Any]) -> Any:
        return type(self)._op(*rows, ends, scale=self.scale, **options)

    def extra_repr(self) -> str:
        return f"heads={self.num_attention_heads}, widths=({self.qk_head_dim}, {self.v_head_dim}), qkv_format={self.qkv_format}"


class GatedDeltaNetAttention(_LinearAttention):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): ``S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T``, ``o_t = scale q_t
    S_t``, with a state ``S [d, e]`` for each head. See ``linear_attention.gated_delta_net``."""

    _op = staticmethod(linear_attention.gated_delta_net)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        """``query_layer, key_layer [s, b, h, d]``, ``value_layer [s, b, h, e]``, the log decay ``g`` and the strength ``beta [s, b, h]``; or the
        layout of ``qkv_format``. Gives ``[s, b, h * e]``, with ``output_final_state`` and the last state ``[b, h, e, d]``, like ``initial_state``.
        ``"thd"`` wants ``cu_seqlens``, int32 ``[b + 1]``. ``checkpoint_core_attention``: backward computes the forward again."""
        call, h = dict(locals()), self.num_attention_heads_per_partition
        return self._attend(call, {"key_layer": (h, self.qk_head_dim), "value_layer": (h, self.v_head_dim), "g": (h,), "beta": (h,)})


class GatedDeltaNet2Attention(_LinearAttention):
    """Gated DeltaNet with a gate for each channel: ``S_t = (I - k_t (beta_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T``, ``o_t = scale q_t
    S_t``. See ``linear_attention.gated_delta_net_v2``."""

    _op = staticmethod(linear_attention.gated_delta_net_v2)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        w: torch.Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        beta_guard: bool = False,
    ) -> Any:
        """As of ``GatedDeltaNetAttention``, with ``g, beta [s, b, h, d]`` and ``w [s, b, h, e]``. ``use_beta_sigmoid_in_kernel``: beta is the
        sigmoid of what is given, twice that with ``allow_neg_eigval``. ``NotServedError``: ``beta_guard``."""
        call = dict(locals())
        _check_sigmoid(allow_neg_eigval, use_beta_sigmoid_in_kernel, "GatedDeltaNet2Attention")
        of_key, of_value = ((self.num_attention_heads_per_partition, width) for width in (self.qk_head_dim, self.v_head_dim))
        return self._attend(call, {"key_layer": of_key, "value_layer": of_value, "g": of_key, "beta": of_key, "w": of_value})


class GatedDeltaProductAttention(_LinearAttention):
    """Gated DeltaProduct (Siems et al. 2025, arXiv:2502.10297): Gated DeltaNet with ``num_householder`` updates of the state for each token. See
    ``linear_attention.gated_delta_product``."""

    _op = staticmethod(linear_attention.gated_delta_product)

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_householder: int = 1,
        qkv_format: str = "sbhd",
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(num_attention_heads, kv_channels, qkv_format, tp_size, tp_group, layer_number, scale)
        if num_householder < 1:
            of = "num_householder of GatedDeltaProductAttention"
            raise ArgumentError(expected("at least 1", of=of, got=num_householder, do="choose the updates of a token"))
        self.num_householder = num_householder

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        a_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
    ) -> Any:
        """As of ``GatedDeltaNetAttention``; ``key_layer``, ``value_layer`` and ``beta`` have a dimension of ``num_householder`` behind those of the
        tokens: ``[s, b, n, h, d]``, ``[s, b, n, h, e]``, ``[s, b, n, h]``. ``gate_domain="linear"``: ``g`` is the decay itself. ``safe_gate``: the
        log decay is ``-exp(a_log) softplus(g + dt_bias)``, of parameters ``[h]``."""
        call, name = dict(locals()), "GatedDeltaProductAttention"
        _check_sigmoid(allow_neg_eigval, use_beta_sigmoid_in_kernel, name)
        if gate_domain not in ("log", "linear") or (safe_gate and gate_domain != "log"):
            wanted = "'log'" if safe_gate else "'log' or 'linear'"
            raise ArgumentError(expected(wanted, of=f"gate_domain of {name}", got=repr(gate_domain), do="name one of these"))
        if not safe_gate and (a_log is not None or dt_bias is not None):
            raise ArgumentError(expected("no a_log and dt_bias", of=f"{name} without safe_gate", got="some", do="pass safe_gate=True"))
        n, h = self.num_householder, self.num_attention_heads_per_partition
        more = {"key_layer": (n, h, self.qk_head_dim), "value_layer": (n, h, self.v_head_dim), "g": (h,), "beta": (n, h)}
        return self._attend(call, more)

    def _of_rows(self, rows: list[torch.Tensor], ends: torch.Tensor, options: dict[str, Any]) -> Any:
        q, k, v, g, beta = rows
        return type(self)._op(q, k.flatten(0, 1), v.flatten(0, 1), g, beta.flatten(0, 1), ends, self.num_householder, scale=self.scale, **options)


check_constructor(_LinearAttention)
check_constructor(GatedDeltaProductAttention)


def _format(name: str, layer: str) -> str:
    if name not in _TOKENS:
        raise ArgumentError(expected(f"one of {', '.join(_TOKENS)}", of=f"qkv_format of {layer}", got=repr(name), do="name one of these"))
    return name


def _check(x: Any, shape: tuple[int, ...], of: str) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
        raise DTypeError(expected("a tensor of floats", of=of, got=got, do="pass one"))
    if tuple(x.shape) != shape:
        raise ShapeError(expected(str(list(shape)), of=of, got=list(x.shape), do="reshape it, or name another qkv_format"))


def _check_sigmoid(twice: bool, sigmoid: bool, layer: str) -> None:
    if twice and not sigmoid:
        do = "pass it too: what is doubled is the sigmoid"
        raise ArgumentError(expected("use_beta_sigmoid_in_kernel=True", of=f"{layer} with allow_neg_eigval", got=False, do=do))


def _ends(q: torch.Tensor, format_: str, cu_seqlens: torch.Tensor | None, layer: str) -> torch.Tensor:
    """The cumulative lengths of the sequences, int32 ``[b + 1]``: ``cu_seqlens`` for ``"thd"``, else of sequences of equal length."""
    if (format_ == "thd") != (cu_seqlens is not None):
        wanted, got = ("cu_seqlens", "none") if format_ == "thd" else ("no cu_seqlens", "some")
        raise ArgumentError(expected(wanted, of=f"{layer} with qkv_format={format_!r}", got=got, do="sequences of several lengths lie as 'thd'"))
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
            got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise DTypeError(expected("int32 [b + 1]", of=f"cu_seqlens of {layer}", got=got, do="pass the cumulative lengths"))
        return cu_seqlens
    length, batch = q.shape[:2] if format_ == "sbhd" else q.shape[1::-1]
    return torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length


def _rows(x: torch.Tensor, format_: str) -> torch.Tensor:
    """The tokens of all sequences, one sequence after another."""
    if format_ == "thd":
        return x
    return (x.transpose(0, 1) if format_ == "sbhd" else x).flatten(0, 1)
