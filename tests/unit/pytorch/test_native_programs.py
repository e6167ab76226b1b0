"""Stretches of native calls: the numbers of the calls one by one, in memory that nothing else lies in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusible
from fusible import tex
from fusible.cpp_extensions import available
from fusible.errors import ArgumentError
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch.engine import native_programs
from fusible.pytorch.engine.native_programs import _arrange, _bytes_of, with_native_programs
from fusible.pytorch.engine.steps import Step, written
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.kernel_calls import Buffer, KernelCall, View, as_data, view_of
from fusible.tex.interface.specialize import specialize
from fusible.tex.selection.registry import registry

pytestmark = pytest.mark.skipif(not available, reason="the native kernels are not built")

RECIPES: dict[str, Any] = {
    "bf16": None,
    "fp8": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "squares": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
    "mxfp4": WEIGHT_FORMATS["mxfp4"],
}


class Plain:
    """Runs every program as it stands."""

    name, whole, in_place = "plain", False, True

    def __call__(self, key: Any, program: Any, inputs: Any) -> Any:
        return program(inputs)


def decoder(recipe: Any) -> fusible.Sequential:
    torch.manual_seed(0)
    blocks = []
    for _ in range(2):
        attention = fusible.GroupedQuerySelfAttention(64, 4, 2, rope_base=1e4)
        blocks.append(fusible.Residual(fusible.RMSNorm(64), fusible.Linear(64, 128, bias=False), attention, fusible.Linear(64, 64, bias=False)))
        up, down = fusible.Linear(64, 256), fusible.Linear(128, 64)
        blocks.append(fusible.Residual(fusible.LayerNorm(64), up, fusible.SwiGLU(), down))
    model = fusible.Sequential(*blocks, fusible.RMSNorm(64)).bfloat16()
    return model if recipe is None else fusible.quantize_parameters(model, recipe=recipe)


def stretches(model: fusible.Sequential) -> int:
    """In how many places of its replays a program stands."""
    replays = [replay for replay in model._runner().executor._replays.values() if replay is not None]  # type: ignore[attr-defined]
    written = [value for replay in replays for value in replay._run_specialized.__globals__.values()]
    return sum(getattr(value, "__module__", "") == native_programs.__name__ for value in written)


@torch.no_grad()
def tokens(model: fusible.Sequential, count: int = 8) -> list[torch.Tensor]:
    cache, one, generator = fusible.KVCache(1, count), torch.tensor([1], dtype=torch.int32), torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(1, 64, generator=generator).bfloat16()
        kept = x.clone()
        found.append(model(x, one, cache))
        cache.advance(one)
        assert torch.equal(x, kept)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_those_of_the_calls_one_by_one(recipe: str) -> None:
    ours, plain = decoder(RECIPES[recipe]), decoder(RECIPES[recipe])
    plain._runner().executor = Plain()
    first, second, wanted = tokens(ours), tokens(ours), tokens(plain)
    assert stretches(ours), "no program was found"
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_are_no_rows(dtype: torch.dtype) -> None:
    model = fusible.Sequential(fusible.LayerNorm(16), fusible.GELU(), fusible.RMSNorm(16), fusible.Linear(16, 8), fusible.SiLU()).to(dtype)
    for _ in range(5):
        x = torch.empty(0, 16, dtype=dtype, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert y.shape == (0, 8) and x.grad is not None and x.grad.shape == (0, 16)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bool, torch.int16, torch.int64])
def test_copies_of_what_kernels_do_not_read_are_torchs(dtype: torch.dtype) -> None:
    x = torch.ones(4, 6, dtype=dtype)
    steps = []
    for target in (1, 2):
        found = specialize(TORCH.prim_copy, (x,))
        steps.append(Step(TORCH.prim_copy, (0,), target) if found is None else Step(found.compute, (0,), target, kernels=found.kernels))
    first, second = written(with_native_programs(steps, (1, 2)), {}, (0,), (1, 2))([x])
    assert torch.equal(first, x) and torch.equal(second, x) and len({t.data_ptr() for t in (x, first, second)}) == 3


def heard(method: Any, args: tuple[Any, ...], places: dict[int, int], target: int, parts: tuple[tuple[str, int], ...] = ()) -> Step:
    """The step of a call; ``places``: where its operands are, by identity."""
    found = specialize(method, args)
    assert found is not None and found.kernels is not None
    return Step(found.compute, tuple(places[id(x)] for x in found.operands), target, parts, kernels=found.kernels)


BACKENDS: dict[str, Any] = {backend.NAME: backend for backend in registry.ordered()}
CPU, TORCH = BACKENDS["cpu"], BACKENDS["torch"]


def pass_of_norm(x: torch.Tensor, gamma: torch.Tensor) -> tuple[list[Step], torch.Tensor]:
    """x is normalized, split, and one half goes through two activations; and what comes of it."""
    y, *_ = CPU.rmsnorm_fwd(x, gamma, 1e-5, None, None, tex.DType.kFloat32, 0, False)
    halves = TORCH.prim_split(y, [4, 4], 0)
    silu = CPU.silu(halves[0], None)
    steps = [
        heard(CPU.rmsnorm_fwd, (x, gamma, 1e-5, None, None, tex.DType.kFloat32, 0, False), {id(x): 0, id(gamma): 1}, 2, (("[0]", 3), ("[2]", 4))),
        heard(TORCH.prim_split, (y, [4, 4], 0), {id(y): 3}, 5, (("[0]", 6), ("[1]", 7))),
        heard(CPU.silu, (halves[0], None), {id(halves[0]): 6}, 8),
        heard(CPU.gelu, (silu, None), {id(silu): 8}, 9),
    ]
    return steps, CPU.gelu(silu, None)


@pytest.mark.parametrize("outputs", [(9,), (9, 4), (9, 8), (9, 6), (9, 7), (9, 3, 7), (9, 5)], ids=str)
def test_whatever_is_read_later_is_there(outputs: tuple[int, ...]) -> None:
    x, gamma = torch.randn(8, 16), torch.randn(16)
    steps, last = pass_of_norm(x, gamma)
    changed = with_native_programs(steps, outputs)
    assert len(changed) < len(steps)
    for values in ((x, gamma), (x * 2 - 1, gamma + 1)):
        found, wanted = (written(of, {}, (0, 1), outputs)(list(values)) for of in (changed, steps))
        flat = [[t for value in values for t in (value if isinstance(value, list) else [value])] for values in (found, wanted)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))
    assert torch.equal(written(changed, {}, (0, 1), outputs)([x, gamma])[0], last)


def test_a_list_that_a_call_gives_is_read_as_a_list() -> None:
    steps, _ = pass_of_norm(torch.randn(8, 16), torch.randn(16))
    assert with_native_programs(steps, (9, 2)) == steps


def test_one_call_alone_stays_as_it_is() -> None:
    steps, _ = pass_of_norm(torch.randn(8, 16), torch.randn(16))
    assert with_native_programs(steps[2:3], (8,)) == steps[2:3]


def test_a_stretch_with_large_results_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = pass_of_norm(torch.randn(8, 16), torch.randn(16))
    sizes = 2 * 8 * 16 * 4 + 64  # three buffers of half a matrix and of a matrix, and rsigma's line
    monkeypatch.setattr(native_programs, "_LARGE", sizes)
    assert len(with_native_programs(steps, (9,))) == 1
    monkeypatch.setattr(native_programs, "_LARGE", sizes - 1)
    assert with_native_programs(steps, (9,)) == steps


def test_what_shares_memory_is_left_to_the_calls_one_by_one() -> None:
    """A step of attention writes to caches; where the query lies in one, its call refuses that."""
    memory = torch.zeros(3 * 8 * 2 * 16).bfloat16()
    keys, values = memory[:256].view(1, 8, 2, 16), memory[256:512].view(1, 8, 2, 16)
    q, k, v = torch.randn(1, 4, 16).bfloat16(), torch.randn(1, 2, 16).bfloat16(), torch.randn(1, 2, 16).bfloat16()
    keys, values = keys.clone(), values.clone()
    lengths, cached, table = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    given = {"q": q, "k": k, "v": v, "k_cache": keys, "v_cache": values, "cu_new_lens": lengths, "cu_cached_lens": cached, "page_table": table}
    parameters = DECLARATIONS["prim_attention_step"].signature.parameters
    given |= {"max_new_len": 1, "scale": 0.25, "window_size": (-1, 0), "angles": None, "start_positions": None, "interleaved": False}
    args = tuple(given.get(name, p.default) for name, p in parameters.items())
    tensors = [q, k, v, keys, values, lengths, cached, table]
    steps = [heard(CPU.prim_attention_step, args, {id(x): place for place, x in enumerate(tensors)}, 8)]
    (program,) = with_native_programs(steps, (8,))
    assert program is not steps[0]

    def run(of: list[Step], values: list[torch.Tensor]) -> list[torch.Tensor]:
        own = [x.clone() for x in values]
        return [*written(of, {}, range(8), (8,))(list(own)), *own]

    assert all(torch.equal(a, b) for a, b in zip(run([program], tensors), run(steps, tensors), strict=True))
    among = [keys.view(-1)[:64].view(1, 4, 16), *tensors[1:]]
    for of in ([program], steps):
        with pytest.raises(ArgumentError):
            written(of, {}, range(8), (8,))(list(among))
    shared = torch.randn(2 * 32).bfloat16()  # k and v in one memory, as what is split has them: only read
    among = [q, shared[:32].view(1, 2, 16), shared[32:].view(1, 2, 16), *tensors[3:]]
    assert torch.equal(run([program], among)[0], run(steps, among)[0])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0, 1, 63, 64, 65, 128, 129, 400])), min_size=1, max_size=12))
def test_buffers_that_are_looked_at_together_are_disjoint(wanted: list[tuple[int, int, int]]) -> None:
    spans = sorted((min(a, b), max(a, b), size) for a, b, size in wanted)
    uses = {Buffer(torch.uint8, (size,)): [first, last] for first, last, size in spans}
    offsets, size = _arrange(uses, ())
    assert set(offsets) == set(uses)
    for buffer, (first, last) in uses.items():
        assert offsets[buffer] % 64 == 0 and offsets[buffer] + buffer.shape[0] <= size
        for other, (begin, end) in uses.items():
            together = other is not buffer and first <= end and begin <= last
            disjoint = offsets[buffer] + buffer.shape[0] <= offsets[other] or offsets[other] + other.shape[0] <= offsets[buffer]
            assert not together or disjoint
    assert size <= sum(map(_bytes_of, uses))


def test_memory_is_shared_by_what_is_looked_at_in_turn() -> None:
    buffers = [Buffer(torch.float32, (16,)) for _ in range(5)]
    _, size = _arrange({buffer: [number, number + 1] for number, buffer in enumerate(buffers)}, ())
    assert size == 2 * 64
    kept, size = _arrange({buffer: [number, number + 1] for number, buffer in enumerate(buffers)}, buffers[1:])
    assert list(kept) == buffers[:1] and size == 64


def test_calls_as_data_keep_no_tensor() -> None:
    x = torch.randn(4, 6)
    y, half = Buffer(x.dtype, (4, 6)), view_of(x, x[:, 3:])
    tensors, kernels = as_data([KernelCall("copy", {"src": half, "dst": y}), KernelCall("copy", {"src": x, "dst": y})], [y, None, x])
    assert len(tensors) == 1 and tensors[0] is x
    part = kernels.calls[0].arguments["src"]
    assert isinstance(part, View) and (part.offset, part.shape, part.strides) == (12, (4, 3), (6, 1))
    assert part.of is kernels.calls[1].arguments["src"] is kernels.result[2] and kernels.result[:2] == [y, None]
    assert not any(isinstance(value, torch.Tensor) for call in kernels.calls for value in call.arguments.values())
