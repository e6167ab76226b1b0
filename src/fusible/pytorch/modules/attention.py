"""Attention. Each takes q, k and v side by side, as one Linear gives them, and gives the heads' outputs side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, expected
from fusible.nvte import EVERYWHERE
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.channels import ExtraTensors
from fusible.pytorch.modules.initialization import Init
from fusible.pytorch.modules.normalization import gamma_init
from fusible.pytorch.modules.options import ModuleWithOptions

__all__ = [
    "CrossAttention",
    "DotProductAttention",
    "GroupedQuerySelfAttention",
    "LatentAttention",
    "MultiHeadedSelfAttention",
    "MultiQuerySelfAttention",
    "QKNorm",
]


class SelfAttentionArguments(TypedDict, total=False):
    """Keywords of the self-attentions (see ``DotProductAttention``)."""

    causal: bool
    rope_base: float | None
    rope_width: int | None
    rope_factors: Sequence[float]
    scale: float | None
    window_size: tuple[int, int]
    soft_cap: float | None
    alibi: bool | Sequence[float] | torch.Tensor
    mask: bool
    dropout: float


class _Attention(ExtraTensors, ModuleWithOptions):
    """A module of one attention op, whose extra inputs are the op's side inputs."""

    _bound_op: BoundOp  # pyright: ignore[reportIncompatibleVariableOverride]

    def _hold(self) -> None:
        """A constructor ends with it."""
        (op,) = self.make_ops()
        ModuleWithOptions.__init__(self, op)
        self.num_extra_inputs = len(op.side_names)
        self._begin_channels()
        self._bound_op = self._bound[0]._replace(extras=self.extras)

    @abstractmethod
    def make_ops(self) -> Sequence[ops.DotProductAttention | ops.CrossAttention | ops.LatentAttention]:
        """The op."""

    def bound_ops(self):
        yield self._bound_op

    def exchanged(self, ops: Mapping[Op, Op]) -> dict[str, Any]:
        bound = self._bound_op
        return {**super().exchanged(ops), "_bound_op": bound._replace(op=ops.get(bound.op, bound.op))}

    def local_ops(self) -> tuple[BoundOp, ...]:
        return (self._bound_op,)

    def current(self, bound: BoundOp) -> BoundOp:
        return bound if bound.place is None else self._bound_op

    def extra_repr(self) -> str:
        return self._bound_op.op.extra_repr()


class DotProductAttention(_Attention):
    """``[tokens, (heads + 2 groups) * head_width] -> [tokens, heads * head_width]`` (see ``ops.DotProductAttention``).

    ``rope_base`` (10000.0 in most models) rotates q and k by their positions; None leaves them as they are. ``rope_width``: how many of a head's
    columns are rotated, the first ones; None for all. ``rope_factors``: what each pair's frequency is multiplied by.
    ``window_size``: how many tokens before and after its own place a query sees, -1 for all: ``(4095, 0)`` is a sliding window of 4,096 tokens.

    ``soft_cap``: scores are ``soft_cap * tanh(score / soft_cap)``. ``alibi``: scores are less by each head's slope times the distance, by the slopes
    of the paper (True) or one of each head, NVIDIA's ``alibi_slopes [heads]``, which are read when the module is made. ``dropout``: the share of
    probabilities that is dropped while training, drawn by torch's default generator. ``mask``: an extra input ``[batch or 1, heads or 1, queries or
    1, keys or 1]``, of bools, True for what is seen, or of numbers that are added to scores, which may have a gradient; ``model(x,
    extra_inputs=[mask])``, in ``ops.Sequential`` ``model(x, mask)``. With a KV cache its queries are the new tokens, and its keys all of a
    sequence.
    """

    fixed_options = frozenset({"heads", "head_width", "groups", "mask"})

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float | None = None,
        rope_width: int | None = None,
        rope_factors: Sequence[float] = (),
        scale: float | None = None,
        window_size: tuple[int, int] = EVERYWHERE,
        soft_cap: float | None = None,
        alibi: bool | Sequence[float] | torch.Tensor = False,
        mask: bool = False,
        dropout: float = 0.0,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.groups = heads, head_width, heads if groups is None else groups
        self.causal, self.scale, self.window_size, self.soft_cap, self.dropout = causal, scale, window_size, soft_cap, dropout
        self.rope_base, self.rope_width, self.rope_factors, self.mask = rope_base, rope_width, tuple(rope_factors), mask
        slopes: Any = alibi.tolist() if isinstance(alibi, torch.Tensor) else alibi
        self.alibi: bool | Sequence[float] = tuple(slopes) if isinstance(slopes, list) else slopes
        self._hold()

    def make_ops(self) -> Sequence[ops.DotProductAttention]:
        options: dict[str, Any] = {"causal": self.causal, "scale": self.scale, "window_size": self.window_size}
        options |= {"rope_base": self.rope_base, "rope_width": self.rope_width, "rope_factors": self.rope_factors}
        options |= {"soft_cap": self.soft_cap, "alibi": self.alibi, "mask": self.mask, "dropout": self.dropout}
        return [ops.DotProductAttention(self.heads, self.head_width, groups=self.groups, **options)]


class GroupedQuerySelfAttention(DotProductAttention):
    """Self-attention of ``features = heads * head_width`` columns in which ``heads / groups`` query heads share a key and value head.

    ``[tokens, features + 2 * features * groups / heads] -> [tokens, features]``. ``options``: ``causal``, ``rope_base``,
    ``rope_width``, ``rope_factors``, ``scale``, ``window_size``, ``soft_cap``, ``alibi``, ``mask`` and ``dropout`` of ``DotProductAttention``.
    """

    initial_options = frozenset({"features"})

    def __init__(self, features: int, heads: int, groups: int, **options: Unpack[SelfAttentionArguments]) -> None:
        if heads < 1 or features % heads:
            raise ArgumentError(expected(f"a divisor of the {features} features", of="the number of heads", got=heads, do="choose another number"))
        super().__init__(heads, features // heads, groups=groups, **options)


class MultiQuerySelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which all query heads share one key and value head (Shazeer 2019, arXiv:1911.02150)."""

    def __init__(self, features: int, heads: int, **options: Unpack[SelfAttentionArguments]) -> None:
        super().__init__(features, heads, 1, **options)


class MultiHeadedSelfAttention(GroupedQuerySelfAttention):
    """Self-attention in which every query head has its own key and value: ``[tokens, 3 * features] -> [tokens, features]``."""

    def __init__(self, features: int, heads: int, **options: Unpack[SelfAttentionArguments]) -> None:
        super().__init__(features, heads, heads, **options)


class CrossAttention(_Attention):
    """Attention of the queries ``x [tokens, heads * head_width]`` over keys and values from elsewhere (see ``ops.CrossAttention``).

    These are an extra input: ``[batch, keys, 2 * groups * head_width]``, k and v side by side as one Linear gives them, ``keys`` for each sequence of
    x; or ``[tokens, 2 * groups * head_width]`` of x's own sequences, as a channel gives them. ``soft_cap``, ``dropout`` and ``mask`` are those of
    ``DotProductAttention``; the mask, the second extra input, can hide keys that are padding: ``[batch, 1, 1, keys]``.
    """

    fixed_options = frozenset({"heads", "head_width", "groups", "mask"})

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        mask: bool = False,
        dropout: float = 0.0,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.groups = heads, head_width, heads if groups is None else groups
        self.scale, self.soft_cap, self.mask, self.dropout = scale, soft_cap, mask, dropout
        self._hold()

    def make_ops(self) -> Sequence[ops.CrossAttention]:
        options: dict[str, Any] = {"scale": self.scale, "soft_cap": self.soft_cap, "mask": self.mask, "dropout": self.dropout}
        return [ops.CrossAttention(self.heads, self.head_width, groups=self.groups, **options)]


class LatentAttention(_Attention):
    """Self-attention of heads of which a part is rotated by positions, with one rotated key for all (see ``ops.LatentAttention``): multi-head latent
    attention between its products (DeepSeek-V2, arXiv:2405.04434).

    ``[tokens, heads * (key_width + rope_width) + rope_width + groups * (key_width + value_width)] -> [tokens, heads * value_width]``: q, the rotated
    key, and of each group a key and a value. Without a ``value_width`` keys are latents, whose own columns are the values too: there is nothing in
    the place of values, and ``y`` is ``[tokens, heads * key_width]``.
    """

    fixed_options = frozenset({"heads", "key_width", "rope_width", "value_width", "groups"})

    def __init__(
        self,
        heads: int,
        key_width: int,
        rope_width: int,
        *,
        value_width: int | None = None,
        groups: int | None = None,
        causal: bool = True,
        rope_base: float = 10000.0,
        rope_factors: Sequence[float] = (),
        rope_interleaved: bool = False,
        rope_scale: float = 1.0,
        scale: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.key_width, self.rope_width, self.value_width = heads, key_width, rope_width, value_width
        self.groups, self.causal, self.scale = heads if groups is None else groups, causal, scale
        self.rope_base, self.rope_factors, self.rope_interleaved, self.rope_scale = rope_base, tuple(rope_factors), rope_interleaved, rope_scale
        self._hold()

    def make_ops(self) -> Sequence[ops.LatentAttention]:
        options: dict[str, Any] = {"value_width": self.value_width, "groups": self.groups, "causal": self.causal, "scale": self.scale}
        options |= {"rope_base": self.rope_base, "rope_factors": self.rope_factors}
        options |= {"rope_interleaved": self.rope_interleaved, "rope_scale": self.rope_scale}
        return [ops.LatentAttention(self.heads, self.key_width, self.rope_width, **options)]


class QKNorm(ModuleWithOptions):
    """RMS normalization of each head of q and of k, in front of attention: ``q_weight``, ``k_weight`` ``[head_width]`` (see ``ops.QKNorm``).

    ``Sequential(Linear(h, 3 * h), QKNorm(heads, h // heads), MultiHeadedSelfAttention(h, heads), Linear(h, h))``.
    """

    fixed_options = frozenset({"heads", "head_width", "groups"})
    initial_options = frozenset({"param_dtype", "device"})

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        groups: int | None = None,
        eps: float = 1e-6,
        zero_centered_gamma: bool = False,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.head_width, self.groups = heads, head_width, heads if groups is None else groups
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.q_weight, self.k_weight = (nn.Parameter(torch.empty(head_width, dtype=param_dtype, device=device)) for _ in range(2))
        super().__init__(*self.make_ops())
        self.reset_parameters()

    def make_ops(self) -> Iterator[Op]:
        q_weight, k_weight = self.tensor_of("q_weight"), self.tensor_of("k_weight")
        assert q_weight is not None and k_weight is not None
        yield ops.QKNorm(q_weight, k_weight, self.heads, groups=self.groups, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)

    @property
    def init_methods(self) -> Mapping[str, Init]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict.fromkeys(("q_weight", "k_weight"), gamma_init(self.zero_centered_gamma))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, head_width={self.head_width}"
