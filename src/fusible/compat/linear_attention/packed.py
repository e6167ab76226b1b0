"""The gated delta rules on packed sequences: Gated DeltaNet, its second version, and Gated DeltaProduct, by the arguments of cuDNN's functions."""

from __future__ import annotations

import torch
from torch import nn

from fusible.compat.linear_attention.delta_rule import delta_rule
from fusible.errors import NotServedError, expected
from fusible.tex.calls.index_checks import check_cumulative

__all__ = ["gated_delta_net", "gated_delta_net_v2", "gated_delta_product"]

_LEAST_NORM, _LEAST_ALPHA = 1e-6, 1e-10
"""The epsilon that is added to the square of a length before division, and the lower bound of a decay with ``gate_domain="linear"``."""

Result = tuple[torch.Tensor, torch.Tensor | None]


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Result:
    """``S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T``, ``o_t = scale q_t S_t`` of each sequence (arXiv:2412.06464).

    ``q, k [t, h, d]``, ``v [t, h, e]``, ``g, beta [t, h]``, ``cu_seqlens [b + 1]``, ``initial_state [b, h, e, d]`` (default: zeros). Gives ``o [t, h,
    e]`` of q's type, zero behind the last sequence, and the last states like the first, or None. All is computed in fp32, of float64 in that.
    ``use_qk_l2norm_in_kernel``: each q and k is divided by its length before.
    """
    dtype = q.dtype
    q, k, v, g, beta = _wide(q, k, v, g, beta, unit=use_qk_l2norm_in_kernel)
    strength = beta.unsqueeze(-1)
    return _packed((scale * q, k, strength * k, strength * v, g.unsqueeze(-1)), cu_seqlens, initial_state, output_final_state, dtype)


def gated_delta_net_v2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    w: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    beta_guard: bool = False,
) -> Result:
    """``S_t = (I - k_t (beta_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T``: gates of each channel, ``g, beta [t, h, d]``, ``w [t, h, e]``.
    The rest is ``gated_delta_net``'s. ``use_beta_sigmoid_in_kernel``: beta is the sigmoid of what is given, twice that with ``allow_neg_eigval``.
    ``NotServedError``: ``beta_guard``, whose bound is written down nowhere."""
    if beta_guard:
        do = "leave it out, and keep the contrast of beta's channels small"
        raise NotServedError(expected("beta_guard=False", of="gated_delta_net_v2", got=True, do=do))
    dtype = q.dtype
    q, k, v, g, beta, w = _wide(q, k, v, g, beta, w, unit=use_qk_l2norm_in_kernel)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _packed((scale * q, k, beta * k, w * v, g), cu_seqlens, initial_state, output_final_state, dtype)


def gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_householder: int,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_domain: str = "log",
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> Result:
    """``gated_delta_net`` with ``n = num_householder`` updates a token (arXiv:2502.10297), the decay before the first of them: ``k [t n, h, d]``, ``v
    [t n, h, e]``, ``beta [t n, h]``, ``g [t, h]``.

    ``gate_domain="linear"``: ``g`` is the decay itself, of at least 1e-10. ``safe_gate``: it is ``exp(-exp(a_log) softplus(g + dt_bias))`` (``a_log,
    dt_bias [h]``, default: zeros). The sigmoid is ``gated_delta_net_v2``'s.
    """
    dtype = q.dtype
    q, k, v, g, beta = _wide(q, k, v, g, beta, unit=use_qk_l2norm_in_kernel)
    if safe_gate:
        shifted = nn.functional.softplus(g if dt_bias is None else g + dt_bias)
        g = -shifted if a_log is None else -a_log.to(g.dtype).exp() * shifted
    elif gate_domain == "linear":
        g = g.clamp_min(_LEAST_ALPHA).log()
    strength = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval).unsqueeze(-1)
    decay = nn.functional.pad(g.unsqueeze(1), (0, 0, 0, num_householder - 1)).flatten(0, 1).unsqueeze(-1)
    return _packed((scale * q, k, strength * k, strength * v, decay), cu_seqlens, initial_state, output_final_state, dtype)


def _wide(*tensors: torch.Tensor, unit: bool) -> list[torch.Tensor]:
    """q, k, v and others in the type to compute in: float64 where all of the three are. ``unit``: q and k divided by their lengths."""
    wide = torch.float64 if all(x.dtype == torch.float64 for x in tensors[:3]) else torch.float32
    q, k, *others = (x.to(wide) for x in tensors)
    return [_unit(q), _unit(k), *others] if unit else [q, k, *others]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LEAST_NORM).rsqrt()


def _strength(beta: torch.Tensor, is_logit: bool, twice: bool) -> torch.Tensor:
    return (2.0 if twice else 1.0) * beta.sigmoid() if is_logit else beta


def _packed(
    rows: tuple[torch.Tensor, ...], cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None, output_final_state: bool, dtype: torch.dtype
) -> Result:
    """The rule on ``(q, k, erase, write, decay)``, ``[t, h, d]`` or ``[t n, h, d]``. Sequences that are shorter than the longest are filled up with
    rows of zeros, which change no state."""
    q, tokens = rows[0], rows[0].shape[0]
    check_cumulative(cu_seqlens, tokens, "cu_seqlens of linear attention")
    ends = cu_seqlens.long()
    lengths = ends.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    offsets = torch.arange(longest, device=q.device)
    places = torch.where(offsets < lengths[:, None], ends[:-1, None] + offsets, tokens)
    dense = [_spread(x, places, x.shape[0] // max(tokens, 1)) for x in rows]
    state = q.new_zeros(len(lengths), q.shape[1], q.shape[2], rows[3].shape[2]) if initial_state is None else initial_state.to(q.dtype).mT
    o, state = delta_rule(*dense, state)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    inside = (places < tokens).flatten()
    packed = q.new_zeros(tokens, o.shape[1], o.shape[3])
    packed = packed.index_copy(0, places.flatten()[inside], o.transpose(1, 2).flatten(0, 1)[inside])
    return packed.to(dtype), state.mT if output_final_state else None


def _spread(x: torch.Tensor, places: torch.Tensor, updates: int) -> torch.Tensor:
    """``[b, h, longest * updates, d]`` of packed rows, of which each token has ``updates``; zeros at the place behind the last token."""
    each = nn.functional.pad(x.unflatten(0, (-1, updates)), (0, 0, 0, 0, 0, 0, 0, 1)) if updates else x.new_zeros(1, 1, *x.shape[1:])
    return each[places].flatten(1, 2).transpose(1, 2)
