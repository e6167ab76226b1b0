"""A specialized call gives, to the bit, what the method gives on any operands that lie so, and keeps none of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from tex_backends import runners

from fusible import tex
from fusible.conformance.memory import tensors
from fusible.conformance.table import load
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex import DType
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.specialize import specialize, specialized_by
from fusible.tex.selection.registry import registry

TABLE = load()
METHODS = {
    f"{backend.NAME}-{name}": getattr(backend, name)
    for backend in registry.ordered()
    for name in DECLARATIONS
    if hasattr(getattr(backend, name), "__specialize__") and backend.NAME in {runner.backend for runner in runners(name)}
}
UNSPECIALIZED = {"xla"}
"""Backends of tensors that are not torch's own: what they inherit is not asked."""


def positional(function: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments.get(name, p.default) for name, p in DECLARATIONS[function].signature.parameters.items())


def fp8(x: torch.Tensor, kind: DType) -> Any:
    return tex.quantize(x, Float8CurrentScalingQuantizer(kind, columnwise=False))


def products() -> Iterator[dict[str, Any]]:
    """Calls of ``generic_gemm`` of every kind that a pass makes."""
    for dtype in (torch.float32, torch.bfloat16):
        for trans_a, trans_b in ((True, False), (False, False), (False, True)):
            generator = torch.Generator().manual_seed(3)
            a, b = (torch.randn(48, 48, generator=generator).to(dtype) for _ in range(2))
            bias, D = torch.randn(48, generator=generator).to(dtype), torch.randn(48, 48, generator=generator).to(dtype)
            for A, B in ((a, b), (fp8(a, DType.kFloat8E4M3), b), (fp8(a, DType.kFloat8E4M3), fp8(b, DType.kFloat8E5M2))):
                base = {"A": A, "transA": trans_a, "B": B, "transB": trans_b, "D": None, "quantizer": None, "output_dtype": dtype, "bias": None}
                base |= {"bias_type": None, "gelu": False, "gelu_in": None, "grad": False, "accumulate": False, "workspace": None}
                base |= {"workspaceSize": 0, "use_split_accumulator": True}
                yield base
                yield base | {"bias": bias, "bias_type": dtype}
                yield base | {"bias": bias, "bias_type": dtype, "gelu": True}
                yield base | {"grad": True}
                yield base | {"grad": True, "bias": bias, "bias_type": dtype}
                yield base | {"D": D, "accumulate": True}
                yield base | {"D": D, "accumulate": True, "bias": bias, "bias_type": dtype}
                yield base | {"D": D, "accumulate": True, "beta": 0.5}
                yield base | {"D": D}


def samples(function: str) -> Iterator[dict[str, Any]]:
    for dtype in TABLE[function].dtypes:
        for sample in TABLE[function].samples(dtype):
            yield sample.arguments
    if function == "generic_gemm":
        yield from products()


def served(method: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    name = method.__name__
    with tex.set_backend(method.__self__.NAME, strict=True):  # type: ignore[attr-defined]
        return tex.explain(name, *args).backend is not None


def changed(args: Any) -> Any:
    """The same arguments with other values, in other memory, and laid out alike."""
    other = deepcopy(args)
    for _, x in tensors(other):
        if x.is_floating_point():
            x.copy_(x * -0.75)
    return other


def equal(one: Any, other: Any) -> bool:
    found = [[x for _, x in tensors(tree)] for tree in (one, other)]
    return len(found[0]) == len(found[1]) and all(
        a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(*found, strict=True)
    )


def check(of: str, method: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]] | None:
    """Hold the specialized call against the method: the function, and weak references to the operands that it was made of; None where there is none."""
    method(*deepcopy(args))
    own = deepcopy(args)
    found = specialize(method, own)
    if found is None:
        return None
    places = {id(x): path for path, x in tensors(own)}
    for values in (args, changed(args), args):
        wanted, here = deepcopy(values), deepcopy(values)
        by_path = dict(tensors(here))
        operands = [by_path[places[id(x)]] if isinstance(x, torch.Tensor) else x for x in found.operands]
        assert equal(found.compute(*operands), method(*wanted)), f"{of} gives otherwise for {args}"
        assert equal(here, wanted), f"{of} writes otherwise for {args}"
    return found.compute, [weakref.ref(x) for x in found.operands if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("of", [name for name in METHODS if name.split("-")[0] not in UNSPECIALIZED])
def test_a_specialized_call_is_the_call(of: str) -> None:
    method, tried = METHODS[of], 0
    for arguments in samples(method.__name__):
        args = positional(method.__name__, arguments)
        found = check(of, method, args) if served(method, args) else None
        if found is not None:
            tried += 1
            compute, operands = found
            assert compute and not any(ref() is not None for ref in operands), f"{of} keeps an operand"
    assert tried, f"{of} is specialized in no sample"


def test_a_rule_is_a_function_of_a_method() -> None:
    with pytest.raises(Exception, match="how of specialized_by"):
        specialized_by(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(Exception, match="what specialized_by decorates"):
        specialized_by(lambda self, call: None)(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert specialize(lambda x: x, (1,)) is None
