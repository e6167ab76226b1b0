"""Linear layers: ``nn.Linear``, and the ``Conv1D`` of GPT-2, whose weight is stored transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fusible import ops
from fusible.models.convert.as_found import Form, form_of, has_form
from fusible.models.convert.joining import JoinedLinears, Stand
from fusible.models.convert.pipelines import ConvertedModule, placeholder
from fusible.models.convert.siblings import Siblings
from fusible.models.convert.swapping import Swap
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.modules.linear import Linear
from fusible.quantized import Recipe

if TYPE_CHECKING:
    from fusible.models.convert.relay import Relay

__all__ = ["BoundParts", "ConvertedConv1D", "ConvertedLinear", "is_conv1d", "joined_ops", "linear_ops", "linear_swap", "why_no_linear"]

BoundParts = tuple[Op, Any, tuple[str, ...]]
"""An op, who holds its parameters, and their names there."""


class ConvertedLayer(ConvertedModule):
    """A linear layer, whose ops are made anew when a parameter is set and it has another form then: a bias more or less, or other sizes."""

    kept = tuple(name for name in ConvertedModule.kept if name != "register_parameter")
    _form: Form
    """Of which its ops are made."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.original.register_parameter(self, name, param)
        if not has_form(self, self._form):
            self.forget_plans()
            bound = tuple(BoundOp(op, holder, names) for op, holder, names in linear_ops(self))
            form = tuple({**dict(self._form), **dict(form_of(self))}.items())
            vars(self).update(_ops=tuple(b.op for b in bound), _bound=bound, _form=form, _changes=self._changes + 1)


class ConvertedLinear(ConvertedLayer, Linear):
    """``nn.Linear`` whose product runs on 8-bit operands. Where nothing is quantized it is torch's own, to the bit."""

    high_precision = False
    accumulating_parameters = ()  # pyright: ignore[reportAssignmentType] - the converted layer has no such option
    _group: Siblings | None = None
    """The layers of the same input that it computes together with, among which it has a place."""
    _place: int = 0
    _relay: Relay | None = None
    """The MLP of whose layers it is the first or the last."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        recipe = self._in_force()
        if self._is_plain(recipe):
            return self.original.forward(self, input)
        y = self._group.output(self._place, input) if self._group is not None else None
        if y is None and self._relay is not None:
            y = self._relay.output(self, input, recipe)
        return self._run(input) if y is None else y

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": None}  # its owner makes another


class Transposed(Stand):
    """Stands for a ``Conv1D`` in a pipeline: its weight ``[in, out]`` is read as ``[out, in]``, without a copy."""

    @property
    def weight(self) -> torch.Tensor:
        return self.modules[0]._parameters["weight"].t()

    @property
    def bias(self) -> torch.Tensor | None:
        return self.modules[0]._parameters["bias"]


class ConvertedConv1D(ConvertedLayer):
    """``y = x @ weight + bias`` with ``weight [in, out]``, the ``Conv1D`` of transformers, whose product runs on 8-bit operands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_plain(self._in_force()):
            return self.original.forward(self, x)
        return self._run(x)

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # what changes ops and parameters together knows nothing of one that is read transposed

    def __repr__(self) -> str:
        former: Any = self.original
        return f"Fusible{former.__repr__(self)}"


def why_no_linear(module: nn.Module) -> str:
    """Why a linear layer is left as it is; empty where it can be converted, None-like for what is no linear layer."""
    parameters = module._parameters
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "torch's MultiheadAttention reads its weight, and does not call it"
    if type(module).forward not in (nn.Linear.forward, _conv1d_forward(module)):
        return "its class has a forward of its own"
    if "weight" not in parameters:
        return "its weight is computed from other parameters"
    return why_no_parameters(module)


def why_no_parameters(module: nn.Module) -> str:
    """Why Fusible's operations cannot take a module's parameters; empty where they can."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if parameter.dtype not in _DTYPES:
            return f"its {name} is in {str(parameter.dtype).removeprefix('torch.')}"
    return ""


_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the ``Conv1D`` of transformers: by its structure, so that nothing has to be imported."""
    cls = type(module)
    return (
        any(base.__name__ == "Conv1D" and base.__module__.startswith("transformers.") for base in cls.__mro__) and {"nf", "nx"} <= vars(module).keys()
    )


def _conv1d_forward(module: nn.Module) -> Any:
    return next((base.__dict__.get("forward") for base in type(module).__mro__ if base.__name__ == "Conv1D"), None) if is_conv1d(module) else None


def linear_ops(module: Any) -> list[BoundParts]:
    """The ops of a linear layer for which ``why_no_linear`` says nothing, each with who holds its parameters and their names there."""
    weight, bias = module.weight, module.bias
    transposed = is_conv1d(module)
    like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    holder = Transposed(module) if transposed else module
    product = ops.MMT(make_nvte_tensor(like.t() if transposed else like)), holder, ("weight",)
    return [product] if bias is None else [product, (ops.Add(placeholder(bias)), holder, ("bias",))]


def joined_ops(modules: Sequence[Any]) -> list[BoundParts]:
    """The same of several ``nn.Linear``s of one input, as one."""
    weights = [module._parameters["weight"] for module in modules]
    rows, holder = sum(len(weight) for weight in weights), JoinedLinears(*modules)
    like = torch.empty(rows, weights[0].shape[1], dtype=weights[0].dtype, device="meta")
    found: list[BoundParts] = [(ops.MMT(make_nvte_tensor(like)), holder, ("weight",))]
    if any(module._parameters.get("bias") is not None for module in modules):
        found.append((ops.Add(make_nvte_tensor(like.new_empty(rows))), holder, ("bias",)))
    return found


def linear_swap(module: nn.Module, recipe: Recipe | None) -> Swap:
    """The swap of a linear layer for which ``why_no_linear`` says nothing."""
    kind = ConvertedConv1D if is_conv1d(module) else ConvertedLinear
    attributes = {**kind.attributes(module, linear_ops(module), recipe), "_form": form_of(module)}
    return Swap(module, kind, {**attributes, "_group": None, "_place": 0, "_relay": None} if kind is ConvertedLinear else attributes)
