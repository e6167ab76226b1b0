"""Every way in which a weight comes to hold other values, seen by torch's version counters or not."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fusible
from fusible.pytorch import ops
from fusible.quantized import QuantizedTensor

WIDTH = 32
Write = Callable[[nn.Module], Any]
"""Changes the weights of a model in place, or gives the model that is to be used from now on."""


def weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The matrices of a model, each with its module and its name there."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.ndim > 1:
                yield module, name, parameter


def each(write: Callable[[nn.Parameter], Any]) -> Write:
    def write_each(model: nn.Module) -> None:
        for _, _, parameter in weights(model):
            write(parameter)

    return write_each


def other(p: Tensor) -> Tensor:
    """Other values of like size, the same for every equal tensor."""
    values = p.dequantize() if isinstance(p, QuantizedTensor) else p
    return (values.detach() * 0.75 - 0.01 * values.detach().roll(1, 0)).clone()


def _subtract(p: nn.Parameter) -> None:
    p.data -= 0.1 * p.data.sign()


def _add_by_view(p: nn.Parameter) -> None:
    p.data[: len(p) // 2].view(-1)[1::3] += 0.25


def _numpy(p: nn.Parameter) -> None:
    array = p.detach().numpy().reshape(-1, p.shape[-1])
    array[3:, ::2] *= -1.5


def _one_element(p: nn.Parameter) -> None:
    p.detach().numpy()[-1, -1] += 4


def _from_dlpack(p: nn.Parameter) -> None:
    torch.from_dlpack(p.detach()).copy_(other(p))


def _no_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def _detached(p: nn.Parameter) -> None:
    p.detach().add_(0.125)


def _preserving(p: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(p), torch.no_grad():
        p.copy_(other(p))


def _storage(p: nn.Parameter) -> None:
    p.untyped_storage().copy_(other(p).untyped_storage())


def _resized(p: nn.Parameter) -> None:
    """As FSDP frees what it has gathered, and gathers it anew."""
    values, storage = other(p), p.untyped_storage()
    size = storage.nbytes()
    with torch.autograd._unsafe_preserve_version_counter(p), torch.no_grad():
        storage.resize_(0)
        storage.resize_(size)
        p.copy_(values)


def _rebound(p: nn.Parameter) -> None:
    p.data = other(p)


def _transposed(p: nn.Parameter) -> None:
    """The same memory, read along the other dimension."""
    p.data = p.data.mT


def _negated(p: nn.Parameter) -> None:
    """Values that torch has not computed: the memory holds their negation."""
    p.data = torch._neg_view(other(p))


def _negated_imaginary(p: nn.Parameter) -> None:
    values = other(p)
    p.data = torch.complex(values, -values).conj().imag


def _expanded(p: nn.Parameter) -> None:
    p.data = p.data[:1].expand(p.shape)


def _moved_by_one(p: nn.Parameter) -> None:
    """A window on a longer buffer that goes on by one row."""
    longer = torch.cat([p.data[-1:], p.data])
    p.data = longer[1:]
    p.data = longer[:-1]


def _average(p: nn.Parameter) -> None:
    """An average takes the parameter's place, and the parameter its."""
    average = other(p)
    p.data, average.data = average.data, p.data


def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_([p.data for _, _, p in weights(model)], 1.25)


def _foreach_lerp(model: nn.Module) -> None:
    held = [p.data for _, _, p in weights(model)]
    torch._foreach_lerp_(held, [other(p) for p in held], 0.5)


def _flat(model: nn.Module) -> None:
    """All parameters are views of one vector, which is written to."""
    found = [p for _, _, p in weights(model)]
    vector = parameters_to_vector(found).detach()
    vector_to_parameters(vector, found)
    vector.mul_(0.5)


def _replaced(model: nn.Module) -> None:
    for module, name, p in weights(model):
        setattr(module, name, nn.Parameter(other(p), p.requires_grad))


def _swapped(model: nn.Module) -> None:
    for _, _, p in weights(model):
        torch.utils.swap_tensors(p, nn.Parameter(other(p), p.requires_grad))


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: other(p) if p.ndim > 1 and "scaling" not in name else p for name, p in model.state_dict().items()})


def _assigned(model: nn.Module) -> None:
    state = {name: other(p) if p.ndim > 1 and "scaling" not in name else p for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _tied(model: nn.Module) -> None:
    """One parameter for two, written to by the name of the other."""
    (first, name, p), *rest = weights(model)
    for module, other_name, _ in rest:
        setattr(module, other_name, getattr(first, name))
    p.data.mul_(-1)


def _copied(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    each(_subtract)(copied)
    return copied


def _optimizer(kind: Callable[..., torch.optim.Optimizer]) -> Write:
    def step(model: nn.Module) -> None:
        found = [p for _, _, p in weights(model)]
        asked = [p.requires_grad for p in found]
        for p in found:
            p.requires_grad_(True).grad = other(p)
        kind(found).step()
        for p, requires_grad in zip(found, asked, strict=True):
            p.requires_grad_(requires_grad).grad = None

    return step


class ByData(torch.optim.Optimizer):
    """Writes as many optimizers outside of torch do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


def _another_process(model: nn.Module) -> None:
    """Weights in shared memory, written to by a child."""
    model.share_memory()
    child = os.fork()
    if child == 0:
        for _, _, p in weights(model):
            p.detach().numpy()[...] *= 0.5
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _restored(model: nn.Module) -> None:
    """Written to and back again: nothing is stale then."""
    for _, _, p in weights(model):
        before = p.data.clone()
        p.data.mul_(2)
        p.data.copy_(before)


WRITES: dict[str, Write] = {
    "data -=": each(_subtract),
    "data.copy_": each(lambda p: p.data.copy_(other(p))),
    "data.clamp_": each(lambda p: p.data.clamp_(-0.05, 0.05)),
    "data.neg_": each(lambda p: p.data.neg_()),
    "data.zero_": each(lambda p: p.data.zero_()),
    "data[...] +=": each(_add_by_view),
    "foreach on data": _foreach,
    "foreach lerp": _foreach_lerp,
    "numpy": each(_numpy),
    "one element": each(_one_element),
    "dlpack": each(_from_dlpack),
    "detach": each(_detached),
    "no_grad": each(_no_grad),
    "version kept": each(_preserving),
    "storage": each(_storage),
    "storage freed": each(_resized),
    "data =": each(_rebound),
    "data = data.t()": each(_transposed),
    "data = negated view": each(_negated),
    "data = imaginary part": each(_negated_imaginary),
    "negated view": each(lambda p: torch._neg_view(p.data).copy_(other(p))),
    "data = expanded": each(_expanded),
    "data = next window": each(_moved_by_one),
    "average": each(_average),
    "flat vector": _flat,
    "replaced": _replaced,
    "swap_tensors": _swapped,
    "load_state_dict": _loaded,
    "load_state_dict, assigned": _assigned,
    "tied": _tied,
    "deepcopy": _copied,
    "SGD": _optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "AdamW, foreach": _optimizer(lambda p: torch.optim.AdamW(p, 0.1, foreach=True)),
    "AdamW, fused": _optimizer(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
    "optimizer by data": _optimizer(ByData),
    "FusedAdam": _optimizer(lambda p: fusible.FusedAdam(p, lr=0.1)),
    "another process": _another_process,
    "restored": _restored,
}


class Grouped(nn.Module):
    """Two groups of rows, each with its weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = ops.GroupedLinear(len(SIZES), WIDTH, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, SIZES)


SIZES = torch.tensor([WIDTH // 4, WIDTH - WIDTH // 4])

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Sequential": lambda: fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.GELU(), fusible.Linear(WIDTH, WIDTH)),
    "modules": lambda: nn.Sequential(fusible.Linear(WIDTH, WIDTH), nn.ReLU(), fusible.Linear(WIDTH, WIDTH)),
    "ops": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)),
}

GROUPED: dict[str, Callable[[], nn.Module]] = {
    "weights apart": Grouped,
    "one weight": lambda: Grouped(single_grouped_weight=True),
    "in Sequential": lambda: InSequential(),
}
"""Models whose weights are those of groups."""


class InSequential(nn.Module):
    """Groups beside other operations, in one fused list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.GroupedLinear(len(SIZES), WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, SIZES)
