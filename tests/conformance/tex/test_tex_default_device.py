"""Every function gives the same whatever torch's default device is: where results lie follows from the operands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from inspect import BoundArguments
from itertools import islice
from typing import Any

import pytest
import torch
from tex_backends import runners

from fusible import tex
from fusible.conformance.memory import tensors
from fusible.conformance.table import load
from fusible.errors import FusibleError
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

TABLE = load()
SAMPLES = 12
"""Calls of each function and dtype."""
METHODS = {f"{runner.backend}-{name}": (runner.backend, name) for name in TABLE for runner in runners(name) if runner.backend in ("cpu", "torch")}


UNTOLD = frozenset(
    "bulk_allocate create_empty_quantized_tensor prim_empty copy_data_ptrs_to_device swizzle_scales_and_pack_ptrs_for_discrete_weights".split()
)
"""Functions whose results are memory that nobody has written to, or its addresses."""


def bound(name: str, arguments: dict[str, Any]) -> BoundArguments:
    call = BoundArguments(DECLARATIONS[name].signature, OrderedDict(arguments))
    call.apply_defaults()
    return call


def results(backend: str, name: str, arguments: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The tensors that a call returns, and those that it was given and may have written to."""
    torch.manual_seed(0)
    call = bound(name, deepcopy(arguments))
    returned = getattr(registry.find(backend), name)(*call.args, **call.kwargs)
    found = [x for tree in (returned, call.arguments) for _, x in tensors(tree)]
    return [(x.device, x.dtype, x.shape, b"" if name in UNTOLD else bits(x)) for x in found]


def bits(x: torch.Tensor) -> bytes:
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def served(backend: str, name: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The samples that a backend takes, and that are no bad calls."""
    for sample in TABLE[name].samples(dtype):
        call = bound(name, sample.arguments)
        with tex.set_backend(backend, strict=True):
            if tex.explain(name, *call.args, **call.kwargs).backend is None:
                continue
        with suppress(FusibleError):
            results(backend, name, sample.arguments)
            yield sample.arguments


@pytest.mark.parametrize("backend, name", METHODS.values(), ids=METHODS)
def test_a_default_device_changes_nothing(backend: str, name: str) -> None:
    found = 0
    for dtype in TABLE[name].dtypes:
        for arguments in islice(served(backend, name, dtype), SAMPLES):
            wanted = results(backend, name, arguments)
            with torch.device("meta"):
                here = results(backend, name, arguments)
            assert here == wanted
            found += 1
    assert found
