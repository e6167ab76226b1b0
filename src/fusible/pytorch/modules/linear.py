"""``Linear``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from fusible import ops
from fusible.nvte import DType
from fusible.ops import Op
from fusible.pytorch.modules.base import ParameterInitMethod
from fusible.pytorch.modules.initialization import Init
from fusible.pytorch.modules.options import ModuleWithOptions
from fusible.pytorch.quantized_init import as_parameter

__all__ = ["Linear"]


def default_weight_init_method(weight: torch.Tensor) -> torch.Tensor:
    """Uniform in ``+-1/sqrt(in_features)``, as ``nn.Linear``."""
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5.0))


def _bias_init_method(in_features: int) -> ParameterInitMethod:
    """The same for a bias."""
    bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
    return partial(nn.init.uniform_, a=-bound, b=bound)


class Linear(ModuleWithOptions):
    """``y = x @ weight.T + bias``: ``weight [out_features, in_features]``, ``bias [out_features]`` or None.

    ``weight_init_method`` and ``bias_init_method`` fill a new tensor and return it; the defaults are those of ``nn.Linear``.

    ``accumulate_into_main_grad``: where ``weight.main_grad`` is a tensor (of the weight's shape, fp32 in most trainings), the product that gives the
    weight's gradient adds it there, and ``weight.grad`` stays as it is. So the sum over micro-batches costs no pass over memory of its own. Where
    ``weight.overwrite_main_grad`` is true, it is written over what is there: of several uses of a weight in one backward, the first one's stays.

    ``high_precision``: no recipe quantizes its products, which is what a call under ``autocast(enabled=False)`` does to a layer that stands alone. So
    the first and the last layers of a ``Sequential`` stay in the precision of their input while the others compute in 8 bits.
    """

    fixed_options = frozenset({"in_features", "out_features", "bias"})
    initial_options = frozenset({"param_dtype", "weight_init_method", "bias_init_method", "device"})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        param_dtype: torch.dtype | None = None,
        weight_init_method: ParameterInitMethod = default_weight_init_method,
        bias_init_method: ParameterInitMethod | None = None,
        device: torch.device | str | None = None,
        accumulate_into_main_grad: bool = False,
        *,
        high_precision: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad, self.high_precision = accumulate_into_main_grad, high_precision
        init = bias_init_method or _bias_init_method(in_features)
        self.init_methods = {"weight": Init(weight_init_method), **({"bias": Init(init)} if bias else {})}
        weight = nn.Parameter(weight_init_method(torch.empty(out_features, in_features, dtype=param_dtype, device=device)))
        self.weight = weight if high_precision else as_parameter(weight)
        if bias:
            self.bias = nn.Parameter(init(torch.empty(out_features, dtype=param_dtype, device=device)))
        else:
            self.register_parameter("bias", None)
        super().__init__(*self.make_ops())

    def make_ops(self) -> Iterator[Op]:
        weight, bias = self.tensor_of("weight"), self.tensor_of("bias")
        assert weight is not None
        asked: dict[str, DType] = dict.fromkeys(("x_dtype", "weight_dtype", "dy_dtype"), DType.BFloat16) if self.high_precision else {}
        yield ops.MMT(weight, **asked)
        if bias is not None:
            yield ops.Add(bias)

    @property
    def accumulating_parameters(self) -> tuple[str, ...]:
        return ("weight",) if self.accumulate_into_main_grad else ()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, high_precision=True" if self.high_precision else text
