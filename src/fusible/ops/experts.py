"""Mixtures of experts: the ops around the experts' products (Shazeer et al. 2017, arXiv:1701.06538).

``RouteTokens`` chooses the experts of each token, ``DispatchTokens`` sorts copies of the tokens by expert, ``GroupedMMT`` and activations are
the experts, and ``CombineTokens`` adds up what a token's experts make of it. What they tell one another goes as side values. Where processes share
out the experts (Lepikhin et al. 2020, arXiv:2006.16668), ``SendTokens`` and ``ReceiveTokens`` take the places of the second and the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

from fusible import nvte
from fusible.errors import ArgumentError, check_number, expected
from fusible.nvte import DType
from fusible.ops.messages import Communicates, Message
from fusible.ops.op import Context, Op, OpTypes, check_width
from fusible.ops.sharing import Process

__all__ = ["CombineTokens", "DispatchTokens", "ReceiveTokens", "RouteTokens", "SendTokens"]

_COUNT_BYTES = 8
_SCORES = ("softmax", "sigmoid")

Sides = dict[str, nvte.Tensor | None]


class RouteTokens(Op):
    """``y = x``; beside it ``experts``, int32 ``[tokens, top_k]``, those of the largest logits ``x @ weight.T``, and ``probs``, fp32, the softmax
    over these; not ``normalized``, that over all logits. ``weight [experts, K]``; the product is in the type of x, or in fp32 where ``weight_dtype``
    says so, with a result in fp32, and no recipe quantizes it.

    ``score_function="sigmoid"``: experts are chosen by ``sigmoid(logits) + expert_bias``, with ``expert_bias [experts]`` or none, and ``probs`` are
    the sigmoids, ``normalized`` to a sum of 1 (DeepSeek-AI 2024, arXiv:2412.19437). ``top_groups``: they are of that many of ``groups`` equal
    groups, those whose ``top_k // top_groups`` best sum highest. ``scaling_factor``: what ``probs`` are multiplied by.

    ``dx = dy`` + the gradient by way of ``probs``. The bias, which only chooses, has none: 0.
    """

    rows_alone = True
    side_outputs = ("experts", "probs")
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16
    weight_dtype = DType.BFloat16
    dweight_dtype = DType.Float32
    expert_bias_dtype = DType.Float32
    dexpert_bias_dtype = DType.Float32

    def __init__(
        self,
        weight: nvte.Tensor,
        top_k: int,
        normalized: bool = True,
        *,
        score_function: str = "softmax",
        expert_bias: nvte.Tensor | None = None,
        groups: int | None = None,
        top_groups: int | None = None,
        scaling_factor: float | None = None,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(**types)
        count = weight.shape[0]
        if not 1 <= top_k <= count:
            raise ArgumentError(expected(f"from 1 to {count}, the experts", of="top_k of RouteTokens", got=top_k, do="choose another"))
        self.weight, self.top_k, self.normalized = weight, top_k, normalized
        self.score_function, self.expert_bias, self.scaling_factor = score_function, expert_bias, scaling_factor
        self.groups, self.top_groups = groups, top_groups
        self._check_scores(count)
        self._check_groups(count)

    def _check_scores(self, count: int) -> None:
        """Raise for scores that are none of ours, or that would have no gradient, and for a bias that belongs to others."""
        if self.score_function not in _SCORES:
            do = "name one of these"
            raise ArgumentError(expected(" or ".join(_SCORES), of="score_function of RouteTokens", got=repr(self.score_function), do=do))
        if self.score_function == "sigmoid" and self.normalized and self.top_k == 1:
            do = "pass normalized=False, or choose more experts"
            raise ArgumentError(expected("at least 2 with normalized sigmoids", of="top_k of RouteTokens", got=1, do=do))
        if self.expert_bias is not None and (self.score_function == "softmax" or tuple(self.expert_bias.shape) != (count,)):
            got = "softmax" if self.score_function == "softmax" else list(self.expert_bias.shape)
            wanted, do = f"score_function='sigmoid', and [{count}]", "leave it out, or give one number for each expert"
            raise ArgumentError(expected(wanted, of="expert_bias of RouteTokens", got=got, do=do))
        if self.scaling_factor is not None:
            check_number(self.scaling_factor, "scaling_factor of RouteTokens")

    def _check_groups(self, count: int) -> None:
        """Raise ``ArgumentError`` for groups that the experts do not make up, or of which so many cannot be chosen."""
        groups, chosen = self.groups, self.top_groups
        if groups is None and chosen is None:
            return
        if not (
            groups and chosen and 1 <= chosen <= groups and count % groups == self.top_k % chosen == 0 and self.top_k // chosen <= count // groups
        ):
            wanted = f"groups that divide the {count} experts, and a number of them that divides top_k {self.top_k} into no more than a group has"
            do = "change groups or top_groups, or leave both out"
            raise ArgumentError(expected(wanted, of="groups and top_groups of RouteTokens", got=f"{groups} and {chosen}", do=do))

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.weight] if self.expert_bias is None else [self.weight, self.expert_bias]

    @property
    def arg_names(self) -> tuple[str, ...]:
        return ("weight",) if self.expert_bias is None else ("weight", "expert_bias")

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        x, weight = nvte.cast_checked(x, self.x_dtype), nvte.cast_checked(self.weight, self.weight_dtype)
        bias = None if self.expert_bias is None else nvte.cast_checked(self.expert_bias, self.expert_bias_dtype)
        how = self.normalized, self.score_function, bias, self.groups, self.top_groups, self.scaling_factor
        probs, experts, scores = nvte.top_experts(nvte.matmul_transpose(self._operand(x), weight, DType.Float32), self.top_k, *how)
        return nvte.cast_checked(x, self.y_dtype), self.context(x, weight, experts, scores), {"experts": experts, "probs": probs}

    def _operand(self, x: nvte.Tensor) -> nvte.Tensor:
        """x as the router's product reads it: in the type of the weight."""
        return nvte.cast_checked(x, self.weight_dtype)

    def context(self, x: nvte.Tensor, weight: nvte.Tensor, experts: nvte.Tensor, scores: nvte.Tensor) -> Context:
        return {"x": x, "weight": weight, "experts": experts, "scores": scores}

    def backward(self, ctx: Context, dy: nvte.Tensor, *, experts: None, probs: nvte.Tensor | None) -> tuple[nvte.Tensor | None, list[Any]]:
        dx = nvte.cast_checked(dy, self.dx_dtype)
        if probs is None:
            return dx, self._grads(nvte.zeros(self.weight.shape, self.dweight_dtype, dy) if self.wants("weight") else None, dy)
        dscores = nvte.dtop_experts(probs, ctx["experts"], ctx["scores"], self.normalized, self.score_function, self.scaling_factor)
        dlogits = nvte.cast_checked(dscores, ctx["weight"].type)
        if self.wants("x"):
            dx = nvte.matmul_add(dlogits, ctx["weight"], dx, nvte.element(self.dx_dtype))
        return dx, self._grads(nvte.transpose_matmul(dlogits, self._operand(ctx["x"]), self.dweight_dtype) if self.wants("weight") else None, dy)

    def _grads(self, dweight: nvte.Tensor | None, like: nvte.Tensor) -> list[nvte.Tensor | None]:
        if self.expert_bias is None:
            return [dweight]
        return [dweight, nvte.zeros(self.expert_bias.shape, self.dexpert_bias_dtype, like) if self.wants("expert_bias") else None]

    def width(self, width: int | None) -> int | None:
        check_width(self, self.weight.shape[1], width)
        return width

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in ("groups", "top_groups", "scaling_factor") if getattr(self, name) is not None}
        shown = {**({} if self.score_function == "softmax" else {"score_function": self.score_function}), **shown}
        options = "".join(f", {name}={value!r}" for name, value in shown.items())
        return f"{self.top_k} of {self.weight.shape[0]} experts" + ("" if self.normalized else ", normalized=False") + options


class DispatchTokens(Op):
    """``y [tokens * top_k, K]``: copies of the rows of x, sorted by the ``top_k`` of ``groups`` experts that each goes to. Beside it ``row_map``,
    where each copy is, and by each of the names ``sizes`` how many each expert has, int64 ``[groups]``. ``dx`` is the sum over a token's copies."""

    side_inputs = ("experts",)
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16

    def __init__(self, groups: int, top_k: int, sizes: Sequence[str] = ("sizes",), **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.groups, self.top_k, self.sizes = groups, top_k, tuple(sizes)
        self.side_outputs = ("row_map", *self.sizes)

    def forward(self, x: nvte.Tensor, *, experts: nvte.Tensor) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        x = nvte.cast_checked(x, self.x_dtype)
        rows, row_map = nvte.moe_permute(x, experts)
        sizes = nvte.count_experts(experts, self.groups)
        return self._dispatched(rows, sizes, {"row_map": row_map})

    def _dispatched(self, rows: nvte.Tensor, sizes: nvte.Tensor, ctx: Context) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        return nvte.cast_checked(rows, self.y_dtype), ctx, {"row_map": ctx["row_map"], **dict.fromkeys(self.sizes, sizes)}

    def backward(self, ctx: Context, dy: nvte.Tensor, **sides: None) -> tuple[nvte.Tensor | None, list[Any], Sides]:
        dx = None
        if self.wants("x"):
            drows = self._returned(nvte.cast_checked(dy, self.dy_dtype), ctx)
            dx = nvte.cast_checked(nvte.dmoe_permute(drows, ctx["row_map"], self.top_k), self.dx_dtype)
        return dx, [], {"experts": None}

    def _returned(self, dy: nvte.Tensor, ctx: Context) -> nvte.Tensor:
        return dy

    def extra_repr(self) -> str:
        return f"{self.groups} experts"


class CombineTokens(Op):
    """``y [tokens, K]``: the sum of each token's rows of x, which its experts have made, times their ``probs``."""

    side_inputs = ("row_map", "probs")
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16

    def forward(self, x: nvte.Tensor, *, row_map: nvte.Tensor, probs: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        rows = nvte.cast_checked(x, self.x_dtype)
        y = nvte.moe_unpermute(rows, row_map, probs)
        return nvte.cast_checked(y, self.y_dtype), self.context(rows, row_map, probs)

    def context(self, rows: nvte.Tensor, row_map: nvte.Tensor, probs: nvte.Tensor) -> Context:
        return {"rows": rows, "row_map": row_map, "probs": probs}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[Any], Sides]:
        drows, dprobs = nvte.dmoe_unpermute(nvte.cast_checked(dy, self.dy_dtype), ctx["rows"], ctx["row_map"], ctx["probs"])
        return nvte.cast_checked(drows, self.dx_dtype), [], {"row_map": None, "probs": dprobs if self.wants("probs") else None}


class _Exchanges(Communicates):
    """Of both ends of an exchange: how many rows come hangs on values, so that passes are neither replayed nor compiled."""

    x_width: int | None

    @property
    def direct_only(self) -> bool:
        return True

    def _of_rows(self, what: str, rows: int, type: nvte.Type | None) -> Iterator[Message]:
        """The message that takes rows of x's width; on average, for a process may have more rows than another."""
        if type is not None and self.x_width is not None:
            yield Message("all_to_all", what, rows * self.x_width * nvte.bit_width(nvte.element(type)) // 8)


class SendTokens(_Exchanges, DispatchTokens):
    """``DispatchTokens`` in ``process`` of ``group``, whose processes share out the experts: y has the rows of this process's experts, from all
    processes. Beside it ``sent`` and ``came``, how many rows go to each expert, and come from each process to each of its own."""

    def __init__(self, groups: int, top_k: int, *, group: Any, process: Process, sizes: Sequence[str] = ("sizes",), **types: Unpack[OpTypes]) -> None:
        super().__init__(groups, top_k, sizes, **types)
        self.group, self.process = group, process
        self.side_outputs = (*self.side_outputs, "sent", "came")

    @property
    def kind(self) -> type[Op]:
        return DispatchTokens

    def _dispatched(self, rows: nvte.Tensor, sizes: nvte.Tensor, ctx: Context) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        y, own, came = nvte.exchange_groups(rows, sizes, self.group)
        y, ctx, sides = super()._dispatched(y, own, {**ctx, "sent": sizes, "came": came})
        return y, ctx, {**sides, "sent": sizes, "came": came}

    def _returned(self, dy: nvte.Tensor, ctx: Context) -> nvte.Tensor:
        return nvte.return_groups(dy, ctx["sent"], ctx["came"], self.group)

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        if kind != "backward":
            yield Message("all_to_all", "sizes", self.groups * _COUNT_BYTES)
            yield from self._of_rows("x", self.rows_of_y(rows), self.x_dtype)
        elif self.wants("x"):
            yield from self._of_rows("dx", self.rows_of_y(rows), self.dy_dtype)

    def rows_of_y(self, rows: int) -> int:
        return rows * self.top_k


class ReceiveTokens(_Exchanges, CombineTokens):
    """``CombineTokens`` of rows that ``SendTokens`` has sent: they come back before they are added up."""

    side_inputs = (*CombineTokens.side_inputs, "sent", "came")

    def __init__(self, groups: int, top_k: int, *, group: Any, process: Process, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.groups, self.top_k, self.group, self.process = groups, top_k, group, process

    @property
    def kind(self) -> type[Op]:
        return CombineTokens

    def forward(self, x: nvte.Tensor, *, sent: nvte.Tensor, came: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        rows = nvte.return_groups(nvte.cast_checked(x, self.x_dtype), sent, came, self.group)
        y, ctx = super().forward(rows, **sides)
        return y, {**ctx, "sent": sent, "came": came}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[Any], Sides]:
        drows, grads, dsides = super().backward(ctx, dy)
        dx, _, _ = nvte.exchange_groups(drows, ctx["sent"], self.group)
        return dx, grads, {**dsides, "sent": None, "came": None}

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        if kind != "backward":
            yield from self._of_rows("x", rows, self.x_dtype)
        else:
            yield Message("all_to_all", "sizes", self.groups * _COUNT_BYTES)
            yield from self._of_rows("dx", rows, self.dx_dtype)

    def rows_of_y(self, rows: int) -> int:
        return rows // self.top_k
