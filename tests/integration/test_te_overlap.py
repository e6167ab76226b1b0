"""Overlap of communication with products by NVIDIA's names: a warning, once, and the same results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fusible.compat import te_functions, te_modules, te_overlap
from fusible.compat.te_modules.parallel import OVERLAP, refuse_delay
from fusible.errors import ArgumentError, DTypeError, NotServedError


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    te_overlap.warn_of_no_overlap.cache_clear()
    yield
    te_overlap.warn_of_no_overlap.cache_clear()


def told() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te_functions.initialize_ub([32, 32], 1, quantization_modes=[te_functions.UserBufferQuantizationMode.NONE])
        te_functions.initialize_ub([32, 32], 1, ub_cfgs={"qkv_fprop": {"method": "pipeline"}})
        layers = [SimpleNamespace(sequence_parallel=parallel) for parallel in (False, True)]
        for layer in layers:
            refuse_delay(layer, {"delay_wgrad_compute": False, **dict.fromkeys(OVERLAP, True)})
        te_functions.destroy_ub()
    return [str(warning.message) for warning in caught]


def test_a_process_is_told_once_that_nothing_overlaps() -> None:
    first, again = told(), told()
    assert len(first) == 1 and "the same results" in first[0] and not again


def test_a_layer_that_does_not_communicate_is_silent_and_one_that_does_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        plain = te_modules.Linear(8, 8, device="cpu")
        asked = te_modules.Linear(8, 8, device="cpu", ub_overlap_ag=True, ub_name="qkv")
        with pytest.raises(RuntimeWarning, match="one after the other"):
            te_modules.Linear(8, 8, device="cpu", ub_overlap_ag=True, ub_name="qkv", tp_size=2, sequence_parallel=True, parallel_mode="column")
    asked.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(asked(x), plain(x))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(DTypeError, match=r"quantization_modes of initialize_ub: expected a list of UserBufferQuantizationMode, got \['fp8'\]"):
        te_functions.initialize_ub([4, 4], 1, quantization_modes=["fp8"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="ub_cfgs of initialize_ub: expected 1, got 2"):
        te_functions.initialize_ub([4, 4], 1, ub_cfgs=[{}, {}])
    with pytest.raises(NotServedError, match="delay_wgrad_compute=False"):
        te_modules.Linear(8, 8, device="cpu", delay_wgrad_compute=True)
