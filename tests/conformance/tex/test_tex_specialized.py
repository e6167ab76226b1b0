"""A specialized call gives, to the bit, what the method gives on any operands that lie so, and keeps none of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from tex_backends import runners

from fusible import tex
from fusible.conformance.memory import tensors
from fusible.conformance.table import load
from fusible.errors import ArgumentError
from fusible.pytorch.engine import native_programs
from fusible.pytorch.engine.native_programs import with_native_programs
from fusible.pytorch.engine.steps import Step, written
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.kernel_calls import Buffer
from fusible.tex.interface.specialize import SpecializedCall, specialize, specialized_by
from fusible.tex.selection.registry import registry

TABLE = load()
METHODS = {
    f"{backend.NAME}-{name}": getattr(backend, name)
    for backend in registry.ordered()
    for name in DECLARATIONS
    if hasattr(getattr(backend, name), "__specialize__") and backend.NAME in {runner.backend for runner in runners(name)}
}


@pytest.fixture(autouse=True)
def single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call, too, a program is made."""
    monkeypatch.setattr(native_programs, "_FEWEST", 1)


UNSPECIALIZED = {"xla"}
"""Backends of tensors that are not torch's own: what they inherit is not asked."""


def positional(function: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments.get(name, p.default) for name, p in DECLARATIONS[function].signature.parameters.items())


E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
HELD: dict[str, tuple[Callable[[], Any] | None, Callable[[], Any] | None]] = {
    "plain": (None, None),
    "weight in FP8": (lambda: Float8CurrentScalingQuantizer(E4M3, columnwise=False), None),
    "both in FP8": (lambda: Float8CurrentScalingQuantizer(E4M3, columnwise=False), lambda: Float8CurrentScalingQuantizer(E5M2, columnwise=False)),
    "weight in MXFP8": (lambda: MXFP8Quantizer(E4M3), None),
    "both in MXFP8": (lambda: MXFP8Quantizer(E4M3), lambda: MXFP8Quantizer(E4M3)),
    "weight in squares": (lambda: Float8BlockQuantizer(E4M3), None),
    "weight in squares, any scale": (lambda: Float8BlockQuantizer(E4M3, force_pow_2_scales=False), None),
    "both in blocks": (lambda: Float8BlockQuantizer(E4M3), lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "weight in NVFP4": (lambda: NVFP4Quantizer(), None),
    "weight in NVFP4 squares": (lambda: NVFP4Quantizer(with_2d_quantization=True), None),
    "both in NVFP4": (lambda: NVFP4Quantizer(), lambda: NVFP4Quantizer()),
}
"""How A and B of a product are held."""
FEWER = (8, 96)
"""Rows of B, and what is contracted where blocks allow it: their scales are padded."""


def products(held: str) -> Iterator[dict[str, Any]]:
    """Calls of ``generic_gemm`` of every kind that a pass makes."""
    make_a, make_b = HELD[held]
    for dtype in (torch.float32, torch.bfloat16):
        for trans_a, trans_b, rows in ((True, False, 128), (False, False, 128), (False, True, 128), (True, False, FEWER[0])):
            generator = torch.Generator().manual_seed(3)
            depth = FEWER[1] if rows == FEWER[0] and "blocks" not in held and "squares" not in held else 128
            a, b = torch.randn(128, depth, generator=generator).to(dtype), torch.randn(rows, depth, generator=generator).to(dtype)
            if make_b is not None and rows % 16:
                continue
            A, B = (x if make is None else tex.quantize(x, make()) for x, make in ((a, make_a), (b, make_b)))
            bias, D = torch.randn(128, generator=generator).to(dtype), torch.randn(rows, 128, generator=generator).to(dtype)
            base = {"A": A, "transA": trans_a, "B": B, "transB": trans_b, "D": None, "quantizer": None, "output_dtype": dtype, "bias": None}
            base |= {"bias_type": None, "gelu": False, "gelu_in": None, "grad": False, "accumulate": False, "workspace": None}
            base |= {"workspace_size": 0, "use_split_accumulator": True}
            yield base
            yield base | {"bias": bias, "bias_type": dtype}
            yield base | {"bias": bias, "bias_type": dtype, "gelu": True}
            yield base | {"grad": True}
            yield base | {"grad": True, "bias": bias, "bias_type": dtype}
            yield base | {"D": D, "accumulate": True}
            yield base | {"D": D, "accumulate": True, "bias": bias, "bias_type": dtype}
            yield base | {"D": D, "accumulate": True, "beta": 0.5}
            yield base | {"D": torch.full_like(D, torch.nan)}


def samples(function: str) -> Iterator[dict[str, Any]]:
    for dtype in TABLE[function].dtypes:
        for sample in TABLE[function].samples(dtype):
            yield sample.arguments


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
        a.dtype is b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(*found, strict=True)
    )


def check(of: str, method: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]] | None:
    """Hold the specialized call against the method: the function, and weak references to the operands that it was made of; None where none is."""
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
        if found.kernels is not None and found.kernels.calls:
            check_as_a_program(of, found, method, values, places)
    return found.compute, [weakref.ref(x) for x in found.operands if isinstance(x, torch.Tensor)]


def check_as_a_program(of: str, found: SpecializedCall, method: Callable[..., Any], args: Any, places: dict[int, Any]) -> None:
    """Hold the kernels' calls against the method: what they make, and what they write."""
    count = len(found.operands)
    assert found.kernels is not None
    result = found.kernels.result
    parts = tuple((f"[{i}]", count + 1 + i) for i, part in enumerate(result) if isinstance(part, Buffer)) if isinstance(result, list) else ()
    step = Step(found.compute, tuple(range(count)), count, parts, kernels=found.kernels)
    outputs = [place for _, place in parts] if isinstance(result, list) else [count]
    program = with_native_programs([step], outputs)
    assert len(program) == 1 and program[0] is not step, f"{of} is no native program"
    wanted, here = deepcopy(args), deepcopy(args)
    by_path = dict(tensors(here))
    made = written(program, {}, range(count), outputs)([by_path[places[id(x)]] for x in found.operands])
    whole = method(*wanted)
    assert equal(made, [whole[place - count - 1] for place in outputs] if isinstance(result, list) else [whole]), f"{of} as a program gives otherwise"
    assert equal(here, wanted), f"{of} as a program writes otherwise"


def tried(of: str, calls: Iterable[dict[str, Any]]) -> int:
    """How many of the calls are specialized, each of which is held against the method."""
    method, count = METHODS[of], 0
    for arguments in calls:
        args = positional(method.__name__, arguments)
        found = check(of, method, args) if served(method, args) else None
        if found is not None:
            count += 1
            compute, operands = found
            assert compute and not any(ref() is not None for ref in operands), f"{of} keeps an operand"
    return count


@pytest.mark.parametrize("of", [name for name in METHODS if name.split("-")[0] not in UNSPECIALIZED])
def test_a_specialized_call_is_the_call(of: str) -> None:
    assert tried(of, samples(METHODS[of].__name__)), f"{of} is specialized in no sample"


@pytest.mark.parametrize("held", HELD)
def test_a_specialized_product_is_the_product(held: str) -> None:
    backends = ("cpu", "torch") if held == "plain" else ("cpu",)
    found = {of: tried(of, products(held)) for of in (f"{backend}-generic_gemm" for backend in backends) if of in METHODS}
    assert all(count >= 20 for count in found.values()), found


def test_a_rule_is_a_function_of_a_method() -> None:
    with pytest.raises(Exception, match="how of specialized_by"):
        specialized_by(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(Exception, match="what specialized_by decorates"):
        specialized_by(lambda self, call: None)(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert specialize(lambda x: x, (1,)) is None


@pytest.mark.skipif("cpu-prim_attention_step" not in METHODS, reason="the native kernels are not built")
def test_a_step_whose_tokens_lie_in_the_cache_is_the_methods() -> None:
    """It is the only kernel that writes to operands which the pass did not make: how tensors lie says nothing of whether they share memory."""
    method = METHODS["cpu-prim_attention_step"]
    for sample in samples("prim_attention_step"):
        args = positional("prim_attention_step", sample)
        found = specialize(method, args) if served(method, args) else None
        if found is not None:
            break
    else:
        pytest.fail("no step is specialized")
    by_name = dict(zip(DECLARATIONS["prim_attention_step"].signature.parameters, args, strict=True))
    q, k, keys, values = (by_name[name] for name in ("q", "k", "k_cache", "v_cache"))
    memory = torch.zeros(keys.numel() + k.numel(), dtype=k.dtype)
    cache, token = memory[: keys.numel()].view(keys.shape), memory[-k.numel() :].view(k.shape)
    cache.copy_(keys)
    token.copy_(k)

    def computed(**others: torch.Tensor) -> torch.Tensor:
        given = {id(by_name[name]): x for name, x in others.items()}
        return found.compute(*(given.get(id(x), x) for x in found.operands))

    wanted, written = method(**{**by_name, "k": token.clone(), "k_cache": (own := cache.clone()), "v_cache": values.clone()}), own
    assert equal(computed(k=token, k_cache=cache, v_cache=values.clone()), wanted) and torch.equal(cache, written)
    for name, x in (("q", q), ("k", k)):  # which a step would write over before it reads them
        among = {"k": token, name: cache.flatten()[: x.numel()].view(x.shape)}
        with pytest.raises(ArgumentError):
            computed(k_cache=cache, v_cache=values.clone(), **among)
