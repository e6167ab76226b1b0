"""Every public name of ``torch.cuda`` and every function of torch that takes a device, within ``cuda_on_cpu``: answered, refused with a reason, or on
a list."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from fusible.compat import cuda_on_cpu
from fusible.compat.device_map.cuda import LEFT, REFUSED
from fusible.errors import NotServedError

CPU = torch.device("cpu")


def _names() -> dict[str, Any]:
    """Each public name, and what it is without the map. Those of modules whose like is in ``torch.cuda`` too are the same."""
    found = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
    for place in pkgutil.iter_modules(torch.cuda.__path__):
        if not place.name.startswith("_"):
            module = importlib.import_module(f"torch.cuda.{place.name}")
            found |= {f"{place.name}.{name}": getattr(module, name) for name in getattr(module, "__all__", ())}
    return found


NAMES = _names()


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def _now(name: str) -> Any:
    inner, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"torch.cuda.{inner}" if inner else "torch.cuda"), last)


def _is_refused(name: str) -> bool:
    return name in REFUSED or name.rpartition(".")[2] in REFUSED


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "can_device_access_peer": lambda: (0, 1),
    "check_error": lambda: (0,),
    "device": lambda: (0,),
    "device_of": lambda: (torch.zeros(1),),
    "make_graphed_callables": lambda: (torch.nn.Linear(1, 1), (torch.zeros(1, 1),)),
    "manual_seed": lambda: (1,),
    "manual_seed_all": lambda: (1,),
    "set_device": lambda: (0,),
    "set_per_process_memory_fraction": lambda: (0.5,),
    "set_rng_state": lambda: (torch.default_generator.get_state(),),
    "set_rng_state_all": lambda: ([torch.default_generator.get_state()],),
    "set_stream": lambda: (torch.cuda.default_stream(),),
    "set_sync_debug_mode": lambda: ("warn",),
    "stream": lambda: (torch.cuda.default_stream(),),
    "StreamContext": lambda: (torch.cuda.default_stream(),),
    "caching_allocator_enable": lambda: (True,),
    "nvtx.mark": lambda: ("a",),
    "nvtx.range": lambda: ("a {}", 1),
    "nvtx.range_push": lambda: ("a",),
    "nvtx.range_start": lambda: ("a",),
    "nvtx.range_end": lambda: (0,),
    "tunable.enable": lambda: (False,),
    "tunable.set_filename": lambda: ("a.csv",),
    **{
        f"tunable.set_{name}": lambda: (1,)
        for name in ("max_tuning_duration", "max_tuning_iterations", "rotating_buffer_size", "cublaslt_requested_algo_count")
    },
    "graph_annotations.mark_kernels": lambda: ("a",),
    "tunable.set_numerical_check_tolerances": lambda: (True,),
}
"""What answered functions are called with, those of no arguments apart."""

LATER = {name for name in (*LEFT, *REFUSED) if name.startswith(("graph_annotations", "graphs.", "register_graph_", "export_"))} | {
    "green_contexts.SMPartition", "tunable.get_cublaslt_requested_algo_count",
}  # fmt: skip
"""Names of torch 2.15 that older versions lack."""


def test_each_name_is_answered_refused_or_listed() -> None:
    same = {name for name, value in NAMES.items() if _now(name) is value}
    print(*(f"torch.cuda.{name}: {LEFT.get(name, 'NOT ON THE LIST')}" for name in sorted(same)), sep="\n")
    assert same <= LEFT.keys(), same - LEFT.keys()
    assert not {name for name in (*LEFT, *REFUSED) if name not in NAMES} - LATER, "no name of this torch"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LEFT and not _is_refused(name)])
def test_what_is_answered_takes_what_torchs_takes(name: str) -> None:
    """As a function of the host's: no driver is asked, and the parameters that torch's function has are taken by position and by name."""
    answer, state = _now(name), torch.default_generator.get_state()
    if isinstance(answer, tuple):
        assert answer == (torch.default_generator,)
    elif inspect.isclass(answer) and answer.__module__ == "torch":
        assert answer.__name__ == name.rpartition(".")[2]
    elif inspect.isclass(answer) and issubclass(answer, torch.storage._LegacyStorage):
        assert answer().device == CPU
    elif not isinstance(answer, type(torch.FloatTensor)):
        key = name if name in ARGUMENTS else name.rpartition(".")[2]
        result = answer(*ARGUMENTS.get(key, tuple)())
        if isinstance(result, AbstractContextManager):
            with result:
                pass
        for optional in _optional(NAMES[name]):
            answer(*ARGUMENTS.get(key, tuple)(), **{optional.name: optional.default})
    torch.default_generator.set_state(state)


def _optional(function: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a class of C's
        return []
    return [p for p in parameters if p.default is not p.empty]


@pytest.mark.parametrize("name", [name for name in NAMES if _is_refused(name)])
def test_what_is_refused_says_why(name: str) -> None:
    of = name if name in REFUSED else name.rpartition(".")[2]
    with pytest.raises(NotServedError) as refusal:
        _now(name)(1, 2)
    assert str(refusal.value) == f"torch.cuda.{of}: expected a GPU, got the CPU in its place; {REFUSED[of]}."
    assert getattr(_now(name), "__wrapped__", None) is getattr(NAMES[name], "__wrapped__", None)  # by which torch's compiler tells functions


X = torch.arange(4.0).reshape(2, 2)
_ROWS, _COLUMNS, _VALUES = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
_BLOCKS = torch.ones(2, 1, 1)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Generator": lambda on: torch.Generator(device=on),
    "arange": lambda on: torch.arange(3, device=on),
    "as_tensor": lambda on: torch.as_tensor([1.0], device=on),
    **{name: lambda on, name=name: getattr(torch, name)(3, device=on)
       for name in ("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "eye", "randperm")},
    **{name: lambda on, name=name: getattr(torch, name)((2, 2), device=on) for name in ("empty", "ones", "rand", "randn", "zeros")},
    **{name: lambda on, name=name: getattr(torch, name)(X, device=on)
       for name in ("empty_like", "ones_like", "rand_like", "randn_like", "zeros_like")},
    "empty_permuted": lambda on: torch.empty_permuted((2, 2), (1, 0), device=on),
    "empty_quantized": lambda on: torch.empty_quantized((2,), torch.quantize_per_tensor(X, 1.0, 0, torch.qint8), device=on),
    "empty_strided": lambda on: torch.empty_strided((2, 2), (1, 2), device=on),
    "fft_fftfreq": lambda on: torch.fft.fftfreq(3, device=on),
    "fft_rfftfreq": lambda on: torch.fft.rfftfreq(3, device=on),
    "full": lambda on: torch.full((2,), 1.0, device=on),
    "full_like": lambda on: torch.full_like(X, 1.0, device=on),
    "linspace": lambda on: torch.linspace(0, 1, 3, device=on),
    "logspace": lambda on: torch.logspace(0, 1, 3, device=on),
    **{name: lambda on, name=name: getattr(X, name)((2,), device=on) for name in ("new_empty", "new_ones", "new_zeros")},
    "new_empty_strided": lambda on: X.new_empty_strided((2, 2), (1, 2), device=on),
    "new_full": lambda on: X.new_full((2,), 1.0, device=on),
    "new_tensor": lambda on: X.new_tensor([1.0], device=on),
    "normal": lambda on: torch.normal(0.0, 1.0, (2,), device=on),
    "pin_memory": lambda on: torch.zeros(2, device=on).pin_memory(),
    "randint": lambda on: torch.randint(3, (2,), device=on),
    "randint_like": lambda on: torch.randint_like(X, 3, device=on),
    "range": lambda on: torch.range(0, 1, device=on),
    "scalar_tensor": lambda on: torch.scalar_tensor(1.0, device=on),
    "sparse_bsc_tensor": lambda on: torch.sparse_bsc_tensor(_ROWS, _COLUMNS, _BLOCKS, (2, 2), device=on),
    "sparse_bsr_tensor": lambda on: torch.sparse_bsr_tensor(_ROWS, _COLUMNS, _BLOCKS, (2, 2), device=on),
    "sparse_compressed_tensor": lambda on: torch.sparse_compressed_tensor(_ROWS, _COLUMNS, _VALUES, (2, 2), layout=torch.sparse_csr, device=on),
    "sparse_coo_tensor": lambda on: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), _VALUES, (2, 2), device=on),
    "sparse_csc_tensor": lambda on: torch.sparse_csc_tensor(_ROWS, _COLUMNS, _VALUES, (2, 2), device=on),
    "sparse_csr_tensor": lambda on: torch.sparse_csr_tensor(_ROWS, _COLUMNS, _VALUES, (2, 2), device=on),
    "tensor": lambda on: torch.tensor([1.0], device=on),
    "to": lambda on: X.to(device=on),
    "tril_indices": lambda on: torch.tril_indices(2, 2, device=on),
    "triu_indices": lambda on: torch.triu_indices(2, 2, device=on),
}  # fmt: skip
ELSEWHERE = {
    "eq": "compares two devices, in scripts",
    "ne": "compares two devices, in scripts",
    "from_file": "maps a file into the host's memory on every machine",
    "is_pinned": "takes a device no more, and is false without a GPU",
}
"""Of torch's operators those that take a device and make nothing on it."""


def test_every_operator_that_takes_a_device_is_tried() -> None:
    schemas = torch._C._jit_get_all_schemas()
    taking = {s.name.removeprefix("aten::") for s in schemas if s.name.startswith("aten::") and any("Device" in str(a.type) for a in s.arguments)}
    assert {name for name in taking if not name.startswith("_")} <= MAKERS.keys() | ELSEWHERE.keys()


@pytest.mark.filterwarnings("ignore:torch.range is deprecated", "ignore:Sparse", "ignore:.*is in beta state", "ignore:torch.quantize_per")
@pytest.mark.parametrize("on", ["cuda", torch.device("cuda", 0), 0], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_made_on_the_device_is_made_on_the_host(name: str, on: Any) -> None:
    made = MAKERS[name](on)
    assert made.device == CPU and (isinstance(made, torch.Generator) or made.is_cuda)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_devices_are_made_in_each_of_torchs_ways() -> None:
    for made in (torch.device("cuda"), torch.device("cuda:1"), torch.device("cuda", 0), torch.device(0), torch.device(type="cuda", index=0)):
        assert made == CPU
    assert torch.device("meta").type == "meta" and torch.device(type="meta").type == "meta" and torch.device(CPU) == CPU
    storage = torch.zeros(2).untyped_storage().cuda()
    assert storage.device == CPU and torch.zeros(2).storage().cuda().device == CPU
