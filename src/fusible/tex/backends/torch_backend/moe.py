"""Mixture of experts: tokens to their experts and back, and the router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.operands import plain
from fusible.tex.backends.torch_backend.permutation import permute, unpermute, unpermute_gradient
from fusible.tex.backends.torch_backend.router import Chosen, choose, count_margins, marked, routing_map, score_gradient, scores_of_all
from fusible.tex.calls.index_checks import check_once, check_range
from fusible.tex.calls.layout import check_each
from fusible.tex.calls.moe import (
    Routing,
    check_aux_loss,
    check_bin_bounds,
    check_float,
    check_histogram,
    check_integers,
    check_moved,
    check_permutation,
    check_score_gradient,
    map_shape,
)
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.moe import MoE
from fusible.tex.protocol import FP8_MAX, check_same_device, check_shape, to_dtype

__all__ = ["MoEKernels"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_INTEGERS = (torch.int32, torch.int64)
_EXPERTS = (torch.int16, *_INTEGERS)
"""What the chosen experts may be written in."""
_WORKSPACES = 4


class MoEKernels(MoE):
    @by_name
    def moe_permute_fwd(self, call: CallArguments) -> Any:
        check_each(call.workspace, lambda x: isinstance(x, Tensor), "a tensor", "workspace of moe_permute_fwd")
        x = _movable(call.input, call.dtype, "moe_permute_fwd")
        check_permutation(x, call.indices)
        check_integers(call.indices, "indices of moe_permute_fwd", _INTEGERS)
        check_same_device(call.indices, x, "indices of moe_permute_fwd")
        check_range(call.indices, 0, None, "indices of moe_permute_fwd")
        moved, row_id_map = permute(x, call.indices, call.num_out_tokens if call.num_out_tokens > 0 else call.indices.numel())
        return moved, row_id_map, call.workspace or [torch.empty(0, dtype=torch.int32, device=x.device) for _ in range(_WORKSPACES)]

    @by_name
    def moe_permute_bwd(self, call: CallArguments) -> Any:
        return _unpermute(call, "moe_permute_bwd")

    @by_name
    def moe_unpermute_fwd(self, call: CallArguments) -> Any:
        return _unpermute(call, "moe_unpermute_fwd")

    def moe_unpermute_bwd(self, input_bwd: Any, input_fwd: Any, dtype: Any, row_id_map: Any, prob: Any) -> Any:
        function = "moe_unpermute_bwd"
        g, x = plain(input_bwd), plain(input_fwd)
        for name, tensor in (("input_bwd", g), ("input_fwd", x)):
            check_float(tensor, f"{name} of {function}", _FLOATING)
            _check_matrix(tensor, name, function)
        weights = _weights(prob, g, function)
        copies = weights.shape[-1] if weights is not None else 1
        check_shape(g, (row_id_map.numel() // max(copies, 1), x.shape[1]), f"input_bwd of {function}")
        check_moved(row_id_map, weights, len(g), copies, function)
        check_integers(row_id_map, f"row_id_map of {function}", _INTEGERS)
        check_range(row_id_map, -1, len(x), f"row_id_map of {function}")
        check_once(row_id_map, f"row_id_map of {function}")
        return unpermute_gradient(g, x, row_id_map, weights)

    @by_name
    def fused_topk_with_score_function_fwd(self, call: CallArguments) -> Any:
        function = "fused_topk_with_score_function_fwd"
        groups = {"num_groups": call.num_groups, "group_topk": call.group_topk, "scaling_factor": call.scaling_factor}
        routing = Routing.of(call.logits, call.topk, call.score_function, call.routing_map_format, function, **groups)
        chosen = _choose(call.logits, routing, call.expert_bias, call.topk_indices, call.use_pre_softmax, function)
        return _probabilities(chosen, routing, call.logits), _routed(chosen, routing, call.topk_indices), chosen.intermediate

    @by_name
    def fused_topk_with_score_function_qb_fwd(self, call: CallArguments) -> Any:
        function = "fused_topk_with_score_function_qb_fwd"
        routing = Routing.of(call.logits, call.topk, "sigmoid", call.routing_map_format, function, scaling_factor=call.scaling_factor)
        if call.expert_bias is None or not call.expert_bias.numel():
            raise ArgumentError(expected(f"a bias [{routing.experts}]", of=f"expert_bias of {function}", got="none", do="pass zeros to begin with"))
        check_histogram(call.histogram, call.bin_bounds, routing, torch.int32, torch.float32)
        if not call.histogram.is_contiguous():
            raise ArgumentError(expected("a contiguous histogram", of=function, got=f"strides {call.histogram.stride()}", do="pass it whole"))
        if not call.bin_bounds_validated:
            check_bin_bounds(*call.bin_bounds.tolist())
        chosen = _choose(call.logits, routing, call.expert_bias, call.topk_indices, False, function)
        cutoff = chosen.scores.topk(routing.topk + 1, dim=-1).values[..., -1:]
        probabilities = _probabilities(chosen, routing, call.logits)
        # What is written is written last, and first what torch may refuse to write to: counting cannot fail any more.
        routed = _routed(chosen, routing, call.topk_indices)
        count_margins(cutoff - chosen.intermediate, call.histogram, call.bin_bounds)
        return probabilities, routed, chosen.intermediate, cutoff.squeeze(-1), call.histogram

    @by_name
    def fused_topk_with_score_function_bwd(self, call: CallArguments) -> None:
        function = "fused_topk_with_score_function_bwd"
        routing = Routing.of(call.grad_probs, call.topk, call.score_function, call.routing_map_format, function, scaling_factor=call.scaling_factor)
        _check_gradient(routing, call.intermediate_output, call.grad_probs, call.grad_logits, function)
        shape = (*call.grad_probs.shape[:-1], call.topk) if call.use_dense_indices else map_shape(call.grad_probs.shape, routing.map_format)
        check_shape(call.routing_map, shape, f"routing_map of {function}")
        if call.use_dense_indices:
            check_integers(call.routing_map, f"routing_map of {function}", _EXPERTS)
            check_range(call.routing_map, 0, routing.experts, f"routing_map of {function}")
        elif call.routing_map.element_size() != 1:
            raise DTypeError(
                expected("bool or uint8", of=f"routing_map of {function}", got=call.routing_map.dtype, do="pass what the forward returned")
            )
        chosen = marked(call.routing_map, routing, call.use_dense_indices)
        g = call.grad_probs.float()
        g = g if routing.scaling == 1.0 else g * routing.scaling
        saved = call.intermediate_output.float()
        call.grad_logits.copy_(score_gradient(g, saved, routing, chosen, pre_softmax=call.use_pre_softmax, normalise=call.topk > 1))

    def fused_score_for_moe_aux_loss_fwd(self, logits: Any, topk: int, score_function: str, routing_map_format: int = 0) -> Any:
        function = "fused_score_for_moe_aux_loss_fwd"
        routing = Routing.of(logits, topk, score_function, routing_map_format, function)
        check_float(logits, f"logits of {function}", _FLOATING)
        chosen = scores_of_all(logits.float(), routing)
        saved = chosen.intermediate
        # The two results may be one tensor, or the logits themselves, here; the caller gets them apart.
        saved = saved.clone() if saved is chosen.weights or saved is logits else saved
        return chosen.weights, routing_map(chosen.indices, routing), saved

    def fused_score_for_moe_aux_loss_bwd(self, intermediate_output: Any, grad_scores: Any, grad_logits: Any, topk: int, score_function: str) -> None:
        function = "fused_score_for_moe_aux_loss_bwd"
        routing = Routing.of(grad_scores, topk, score_function, 0, function)
        _check_gradient(routing, intermediate_output, grad_scores, grad_logits, function)
        g, saved = grad_scores.float(), intermediate_output.float()
        grad_logits.copy_(score_gradient(g, saved, routing, None, pre_softmax=True, normalise=True))

    @by_name
    def fused_moe_aux_loss_fwd(self, call: CallArguments) -> Any:
        total = torch.full((), float(call.total_num_tokens), dtype=torch.float32, device=call.probs.device)
        return _aux_loss(call, total)

    @by_name
    def fused_moe_aux_loss_fwd_graph_safe(self, call: CallArguments) -> Any:
        if call.total_num_tokens.numel() != 1:
            got = list(call.total_num_tokens.shape)
            raise ShapeError(expected("one number", of="total_num_tokens of fused_moe_aux_loss_fwd_graph_safe", got=got, do="pass a 0-d tensor"))
        total = call.total_num_tokens.reshape(()).float()
        return _aux_loss(call, total)

    def fused_moe_aux_loss_bwd(self, Const_buf: Any, tokens_per_expert: Any, num_rows: int, num_cols: int, grad_aux_loss: Any) -> Any:
        check_shape(tokens_per_expert, (num_cols,), "tokens_per_expert of fused_moe_aux_loss_bwd")
        if Const_buf.numel() != 2:
            check_shape(Const_buf, (2,), "Const_buf of fused_moe_aux_loss_bwd")
        coefficient = Const_buf.reshape(-1)[0]
        row = (tokens_per_expert.float() * (coefficient * grad_aux_loss.reshape(()).float())).to(grad_aux_loss.dtype)
        return row.expand(num_rows, num_cols).contiguous()


def _check_matrix(x: Any, name: str, function: str) -> None:
    if x.dim() != 2:
        raise ShapeError(expected("[rows, H]", of=f"{name} of {function}", got=list(x.shape), do="flatten the leading dimensions"))


def _movable(input: Any, dtype: Any, function: str) -> Tensor:
    """``input`` as a matrix of floating point, or of FP8 bytes that ``dtype`` names."""
    x = plain(input)
    _check_matrix(x, "input", function)
    if x.dtype is not torch.uint8:
        check_float(x, f"input of {function}", _FLOATING)
    elif to_dtype(dtype) not in FP8_MAX:
        raise DTypeError(expected("an FP8 format", of=f"dtype of {function} for uint8 data", got=repr(dtype), do="pass kFloat8E4M3 or kFloat8E5M2"))
    return x


def _weights(prob: Any, like: Tensor, function: str) -> Tensor | None:
    """``prob``, or None where it is empty."""
    if prob is None or not prob.numel():
        return None
    check_same_device(prob, like, f"prob of {function}")
    if prob.layout is not torch.strided:  # by which torch weighs FP8 tokens with other numbers
        raise ArgumentError(expected("a dense tensor", of=f"prob of {function}", got=f"one of {prob.layout}", do="pass x.to_dense()"))
    if prob.dim() != 2:
        raise ShapeError(expected("[T, K]", of=f"prob of {function}", got=list(prob.shape), do="pass a weight for each copy of each token"))
    return prob


def _unpermute(call: CallArguments, function: str) -> Tensor:
    x, row_id_map = _movable(call.input, call.dtype, function), call.row_id_map
    weights = _weights(call.prob, x, function)
    check_moved(row_id_map, weights, call.num_tokens, call.topK, function)
    check_integers(row_id_map, f"row_id_map of {function}", _INTEGERS)
    check_range(row_id_map, -1, len(x), f"row_id_map of {function}")
    return unpermute(x, call.dtype, row_id_map, weights, call.num_tokens, call.topK)


def _choose(logits: Any, routing: Routing, expert_bias: Any, topk_indices: Any, pre_softmax: bool, function: str) -> Chosen:
    check_float(logits, f"logits of {function}", _FLOATING)
    if expert_bias is not None and not expert_bias.numel():
        expert_bias = None
    if expert_bias is not None:
        if routing.score == "softmax":
            do = "use sigmoid or sqrtsoftplus, or pass None"
            raise ArgumentError(expected("no expert_bias", of=f"{function} with softmax", got="one", do=do))
        check_shape(expert_bias, (routing.experts,), f"expert_bias of {function}")
    if topk_indices is not None:
        check_shape(topk_indices, (*logits.shape[:-1], routing.topk), f"topk_indices of {function}")
        check_integers(topk_indices, f"topk_indices of {function}", _EXPERTS)
    x = logits.float()
    chosen = choose(x, routing, expert_bias, pre_softmax)
    if chosen.intermediate is logits:
        return Chosen(chosen.indices, chosen.weights, chosen.intermediate.clone(), chosen.scores)
    return chosen


def _probabilities(chosen: Chosen, routing: Routing, logits: Tensor) -> Tensor:
    """The weights where they belong, 0 elsewhere, in the dtype of ``logits``."""
    weights = chosen.weights if routing.scaling == 1.0 else chosen.weights * routing.scaling
    return torch.zeros_like(logits, memory_format=torch.contiguous_format).scatter_(-1, chosen.indices, weights.to(logits.dtype))


def _routed(chosen: Chosen, routing: Routing, topk_indices: Tensor | None) -> Tensor:
    return topk_indices.copy_(chosen.indices) if topk_indices is not None else routing_map(chosen.indices, routing)


def _check_gradient(routing: Routing, intermediate: Any, grad: Any, grad_logits: Any, function: str) -> None:
    check_score_gradient(routing, intermediate, grad, grad_logits, function)
    for name, tensor in (("intermediate_output", intermediate), ("the gradient", grad), ("grad_logits", grad_logits)):
        check_float(tensor, f"{name} of {function}", _FLOATING)


def _aux_loss(call: CallArguments, total: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its constants; ``total``: fp32 ``[]``, the number of tokens."""
    check_aux_loss(call.probs, call.tokens_per_expert, call.num_rows, call.num_cols)
    check_float(call.probs, "probs of fused_moe_aux_loss_fwd", _FLOATING)
    coefficient = torch.full_like(total, call.num_experts * call.coeff / call.topk).div_(total).div_(total)
    loss = call.probs.sum(0, dtype=torch.float32).mul_(call.tokens_per_expert.float()).sum() * coefficient
    return loss.to(call.probs.dtype), torch.stack((coefficient, loss))
