"""Every kind of tensor in place of every argument of every native function, in a process of its own: a crash there is a failed test here.

Run as a program it prints one line a case, ``call argument kind outcome``, before which the case's name is printed, so that a crash is named.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from cpp_calls import CALLS, WRITTEN, run, tensors, with_argument
from torch import Tensor

from fusible.errors import FusibleError

WITHOUT_MEMORY: dict[str, Callable[[Tensor], Any]] = {}
"""Tensors that have no memory of their own, or not enough, or none that means what shape and dtype say: each is refused."""
ORDINARY: dict[str, Callable[[Tensor], Any]] = {}
"""Tensors with memory, however they came by it: each gives the bits of a plain one."""
LAZY: dict[str, Callable[[Tensor], Any]] = {}
"""Views whose values torch has not computed: right where they are read, refused where they are written."""
GAPS: dict[str, Callable[[Tensor], Any]] = {}
"""Other strides: right, or refused."""
SHARED: dict[str, Callable[[Tensor], Any]] = {}
"""Elements that share memory: right or refused where they are read, refused where they are written."""


def _kind(where: dict[str, Callable[[Tensor], Any]]) -> Callable[[Callable[[Tensor], Any]], None]:
    def register(make: Callable[[Tensor], Any]) -> None:
        where[make.__name__] = make

    return register


@_kind(WITHOUT_MEMORY)
def freed(x: Tensor) -> Tensor:
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


@_kind(WITHOUT_MEMORY)
def freed_with_an_offset(x: Tensor) -> Tensor:
    y = torch.stack((x, x))[1]
    y.untyped_storage().resize_(0)
    return y


@_kind(WITHOUT_MEMORY)
def storage_one_byte_short(x: Tensor) -> Tensor:
    y = torch.stack((x, x))[1]
    y.untyped_storage().resize_(y.untyped_storage().nbytes() - 1)
    return y


@_kind(WITHOUT_MEMORY)
def fake(x: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


@_kind(WITHOUT_MEMORY)
def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


@_kind(WITHOUT_MEMORY)
def meta(x: Tensor) -> Tensor:
    return x.to("meta")


@_kind(WITHOUT_MEMORY)
def functional(x: Tensor) -> Any:
    return torch._to_functional_tensor(x)


@_kind(WITHOUT_MEMORY)
def functional_of_python(x: Tensor) -> Any:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(x)


@_kind(WITHOUT_MEMORY)
def batched(x: Tensor) -> Any:
    return torch._C._functorch._add_batch_dim(torch.stack((x, x)), 0, 1)


@_kind(WITHOUT_MEMORY)
def wrapper(x: Tensor) -> Any:
    return _Wrapper(x.shape, x.dtype)


@_kind(WITHOUT_MEMORY)
def two_tensors(x: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x)


@_kind(WITHOUT_MEMORY)
def masked(x: Tensor) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(x, torch.ones(x.shape, dtype=torch.bool))


@_kind(WITHOUT_MEMORY)
def distributed(x: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, init_device_mesh

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)))


@_kind(WITHOUT_MEMORY)
def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


@_kind(WITHOUT_MEMORY)
def sparse_rows(x: Tensor) -> Tensor:
    return x.to_sparse_csr()


@_kind(WITHOUT_MEMORY)
def opaque(x: Tensor) -> Tensor:
    return x.to_mkldnn()


@_kind(WITHOUT_MEMORY)
def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x))


@_kind(WITHOUT_MEMORY)
def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


@_kind(WITHOUT_MEMORY)
def uninitialized(x: Tensor) -> Any:
    return torch.nn.UninitializedParameter(dtype=x.dtype, requires_grad=False)


@_kind(WITHOUT_MEMORY)
def quantized_by_torch(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8)


@_kind(WITHOUT_MEMORY)
def complex_numbers(x: Tensor) -> Tensor:
    return x.to(torch.complex64)


@_kind(WITHOUT_MEMORY)
def booleans(x: Tensor) -> Tensor:
    return x.bool()


@_kind(WITHOUT_MEMORY)
def an_array(x: Tensor) -> Any:
    return x.numpy()


@_kind(ORDINARY)
def parameter(x: Tensor) -> Any:
    return torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point())


@_kind(ORDINARY)
def buffer(x: Tensor) -> Any:
    return torch.nn.Buffer(x.clone())


@_kind(ORDINARY)
def subclass(x: Tensor) -> Any:
    return x.clone().as_subclass(_Subclass)


@_kind(ORDINARY)
def of_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@_kind(ORDINARY)
def of_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().copy())


@_kind(ORDINARY)
def misaligned(x: Tensor) -> Tensor:
    raw = bytearray(x.nbytes + 1)
    y = torch.frombuffer(raw, dtype=torch.uint8)[1:]
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
    return torch.frombuffer(raw, dtype=x.dtype, offset=1).view(x.shape)


@_kind(ORDINARY)
def at_an_offset(x: Tensor) -> Tensor:
    return torch.stack((x, x))[1]


@_kind(ORDINARY)
def copied_on_write(x: Tensor) -> Tensor:
    return torch._lazy_clone(x)


@_kind(ORDINARY)
def in_shared_memory(x: Tensor) -> Tensor:
    return x.clone().share_memory_()


@_kind(ORDINARY)
def of_a_file(x: Tensor) -> Tensor:
    with tempfile.NamedTemporaryFile() as file:
        file.write(x.numpy().tobytes())
        file.flush()
        return torch.from_file(file.name, shared=False, size=x.numel(), dtype=x.dtype).view(x.shape)


@_kind(ORDINARY)
def of_a_map(x: Tensor) -> Tensor:
    memory = mmap.mmap(-1, max(x.nbytes, 1))
    memory[: x.nbytes] = x.numpy().tobytes()
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel()).view(x.shape)


@_kind(LAZY)
def negated(x: Tensor) -> Tensor:
    return torch._neg_view(x.neg())


@_kind(LAZY)
def negated_imaginary(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@_kind(GAPS)
def with_gaps(x: Tensor) -> Tensor:
    y = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]
    y.copy_(x)
    return y


@_kind(GAPS)
def turned(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@_kind(GAPS)
def part_of_wider_rows(x: Tensor) -> Tensor:
    y = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)[..., 1:-2]
    y.copy_(x)
    return y


@_kind(SHARED)
def expanded(x: Tensor) -> Tensor:
    return x[:1].clone().expand(x.shape)


@_kind(SHARED)
def overlapping_windows(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + x.dim(), dtype=x.dtype).as_strided(x.shape, [1] * x.dim())


class _Subclass(torch.Tensor):
    pass


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


def _differs(found: dict[str, Any], wanted: dict[str, Tensor]) -> str | None:
    for name, want in wanted.items():
        got = torch.empty(want.shape, dtype=want.dtype).copy_(found[name].detach())
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            return name
    return None


def outcome(call: str, place: str, make: Callable[[Tensor], Any]) -> str:
    """``right``, ``refused``, ``wrong: ...``, or ``none`` where there is no tensor of this kind and the argument's shape and dtype."""
    arguments = CALLS[call]()
    try:
        given = make(tensors(arguments)[place])
    except Exception:
        return "none"
    plain = CALLS[call]()
    if make.__name__ in SHARED:
        if given.numel() <= 1 or given.is_contiguous():
            return "none"
        plain = with_argument(plain, place, given.contiguous())  # it holds other numbers
    try:
        wanted = run(call, plain)
    except FusibleError:
        return "none"
    before = {name: x.clone() for name, x in tensors(arguments).items()}
    try:
        found = run(call, with_argument(arguments, place, given))
    except FusibleError as error:
        if not re.fullmatch(r".+: expected .+, got .+; .+\.", str(error)):
            return f"wrong: not one sentence: {error}"
        changed = [name for name, x in tensors(arguments).items() if not torch.equal(x, before[name])]
        return f"wrong: refused, but {changed} have changed" if changed else "refused"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    name = _differs(found, wanted)
    return "right" if name is None else f"wrong: {name} differs"


KINDS = {**WITHOUT_MEMORY, **ORDINARY, **LAZY, **GAPS, **SHARED}


def allowed(call: str, place: str, kind: str) -> tuple[str, ...]:
    """The outcomes that the rule has for a case."""
    written = place.split("/")[0] in WRITTEN[call]
    if kind in WITHOUT_MEMORY:
        return ("refused",)
    if kind in ORDINARY:
        return ("right",)
    if kind in LAZY and kind == "negated":
        return ("refused",) if written else ("right",)
    return ("refused",) if written and kind not in GAPS else ("right", "refused")


def main() -> None:
    warnings.simplefilter("ignore")
    for call, make in CALLS.items():
        for place in tensors(make()):
            for kind in KINDS:
                print(f"{call} {place} {kind} ", end="", flush=True)
                print(outcome(call, place, KINDS[kind]).replace("\n", " "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
