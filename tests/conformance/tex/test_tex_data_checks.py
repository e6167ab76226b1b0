"""Scales that are fewer than their blocks, lengths and indices outside of what there is, states of integers: refused, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_tex_pairs import EMPTY, FORMATS, quantizer

from fusible import tex
from fusible.errors import FusibleError

INT32 = torch.int32


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name in ("block", "mxfp8", "nvfp4")])
def test_no_scale_serves_two_blocks(name: str, usage: str) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = tex.quantize(x, quantizer(name))
    scales = getattr(made, f"_{usage}_scale_inv")
    setattr(made, "_columnwise_data" if usage == "rowwise" else "_rowwise_data", None)
    for cut in (scales[:1], scales[:, :1], scales.reshape(-1), scales[:0], None):
        setattr(made, f"_{usage}_scale_inv", cut)
        with pytest.raises(FusibleError, match=f"{usage} scales of a tensor of {name}"):
            tex.dequantize(made, torch.float32)
    setattr(made, f"_{usage}_scale_inv", scales)
    tex.dequantize(made, torch.float32)


WRONG_LENGTHS = [lengths(-1, 4, 8), lengths(0, 5, 3), lengths(0, 4, 99)]
PACKED: dict[str, Any] = {
    "thd_read_half_tensor": lambda cu: tex.thd_read_half_tensor(torch.randn(8, 2), cu, 0),
    "thd_get_partitioned_indices": lambda cu: tex.thd_get_partitioned_indices(cu, 8, 2, 0),
    "thd_sequence_order_to_cp_rank_order": lambda cu: tex.thd_sequence_order_to_cp_rank_order(torch.randn(8, 2), cu, 2, 8),
    "thd_grad_correction": lambda cu: tex.thd_grad_correction(torch.randn(8, 2), torch.randn(8, 2), cu, "add", "copy"),
    "thd_second_half_lse_correction": lambda cu: tex.thd_second_half_lse_correction(torch.randn(2, 8), torch.randn(2, 8), cu, True),
    "convert_thd_to_bshd": lambda cu: tex.convert_thd_to_bshd(torch.randn(8, 2), cu, 2, 8),
    "convert_bshd_to_thd": lambda cu: tex.convert_bshd_to_thd(torch.randn(2, 8, 2), cu, 8),
}


@pytest.mark.parametrize("function", PACKED)
def test_lengths_that_do_not_ascend_or_reach_too_far_are_refused(function: str) -> None:
    with tex.set_backend("torch", strict=True):
        PACKED[function](lengths(0, 4, 8))
        for wrong in [*WRONG_LENGTHS, lengths(0, 4, 8).long(), lengths(0, 4, 8).float(), lengths(0, 4, 8).view(1, 3)]:
            with pytest.raises(FusibleError, match=": expected "):
                PACKED[function](wrong)


def test_experts_and_rows_are_among_those_that_there_are() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(FusibleError, match="indices of moe_permute_fwd: expected .*from 0 on.*, got -7"):
        tex.moe_permute_fwd(x, torch.float32, torch.tensor([[0], [1], [-7], [2]], dtype=INT32), -1, [], -1)
    for wrong in (4, 70000, -2):
        rows = torch.tensor([0, 1, 2, wrong], dtype=INT32)
        with pytest.raises(FusibleError, match=f"row_id_map of moe_unpermute_fwd: expected .*, got {wrong}"):
            tex.moe_unpermute_fwd(x, torch.float32, rows, EMPTY, 4, 1)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_states_of_integers_are_refused(backend: str, place: int) -> None:
    states = [torch.ones(4) for _ in range(4)]
    states[place] = torch.ones(4, dtype=INT32)
    kept = [x.clone() for x in states]
    with tex.set_backend(backend), pytest.raises(FusibleError, match=rf"tensor_lists\[{place}\] of multi_tensor_adam: expected .*, got torch.int32"):
        tex.multi_tensor_adam(1, torch.zeros(1, dtype=INT32), [[x] for x in states], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    assert all(torch.equal(x, y) for x, y in zip(states, kept, strict=True))
