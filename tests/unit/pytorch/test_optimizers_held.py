"""FusedAdam whose state is held in few bits: each step is the one in fp32 of the numbers that are held, which are held again."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError, CheckpointError
from fusible.pytorch.optimizer_states import held, held_again, joined, values_of

FP32, BF16, FP16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
MOMENTS = list(itertools.product((FP32, BF16, FP16, E4M3), repeat=2))
MASTERS: dict[str, dict[str, Any]] = {
    "no masters": {},
    "fp32": {"master_weights": True},
    "fp16": {"master_weights": True, "master_weight_dtype": FP16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}
SLOTS = ("exp_avg", "exp_avg_sq", "master_param")
RANGES = {FP16: 32752.0, E4M3: 448.0}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((70, 9), (5,), (), (0, 3))]


def give(parameters: list[nn.Parameter], seed: int, name: str = "grad", dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        setattr(p, name, torch.randn(p.shape, generator=generator).to(dtype or p.dtype))


def fresh(optimizer: fusible.FusedAdam, own: list[nn.Parameter]) -> tuple[fusible.FusedAdam, list[nn.Parameter]]:
    """An optimizer that holds everything in fp32, beside parameters and numbers that are those of ``own``."""
    twins = [nn.Parameter(p.detach().clone()) for p in own]
    masters = any("master_param" in optimizer.state[p] for p in own)
    wide = fusible.FusedAdam(twins, lr=0.01, weight_decay=0.1, master_weights=masters)
    wide.load_state_dict(optimizer.state_dict())
    return wide, twins


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_a_step_is_that_of_fp32_from_what_is_held(moments: tuple[torch.dtype, torch.dtype], masters: str, dtype: torch.dtype) -> None:
    own = parameters(dtype)
    options = {**MASTERS[masters], "exp_avg_dtype": moments[0], "exp_avg_sq_dtype": moments[1]}
    optimizer = fusible.FusedAdam(own, lr=0.01, weight_decay=0.1, **options)
    give(own, 0)
    optimizer.step()
    for step in range(1, 4):
        wide, twins = fresh(optimizer, own)
        for each in (own, twins):
            give(each, step)
        optimizer.step()
        wide.step()
        kinds = dict(zip(SLOTS, (*moments, options.get("master_weight_dtype", FP32)), strict=True))
        for p, twin in zip(own, twins, strict=True):
            splits = masters == "remainders" and dtype is BF16
            # A remainder's parameter is rounded to the nearest with ties away, and so may differ from the rounding to even, in a tie alone.
            assert torch.equal(p, twin) or (splits and torch.equal(p, ((twin_bits(wide, twin) + 0x8000) >> 16).to(torch.int16).view(BF16)))
            for slot, kind in kinds.items():
                if slot not in wide.state[twin]:
                    assert slot not in optimizer.state[p]
                    continue
                value, state = wide.state[twin][slot], optimizer.state[p]
                if slot == "master_param" and splits:
                    assert state[slot].dtype is torch.int16 and torch.equal(joined(p, state[slot]), value)
                    continue
                codes, scale = held(value, kind)
                assert state[slot].dtype is kind and torch.equal(state[slot], codes), (slot, kind)
                own_scale = optimizer._scales.get(p, {}).get(f"{slot}_scale")
                assert (scale is None) == (own_scale is None) and (scale is None or own_scale is None or torch.equal(scale, own_scale))


def twin_bits(wide: fusible.FusedAdam, twin: nn.Parameter) -> torch.Tensor:
    return wide.state[twin]["master_param"].view(torch.int32)


@pytest.mark.parametrize("kind", [FP16, E4M3], ids=str)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-12, 1.0, 1e6, 3e37])
def test_codes_reach_the_end_of_their_range_and_come_back_to_the_bit(kind: torch.dtype, magnitude: float) -> None:
    for seed in range(30):
        values = torch.randn(257, generator=torch.Generator().manual_seed(seed)) * magnitude
        codes, scale = held(values, kind)
        assert scale is not None
        numbers = codes.view(torch.float8_e4m3fn).float() if kind is E4M3 else codes.float()
        if values.abs().max() / RANGES[kind] > 2.0**-126:
            assert numbers.abs().max() == RANGES[kind]
        meant = values_of(codes, scale)
        again, its = held_again(meant, kind)
        assert its is not None and torch.equal(values_of(again, its), meant)


@pytest.mark.parametrize("kind", [FP16, E4M3], ids=str)
def test_nothing_comes_of_nothing(kind: torch.dtype) -> None:
    """A parameter whose gradients are zero stays, and has no NaN in its state."""
    p = nn.Parameter(torch.ones(40))
    optimizer = fusible.FusedAdam([p], lr=0.1, exp_avg_dtype=kind, exp_avg_sq_dtype=kind)
    for _ in range(3):
        p.grad = torch.zeros(40)
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(40))
    assert all(optimizer.get_unscaled_state(p, slot).eq(0).all() for slot in SLOTS[:2])


def test_moments_of_few_bits_take_few_bytes() -> None:
    p = nn.Parameter(torch.randn(1000).to(BF16))
    options = {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": E4M3, "exp_avg_sq_dtype": FP16}
    optimizer = fusible.FusedAdam([p], **options)
    give([p], 0)
    optimizer.step()
    assert sum(x.nbytes for x in [*optimizer.state[p].values(), *optimizer._scales[p].values()]) == 1000 * (1 + 2 + 2) + 2 * 4
    assert {x.shape for x in optimizer.state[p].values()} == {p.shape}, "what asks for every entry of the state gets numbers of the parameter"


def test_gradients_are_read_where_they_are_asked_for() -> None:
    own, twins = parameters(BF16), parameters(BF16)
    decoupled = fusible.FusedAdam(own, lr=0.01, use_decoupled_grad=True)
    plain = fusible.FusedAdam(twins, lr=0.01)
    give(own, 1, "decoupled_grad")
    give(twins, 1)
    for optimizer in (decoupled, plain):
        optimizer.step()
    assert all(map(torch.equal, own, twins))
    decoupled.zero_grad(set_to_none=False)
    assert all(p.decoupled_grad.eq(0).all() for p in own)  # type: ignore[attr-defined]
    decoupled.zero_grad()
    assert all(p.decoupled_grad is None for p in own)  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in own]
    decoupled.step()
    assert all(map(torch.equal, own, before))


def test_a_remainder_is_loaded_beside_its_parameter_alone() -> None:
    own = [nn.Parameter(torch.randn(64).to(BF16))]
    optimizer = fusible.FusedAdam(own, master_weights=True, store_param_remainders=True)
    give(own, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["master_param"].dtype is torch.int16
    twin = [nn.Parameter(own[0].detach().clone())]
    wide = fusible.FusedAdam(twin, master_weights=True)
    wide.load_state_dict(saved)
    assert torch.equal(wide.state[twin[0]]["master_param"], joined(own[0], saved["state"][0]["master_param"]))
    again = fusible.FusedAdam(twin, master_weights=True, store_param_remainders=True)
    again.load_state_dict(wide.state_dict())
    assert torch.equal(again.state[twin[0]]["master_param"], saved["state"][0]["master_param"])
    for other, message in ((torch.randn(64).to(FP16), "expected fp32, .*remainder of a bf16"), (torch.randn(64).to(BF16), "round to the parameter")):
        wrong = fusible.FusedAdam([nn.Parameter(other)], master_weights=True, store_param_remainders=True)
        with pytest.raises(CheckpointError, match=message):
            wrong.load_state_dict(saved if other.dtype is FP16 else wide.state_dict())
        assert not wrong.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exp_avg_dtype": torch.int8}, "exp_avg_dtype of FusedAdam: expected .*torch.uint8, got torch.int8"),
        ({"exp_avg_sq_dtype": torch.float64}, "exp_avg_sq_dtype of FusedAdam: expected"),
        ({"master_weight_dtype": BF16}, "master_weight_dtype of FusedAdam: expected torch.float32 or torch.float16"),
        ({"master_weight_dtype": FP16, "store_param_remainders": True}, "with store_param_remainders: expected torch.float32"),
        ({"exp_avg_dtype": E4M3, "executor": "xla"}, "executor of FusedAdam .*: expected 'eager'"),
    ],
)
def test_what_cannot_be_held_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fusible.FusedAdam(parameters(BF16), **options)


def test_states_are_read_and_set_by_name() -> None:
    own = parameters(BF16)[:1]
    optimizer = fusible.FusedAdam(own, master_weights=True, exp_avg_dtype=E4M3, exp_avg_sq_dtype=FP16)
    with pytest.raises(ArgumentError, match="state_name .*: expected a state that the parameter has"):
        optimizer.get_unscaled_state(own[0], "exp_avg")
    give(own, 0)
    optimizer.step()
    values = torch.randn(own[0].shape)
    optimizer.set_scaled_state(own[0], "exp_avg", values)
    codes, scale = held(values, E4M3)
    assert torch.equal(optimizer.get_unscaled_state(own[0], "exp_avg"), values_of(codes, scale))
    for name, value, message in (
        ("exp", values, "expected exp_avg, exp_avg_sq, master_param"),
        ("exp_avg", values[:2], r"exp_avg .*: expected \[70, 9\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            optimizer.set_scaled_state(own[0], name, value)
    with pytest.raises(ArgumentError, match="expected 'eager'"):
        optimizer.compile("xla")
