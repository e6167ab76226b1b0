"""``cuda_on_cpu`` takes everything back at its end."""

from __future__ import annotations

import pytest
import torch

from fusible.compat import cuda_on_cpu
from fusible.compat.device_map.changes import replacements

PLACES = [(owner, name) for owner, name, _ in replacements((9, 0))]


def held() -> list[object]:
    """What each place holds of its own; None: it inherits."""
    return [vars(owner).get(name) for owner, name in PLACES]


def test_each_place_is_another_within_and_the_same_after() -> None:
    former = held()
    with cuda_on_cpu():
        assert not [place for place, old, new in zip(PLACES, former, held(), strict=True) if old is new]
        assert torch.zeros(1).is_cuda
    assert held() == former and len(former) > 40
    assert not torch.zeros(1).is_cuda and torch.version.cuda is former[PLACES.index((torch.version, "cuda"))]


def test_an_error_takes_it_back_too() -> None:
    former = held()
    with pytest.raises(KeyError), cuda_on_cpu():
        raise KeyError
    assert held() == former and not torch.zeros(1).is_cuda


def test_contexts_nest() -> None:
    former = held()
    with cuda_on_cpu():
        with cuda_on_cpu():
            assert torch.zeros(1, device="cuda").is_cuda
        assert torch.zeros(1, device="cuda").is_cuda
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert held() == former
