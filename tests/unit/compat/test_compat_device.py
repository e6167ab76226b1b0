"""Within ``cuda_on_cpu`` a program's requests for a GPU are served by the host, and without it nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fusible.compat import cuda_on_cpu
from fusible.errors import ArgumentError, NotServedError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "zeros": lambda on: torch.zeros(2, device=on),
    "tensor": lambda on: torch.tensor([1.0], device=on),
    "arange": lambda on: torch.arange(3, device=on),
    "randn": lambda on: torch.randn(2, device=on),
    "empty_like": lambda on: torch.empty_like(torch.zeros(2), device=on),
    "new_zeros": lambda on: torch.zeros(1).new_zeros(2, device=on),
    "range": lambda on: torch.range(0, 1, device=on),
    "to": lambda on: torch.zeros(2).to(on),
    "to by name": lambda on: torch.zeros(2).to(device=on, dtype=torch.bfloat16),
    "to with a dtype": lambda on: torch.zeros(2).to(on, torch.bfloat16, non_blocking=True),
    "cuda": lambda on: torch.zeros(2).cuda(on),
    "module": lambda on: torch.nn.Linear(2, 2, device=on).weight,
    "module.to": lambda on: torch.nn.Linear(2, 2).to(on).weight,
    "module.cuda": lambda on: torch.nn.Linear(2, 2).cuda(on).weight,
    "pinned": lambda on: torch.zeros(2, pin_memory=True).pin_memory().to(on, non_blocking=True),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("on", ["cuda", "cuda:0", 0, torch.device("cuda", 1)], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_tensors_for_cuda_are_made_on_the_host(make: Callable[[Any], torch.Tensor], on: Any) -> None:
    made = make(on)
    assert made.device == CPU and made.is_cuda


def test_devices_are_the_hosts_and_others_are_left() -> None:
    assert torch.device("cuda") == torch.device("cuda", 0) == CPU
    meta = torch.zeros(2, device="meta")
    assert meta.device.type == "meta" and not meta.is_cuda
    with torch.device("cuda"):
        assert torch.zeros(2).device == CPU
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device == CPU
    finally:
        torch.set_default_device(None)


def test_a_dtype_or_a_tensor_as_a_target_is_left() -> None:
    x = torch.zeros(2)
    assert x.to(torch.bfloat16).dtype is torch.bfloat16
    assert x.to(torch.zeros(1, dtype=torch.float64)).dtype is torch.float64


def test_torch_cuda_answers() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.is_bf16_supported() and not torch.cuda.is_current_stream_capturing()
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == (9, 0) and properties.total_memory == torch.cuda.mem_get_info()[1] > 0
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    assert float(torch.version.cuda or 0) >= 12.9
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()


_ACCELERATOR = {name: getattr(torch.accelerator, name) for name in torch.accelerator.__all__}


@pytest.mark.parametrize("name", _ACCELERATOR)
def test_every_function_of_the_accelerator_is_answered(name: str) -> None:
    """A build of torch for CUDA asks the driver otherwise, which most machines lack."""
    answer = getattr(torch.accelerator, name)
    assert answer is not _ACCELERATOR[name]
    if name == "Graph":
        with pytest.raises(NotServedError, match=r"torch.accelerator.Graph: expected a GPU, got the CPU in its place; run the steps eagerly\."):
            answer()
    elif name == "set_stream":
        assert answer(torch.cuda.default_stream()) is None
    elif name.startswith("set_"):
        assert answer(0) is None
    elif name == "device_index":
        with answer(0):
            pass
    else:
        answer()


def test_the_accelerator_is_the_one_of_torch_cuda() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == torch.cuda.device_count() and torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream() is torch.cuda.current_stream() and not torch.accelerator.current_stream().is_capturing()
    assert torch.float8_e4m3fn in torch.accelerator.get_device_capability()["supported_dtypes"]
    assert torch.accelerator.get_memory_info()[1] == torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_pins_its_batches_gives_them(workers: int) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    context = "fork" if workers else None
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers, multiprocessing_context=context)
    assert torch.equal(torch.cat([batch for (batch,) in loader]), torch.arange(6.0))


@pytest.mark.parametrize("capturable", [False, True])
def test_optimizers_that_look_at_the_accelerator_step(capturable: bool) -> None:
    layer = torch.nn.Linear(4, 1, device="cuda")
    former = layer.weight.detach().clone()
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=capturable).step()
    assert not torch.equal(layer.weight, former)


def test_streams_and_events_are_there() -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        torch.zeros(2).record_stream(stream)
        stream.wait_event(start)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0 and stream.query() and end.query()


def test_the_devices_generator_is_the_hosts() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2, device="cuda")
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(2), first) and torch.cuda.initial_seed() == 3
    torch.cuda.set_rng_state(state)
    with torch.random.fork_rng(devices=[0]):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2), first)
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert torch.equal(torch.rand(2, generator=generator, device="cuda"), first)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), (None, torch.float16)])
def test_autocast_of_cuda_is_autocast(dtype: torch.dtype | None, expected: torch.dtype) -> None:
    layer, x = torch.nn.Linear(4, 4, device="cuda"), torch.randn(2, 4, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is expected
        assert layer(x).dtype is expected
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype is torch.float32
        assert layer(x).dtype is expected
    assert layer(x).dtype is torch.float32 and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        assert grads[0].is_cuda
        return grads[0] * torch.full((1,), 2.0, device="cuda")


@pytest.mark.parametrize("backward", ["tensor", "function", "grad"])
def test_a_backward_pass_is_served_too(backward: str) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = _Custom.apply(x).sum()
    if backward == "tensor":
        y.backward()
    elif backward == "function":
        torch.autograd.backward(y)
    grad = torch.autograd.grad(y, x)[0] if backward == "grad" else x.grad
    assert torch.equal(grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(("name", "device_types"), [("any", None), ("cuda", "cuda"), ("both", ("cuda", "cpu"))])
def test_a_custom_operator_is_served_too(name: str, device_types: Any) -> None:
    @torch.library.custom_op(f"fusible_test_compat::twice_{name}", mutates_args=(), device_types=device_types)
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x * torch.full((1,), 2.0, device="cuda")

    assert torch.equal(twice(torch.ones(2, device="cuda")), torch.full((2,), 2.0))


def test_an_operator_keeps_the_kernel_that_it_has_for_the_host() -> None:
    @torch.library.custom_op("fusible_test_compat::where", mutates_args=(), device_types="cpu")
    def where(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @where.register_kernel("cuda")
    def _(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    assert where(torch.zeros(1)).item() == 1


@pytest.mark.parametrize("written_from", ["cpu", "cuda:0"])
def test_checkpoints_are_loaded_onto_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_from: str) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: written_from)
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    for where in ("cuda", torch.device("cuda:0"), "cpu", None, {"cuda:0": "cuda:1"}, lambda storage, location: storage):
        assert torch.load(tmp_path / "a.pt", map_location=where)["a"].device == CPU
    assert torch.equal(torch.load(tmp_path / "a.pt", "cuda")["a"], torch.ones(2))
    assert torch.load(tmp_path / "a.pt", map_location="meta")["a"].device.type == "meta"


def test_loss_scaling_and_fused_optimizers_run() -> None:
    layer = torch.nn.Linear(4, 1, device="cuda")
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cuda")
    former = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(2, 4, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight, former)


def test_triton_is_told_to_interpret() -> None:
    triton = pytest.importorskip("triton")
    assert triton.knobs.runtime.interpret


def test_a_kernel_of_triton_is_run_and_not_timed() -> None:
    triton = pytest.importorskip("triton")
    tuned = triton.runtime.Autotuner.__new__(triton.runtime.Autotuner)
    tuned.configs, tuned.early_config_prune, tuned.perf_model = [triton.Config({"BLOCK": size}) for size in (4, 8)], None, None
    assert [config.kwargs for config in tuned.prune_configs({})] == [{"BLOCK": 8}]
    assert tuned._bench(config=tuned.configs[1]) == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def older() -> Iterator[ThreadPoolExecutor]:
    """A thread that was there before the map."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


def test_threads_that_are_started_within_are_served_and_no_others(older: ThreadPoolExecutor, gpu: None) -> None:
    def look() -> bool:
        return torch.zeros(1).is_cuda

    with ThreadPoolExecutor(1) as newer:
        assert newer.submit(look).result() and not older.submit(look).result()


@pytest.mark.parametrize("capability", [9, "9.0", (9,), (9, 0.0), (9, True), (-1, 0), None], ids=str)
def test_a_capability_is_two_whole_numbers(capability: Any) -> None:
    with pytest.raises(ArgumentError, match=r"capability of cuda_on_cpu: expected \(major, minor\), got .*; pass \(9, 0\) or \(10, 0\)\."):
        with cuda_on_cpu(capability):
            pass


def test_autocast_of_either_device_is_that_of_both() -> None:
    """A program that asks a tensor for its device is told of the CPU, and means what it calls CUDA."""
    with torch.autocast(torch.zeros(1, device="cuda").device.type, dtype=torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled()


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_class_of_a_tensor_is_the_devices() -> None:
    x = torch.zeros(2, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor" and x.get_device() == torch.get_device(x) == 0
    for half in ("torch.cuda.HalfTensor", torch.cuda.HalfTensor, torch.float16):
        assert x.type(half).dtype is torch.float16
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
    assert torch.zeros(1, device="meta").get_device() == -1
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        assert torch.zeros(1).dtype is torch.float64
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)


def test_a_stream_is_the_current_one_within_its_context() -> None:
    stream, default = torch.cuda.Stream(), torch.cuda.default_stream()
    assert torch.cuda.current_stream() is default and default.cuda_stream == 0 != stream.cuda_stream
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is torch.accelerator.current_stream() is stream
        with torch.cuda.stream(None), default:
            assert torch.cuda.current_stream() is default
        assert torch.cuda.current_stream() is stream
    assert torch.cuda.current_stream() is default
    with pytest.raises(ArgumentError, match=r"the stream to choose: expected a torch.cuda.Stream, got 0; make one by torch.cuda.Stream\(\)\."):
        torch.cuda.set_stream(0)


def test_the_most_memory_is_that_since_it_was_asked_to_begin_anew() -> None:
    torch.ones(2**25)
    before = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() <= before
    stats = torch.cuda.memory_stats()
    assert 0 < stats["allocated_bytes.all.current"] <= stats["allocated_bytes.all.peak"] and stats["num_ooms"] == 0
    assert torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["peak"] > 0


def _compiled(program: Callable[[torch.Tensor], torch.Tensor], backend: str) -> list[float]:
    torch._dynamo.reset()
    try:
        return torch.compile(program, backend=backend, fullgraph=True)(torch.ones(2)).tolist()
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_program_is_compiled_for_the_host(backend: str) -> None:
    """Where torch was built for CUDA and there is no driver too; a tensor says of its device what it says when nothing is compiled."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * (2 if x.is_cuda else 3) + torch.ones(2, device="cuda") + torch.zeros(2, device=torch.device("cuda", 0))

    assert _compiled(program, backend) == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_program_that_is_compiled_elsewhere_is_left(older: ThreadPoolExecutor, gpu: None) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.is_cuda else 3)

    assert _compiled(program, "eager") == [2.0, 2.0]
    assert older.submit(_compiled, program, "eager").result() == [3.0, 3.0]
