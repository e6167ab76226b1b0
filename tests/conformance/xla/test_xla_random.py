"""The random numbers of stochastic rounding: the same from torch and from a compiled program."""

from __future__ import annotations

import torch
from squares import squares

from fusible import lazy
from fusible.tex.backends.torch_backend.random import uniform
from fusible.tex.backends.xla.random import uniform as lazy_uniform


def test_numbers_of_stochastic_rounding_are_quarters_of_longsquares() -> None:
    quarters = [((word >> shift & 0xFFFF) + 0.5) / 2**16 for word in squares(7, 20, 64) for shift in (0, 16, 32, 48)]
    seed = torch.tensor([7])
    assert uniform(seed, 0, torch.Size([5, 16])).flatten().tolist() == quarters
    assert uniform(seed, 32, torch.Size([16])).tolist() == quarters[32:48]
    assert lazy_uniform(lazy.Tensor(seed.numpy()), lazy.iota((20,), 0, lazy.uint64)).numpy().tolist() == quarters
