"""Which tensors kernels read where they lie."""

from __future__ import annotations

import pytest
import torch

from fusible.tex.backends.cpu.layouts import as_read


class Named(torch.Tensor):
    pass


READ = {"a tensor": torch.ones(2, 3), "a parameter": torch.nn.Parameter(torch.ones(2)), "none of its elements": torch.ones(0, 3)}
NOT_READ = {
    "on another device": torch.ones(2, 3, device="meta"),
    "strided": torch.ones(3, 2).t(),
    "of a subclass": torch.ones(2).as_subclass(Named),
    "no tensor": [1.0, 2.0],
}


@pytest.mark.parametrize("name", [*READ, *NOT_READ])
def test_what_lies_as_kernels_read_it(name: str) -> None:
    assert as_read({**READ, **NOT_READ}[name]) is (name in READ)
    assert as_read(torch.ones(2), {**READ, **NOT_READ}[name]) is (name in READ)


def test_nothing_lies_as_it_is_read() -> None:
    assert as_read()
