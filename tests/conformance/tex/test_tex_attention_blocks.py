"""Problems that are computed in several blocks of queries, biases of every shape, and what is held meanwhile."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import test_tex_attention
import torch
from tex_attention import B, L, M, Problem, S, backward, forward, join, tensors
from tex_backends import Runner, on_backends
from torch.utils._python_dispatch import TorchDispatchMode

from fusible.conformance.table import close
from fusible.errors import ShapeError

pytestmark = on_backends("fused_attn_fwd", "fused_attn_bwd")

LONG = {"width": 4, "width_v": 4, "lengths_q": (23, 9), "lengths_kv": (30, 17)}
EQUAL = {"width": 4, "width_v": 4, "lengths_q": (24, 24), "lengths_kv": (24, 24)}
PROBLEMS = {
    "plain": Problem(**EQUAL),
    "bf16": Problem(dtype=torch.bfloat16, mask=M.NVTE_CAUSAL_MASK, groups=2, **EQUAL),
    "padding bottom right": Problem(mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, groups=1, **LONG),
    "thd": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, gap=3, **LONG),
    "thd of equal lengths": Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, **EQUAL),
    "window and dropout": Problem(window=(3, 2), bottom_right_diagonal=True, dropout=0.4, mask=M.NVTE_PADDING_MASK, groups=2, **LONG),
    "learnable with a bias": Problem(softmax=S.NVTE_LEARNABLE_SOFTMAX, bias_type=B.NVTE_POST_SCALE_BIAS, mask=M.NVTE_CAUSAL_MASK, **EQUAL),
    "pre-scale bias per sequence": Problem(bias_type=B.NVTE_PRE_SCALE_BIAS, options={"bias_batch": 2}, mask=M.NVTE_PADDING_MASK, **LONG),
    "pre-scale bias of thd": Problem(bias_type=B.NVTE_PRE_SCALE_BIAS, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, **LONG),
    "alibi": Problem(bias_type=B.NVTE_ALIBI, bottom_right_diagonal=True, heads=3, groups=3, layout=L.NVTE_SBHD_SBHD_SBHD, **EQUAL),
    "alibi of thd": Problem(bias_type=B.NVTE_ALIBI, bottom_right_diagonal=True, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, **LONG),
    "gradients of another order, packed": Problem(options={"dqkv_layout": L.NVTE_SBH3D}, layout=L.NVTE_BSHD_BSHD_BSHD, **EQUAL),
    "no keys, off by one": Problem(
        softmax=S.NVTE_OFF_BY_ONE_SOFTMAX, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, lengths_q=(3, 2), lengths_kv=(0, 4)
    ),
    **{
        f"bias {shape}": Problem(bias_type=B.NVTE_POST_SCALE_BIAS, options={"bias_shape": shape}, **EQUAL)
        for shape in ((2, 4, 24, 24), (2, 1, 24, 24), (1, 1, 24, 24), (1, 4, 1, 24), (1, 1, 1, 24))
    },
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks_of_queries_give_what_all_at_once_do(runner: Runner, name: str) -> None:
    test_tex_attention.test_forward_and_backward(runner, PROBLEMS[name])


def test_an_offset_given_to_a_softmax_off_by_one_is_handed_on_and_read_as_zero(runner: Runner) -> None:
    problem = Problem(softmax=S.NVTE_OFF_BY_ONE_SOFTMAX)
    given = tensors(problem)
    learnable = Problem(softmax=S.NVTE_LEARNABLE_SOFTMAX)
    zeros = torch.zeros(1, 4, 1, 1)
    o, stats, rng_state, offset = forward(runner, problem, given, SoftmaxOffset=zeros)
    expected = forward(runner, learnable, given, SoftmaxOffset=zeros)
    assert offset is zeros and torch.equal(o, expected[0]) and torch.equal(stats, expected[1])
    got = backward(runner, problem, given, o, o, [stats, rng_state, offset])
    wanted = backward(runner, learnable, given, o, o, expected[1:])
    assert all(torch.equal(a, b) for a, b in zip(got[:3], wanted[:3], strict=True)) and torch.equal(got[4], wanted[4])
    assert backward(runner, problem, given, o, o, [stats, rng_state])[4] is None


def test_the_largest_scores_of_thd_rows_of_no_sequence_are_not_seen_by_a_maximum(runner: Runner) -> None:
    problem = Problem(layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_MASK, gap=2, lengths_q=(3, 2), lengths_kv=(3, 4))
    drawn = tensors(problem)
    q, k = [x.abs() for x in drawn.q], [-x.abs() for x in drawn.k]  # so every score is below the 0 of an empty row
    given = replace(drawn, q=q, k=k, packed=(join(q, "THD", problem.gap), join(k, "THD", problem.gap), drawn.packed[2]))
    largest = forward(runner, problem, given, return_max_logit=True)[2]
    scores = [problem.scale * torch.einsum("ihd,jhd->hij", q.double(), k.double()) for q, k in zip(given.q, given.k, strict=True)]
    close(largest.amax((0, 2)), torch.stack([x.amax((1, 2)) for x in scores]).amax(0), torch.float32, 8, 8.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"Bias": torch.zeros(1, 3, 5, 5), "bias_type": B.NVTE_POST_SCALE_BIAS},
        {"Bias": torch.zeros(1, 4, 4, 5), "bias_type": B.NVTE_POST_SCALE_BIAS},
        {"Bias": torch.zeros(4, 5, 5), "bias_type": B.NVTE_PRE_SCALE_BIAS},
        {"SoftmaxOffset": torch.zeros(1, 3, 1, 1), "softmax_type": S.NVTE_LEARNABLE_SOFTMAX},
        {"K": torch.zeros(1, 5, 4, 8), "V": torch.zeros(1, 5, 4, 8)},
    ],
)
def test_side_inputs_and_batches_that_do_not_fit_are_refused(runner: Runner, changes: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        forward(runner, Problem(), tensors(Problem()), **changes)


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors made while it is on, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.storages or not size:
            return
        self.storages.add(place)
        self.now += size
        self.most = max(self.most, self.now)

        def drop() -> None:
            self.storages.discard(place)
            self.now -= size

        weakref.finalize(storage, drop)


MEMORY = {
    "plain": Problem(),
    "causal bf16": Problem(dtype=torch.bfloat16, mask=M.NVTE_CAUSAL_MASK, groups=2),
    "dropout": Problem(dropout=0.2, mask=M.NVTE_PADDING_MASK),
    "thd dropout alibi": Problem(dropout=0.2, layout=L.NVTE_THD_THD_THD, mask=M.NVTE_PADDING_CAUSAL_MASK, bias_type=B.NVTE_ALIBI, window=(50, 0)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_no_more_than_three_times_inputs_and_outputs_is_held(runner: Runner, name: str) -> None:
    """Counted in fp32; the scores alone are 8 times as many as all inputs and outputs."""
    if runner.backend != "torch":
        pytest.skip("its kernels hold memory that torch does not see")
    problem = replace(MEMORY[name], lengths_q=(512, 512), lengths_kv=(512, 512), heads=4, width=16, width_v=16)
    given = tensors(problem)
    inputs = 4 * sum(x.numel() for x in given.packed)
    with Held() as held:
        o, *aux = forward(runner, problem, given)
    assert held.most <= 3 * (inputs + 4 * (o.numel() + aux[0].numel())), held.most / (inputs + 4 * o.numel())
    with Held() as held:
        grads = backward(runner, problem, given, o, o, aux)
    assert held.most <= 3 * (2 * inputs + 4 * (2 * o.numel() + aux[0].numel())), held.most / (2 * inputs + 8 * o.numel())
    del grads
