"""What is wrong with the maps, indices and sizes of a permutation of tokens is refused in a sentence, before anything is computed.

Generated over every function that permutes tokens, of ``te.permutation`` and of the Triton kernels that torch stands in for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible.compat.te_functions import permutation as functions
from fusible.compat.triton_functions import permutation as maps
from fusible.errors import FusibleError

TOKENS, EXPERTS, HIDDEN = 6, 3, 4
SPACES = {"te": functions, "triton": maps}


def _mask() -> Tensor:
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32)
    mask[:, 1] = 1
    mask[::2, 2] = 1
    return mask


X, PROBS = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN), torch.full((TOKENS, EXPERTS), 0.5)
MASK, COUNT = _mask(), int(_mask().sum())
INDICES = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], dtype=torch.int32)
ROWS = maps.make_row_id_map(MASK, TOKENS, EXPERTS)
OF_INDICES = functions.moe_permute(X, INDICES, 2 * TOKENS, map_type="index")[1]
SIZES, ORDER = torch.tensor([2, 3, 1]), torch.tensor([2, 0, 1])
PERMUTED = torch.ones(COUNT, HIDDEN)
COMMON: dict[str, Any] = {"num_tokens": TOKENS, "num_experts": EXPERTS, "hidden_size": HIDDEN}

CALLS: dict[str, dict[str, Any]] = {
    "te.moe_permute mask": {"inp": X, "routing_map": MASK, "num_out_tokens": COUNT},
    "te.moe_permute index": {"inp": X, "routing_map": INDICES, "num_out_tokens": 2 * TOKENS, "map_type": "index"},
    "te.moe_permute_with_probs": {"inp": X, "probs": PROBS, "routing_map": MASK, "num_out_tokens": COUNT},
    "te.moe_permute_and_pad_with_probs": {"inp": X, "probs": PROBS, "routing_map": MASK, "tokens_per_expert": MASK.sum(0), "align_size": 4},
    "te.moe_unpermute mask": {"inp": PERMUTED, "row_id_map": ROWS, "merging_probs": PROBS, "restore_shape": X.shape},
    "te.moe_unpermute index": {"inp": X.repeat(2, 1), "row_id_map": OF_INDICES, "merging_probs": PROBS[:, :2], "map_type": "index"},
    "te.moe_sort_chunks_by_index": {"inp": X, "split_sizes": SIZES, "sorted_index": ORDER},
    "te.moe_sort_chunks_by_index_with_probs": {"inp": X, "probs": torch.ones(TOKENS), "split_sizes": SIZES, "sorted_index": ORDER},
    "triton.make_row_id_map": {"routing_map": MASK, "num_tokens": TOKENS, "num_experts": EXPERTS},
    "triton.permute_with_mask_map": {
        "inp": X, "row_id_map": ROWS, "probs": PROBS, "scale": torch.ones(TOKENS, 2), "pad_offsets": None, "num_out_tokens": COUNT,
        "scale_hidden_dim": 2, **COMMON,
    },
    "triton.unpermute_with_mask_map": {
        "inp": PERMUTED, "row_id_map": ROWS, "merging_probs": PROBS, "permuted_probs": torch.ones(COUNT), "pad_offsets": None, **COMMON,
    },
    "triton.unpermute_with_mask_map_bwd_with_merging_probs": {
        "fwd_output_grad": X, "row_id_map": ROWS, "fwd_input": PERMUTED, "merging_probs": PROBS, "pad_offsets": None, "num_out_tokens": COUNT,
        **COMMON,
    },
    "triton.make_chunk_sort_map": {"split_sizes": SIZES, "sorted_indices": ORDER, "num_tokens": TOKENS, "num_splits": 3},
    "triton.sort_chunks_by_map": {
        "inp": X, "row_id_map": torch.arange(TOKENS), "probs": torch.ones(TOKENS), "num_tokens": TOKENS, "hidden_size": HIDDEN, "is_forward": True,
    },
}  # fmt: skip
"""By its place and name, and the kind of its map: a call of each function."""


def _with(x: Tensor, place: tuple[int, ...], value: int) -> Tensor:
    changed = x.clone()
    changed[place] = value
    return changed


_ORDERS: dict[str, Any] = {
    "repeated": torch.tensor([1, 1, 0]),
    "out of range": torch.tensor([3, 0, 1]),
    "negative": torch.tensor([-1, 0, 1]),
    "short": ORDER[:2],
    "long": torch.tensor([2, 0, 1, 3]),
    "floats": ORDER.float(),
    "matrix": ORDER[None],
}
_SIZES: dict[str, Any] = {
    "negative": torch.tensor([-2, 7, 1]),
    "too many": torch.tensor([2, 3, 2]),
    "short": SIZES[:2],
    "floats": SIZES + 0.5,
    "scalar": torch.tensor(6),
}
_MAPS: dict[str, Any] = {
    "repeated": _with(ROWS, (0, 0), int(ROWS[1, 0])),
    "out of range": _with(ROWS, (0, 0), COUNT),
    "negative": _with(ROWS, (0, 0), -1),
    "experts out of range": _with(ROWS, (0, EXPERTS), EXPERTS),
    "negative experts": _with(ROWS, (0, EXPERTS), -1),
    "too many experts": _with(ROWS, (0, -1), EXPERTS + 1),
    "fewer than none": _with(ROWS, (0, -1), -1),
    "of other tokens": ROWS[:4],
    "of other experts": ROWS[:, 2:],
    "floats": ROWS.float(),
    "vector": ROWS[:, 0],
}
_OFFSETS = {"short": torch.tensor([0, 1]), "negative": torch.tensor([-1, -1, -1]), "floats": torch.tensor([0.0, 0.5, 1.0])}
_PROBS = {"fewer experts": PROBS[:, :2], "fewer tokens": PROBS[:4], "vector": PROBS[:, 0]}
_VECTOR = {"short": torch.ones(4), "matrix": torch.ones(TOKENS, 1)}
_TOKENS = {"fewer": X[:4], "vector": X[:, 0], "stacked": X[None]}

WRONG: dict[str, dict[str, Any]] = {
    "te.moe_permute mask": {"inp": _TOKENS, "routing_map": {"vector": MASK[:, 0], "fewer tokens": MASK[:4]}, "num_out_tokens": {"few": COUNT - 1}},
    "te.moe_permute index": {
        "inp": _TOKENS, "num_out_tokens": {"negative": -1},
        "routing_map": {"floats": INDICES + 0.7, "mask": MASK.bool(), "negative": INDICES - 1, "vector": INDICES[:, 0], "fewer tokens": INDICES[:4]},
    },
    "te.moe_permute_with_probs": {"inp": _TOKENS, "probs": _PROBS, "routing_map": {"vector": MASK[:, 0]}},
    "te.moe_permute_and_pad_with_probs": {
        "inp": _TOKENS, "probs": _PROBS, "align_size": {"zero": 0},
        "tokens_per_expert": {
            "short": MASK.sum(0)[:2], "other": MASK.sum(0) + 1, "in another order": MASK.sum(0).flip(0), "negative": MASK.sum(0) - 9,
            "floats": MASK.sum(0) + 0.5, "matrix": MASK.sum(0)[None],
        },
    },
    "te.moe_unpermute mask": {
        "inp": {"fewer": PERMUTED[:4], "vector": PERMUTED[:, 0]}, "row_id_map": _MAPS, "merging_probs": _PROBS, "pad_offsets": _OFFSETS,
        "restore_shape": {"fewer tokens": torch.Size([4, HIDDEN]), "wider": torch.Size([TOKENS, 8]), "stacked": torch.Size([1, TOKENS, HIDDEN])},
    },
    "te.moe_unpermute index": {
        "inp": {"vector": X.repeat(2, 1)[:, 0]}, "merging_probs": {"vector": PROBS[:, 0], "fewer tokens": PROBS[:4, :2]},
        "row_id_map": {"out of range": OF_INDICES + 99, "negative": OF_INDICES - 99, "short": OF_INDICES[:4], "floats": OF_INDICES.float()},
    },
    "te.moe_sort_chunks_by_index": {"inp": {"vector": X[:, 0], "fewer": X[:4], "none": X[:0]}, "split_sizes": _SIZES, "sorted_index": _ORDERS},
    "te.moe_sort_chunks_by_index_with_probs": {"inp": _TOKENS, "probs": _VECTOR, "split_sizes": _SIZES, "sorted_index": _ORDERS},
    "triton.make_row_id_map": {"routing_map": {"vector": MASK[:, 0], "fewer tokens": MASK[:4]}},
    "triton.permute_with_mask_map": {
        "inp": _TOKENS, "row_id_map": _MAPS, "probs": _PROBS, "scale": {"fewer tokens": torch.ones(4, 2)}, "pad_offsets": _OFFSETS,
    },
    "triton.unpermute_with_mask_map": {
        "inp": {"fewer": PERMUTED[:4]}, "row_id_map": _MAPS, "merging_probs": _PROBS, "permuted_probs": _VECTOR, "pad_offsets": _OFFSETS,
    },
    "triton.unpermute_with_mask_map_bwd_with_merging_probs": {
        "fwd_output_grad": _TOKENS, "row_id_map": _MAPS, "fwd_input": {"fewer": PERMUTED[:4]}, "merging_probs": _PROBS, "pad_offsets": _OFFSETS,
    },
    "triton.make_chunk_sort_map": {"split_sizes": _SIZES, "sorted_indices": _ORDERS},
    "triton.sort_chunks_by_map": {
        "inp": _TOKENS, "probs": _VECTOR,
        "row_id_map": {"repeated": torch.zeros(TOKENS).long(), "out of range": torch.arange(TOKENS) + 1, "negative": torch.arange(TOKENS) - 1,
                       "short": torch.arange(4), "floats": torch.arange(TOKENS).float()},
    },
}  # fmt: skip
"""For each call what is wrong, by argument and kind."""


def _function(call: str) -> Callable[..., Any]:
    space, _, name = call.partition(".")
    return getattr(SPACES[space], name.split()[0])


def _each() -> Iterator[tuple[str, str, str]]:
    for call, arguments in WRONG.items():
        for argument, kinds in arguments.items():
            for kind in kinds:
                yield call, argument, kind


def test_every_function_is_a_case() -> None:
    named = {f"{space}.{name}" for space, module in SPACES.items() for name in module.__all__}
    assert {call.split()[0] for call in CALLS} == named and CALLS.keys() == WRONG.keys()


@pytest.mark.parametrize("call", CALLS)
def test_what_is_right_is_computed(call: str) -> None:
    _function(call)(**CALLS[call])


@pytest.mark.parametrize(("call", "argument", "kind"), list(_each()), ids=" ".join)
def test_what_is_wrong_is_refused_in_a_sentence(call: str, argument: str, kind: str) -> None:
    with pytest.raises(FusibleError) as caught:
        _function(call)(**{**CALLS[call], argument: WRONG[call][argument][kind]})
    text = str(caught.value)
    assert text.count(": expected ") == 1 and "\n" not in text and "as documented" not in text, text


def test_rows_that_belong_to_nobody_are_zeros() -> None:
    """More rows than are routed, in memory that was something else's; and rows beyond the chunks, which stay where they are."""
    spoilt = [torch.full((COUNT + 5, HIDDEN), torch.nan) for _ in range(4)]
    del spoilt
    x = X.clone().requires_grad_()
    permuted, rows = functions.moe_permute(x, MASK, COUNT + 5)
    assert not permuted[COUNT:].any()
    inner = permuted.detach().requires_grad_()
    functions.moe_unpermute(inner, rows, PROBS, X.shape).sum().backward()
    assert inner.grad is not None and not inner.grad[COUNT:].any() and inner.grad.isfinite().all()
    sorted_ = functions.moe_sort_chunks_by_index(X, torch.tensor([2, 3]), torch.tensor([1, 0]))
    assert torch.equal(sorted_, X[[2, 3, 4, 0, 1, 5]])
