"""Arguments for every declared function of the lazy compiler, for whatever dtypes its tensors have.

``SAMPLES["name"] = sample(parameter=value, ...)``. For a parameter that is declared as a tensor the value is its shape, for a sequence of tensors
a list of shapes; a dtype parameter is filled in. Other values are passed as they are, and functions of ``{type variable: dtype}`` are called first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusible import lazy
from fusible.lazy.frontend.interface import Public

__all__ = ["SAMPLES", "arguments", "sample"]

Given = Mapping[str, lazy.dtype]
Sample = dict[str, Any]


def sample(**values: Any) -> Sample:
    return values


def arguments(of: Public, given: Given, **instead: lazy.dtype) -> dict[str, Any]:
    """The keyword arguments for dtypes ``given`` to the type variables; ``instead`` gives single parameters others."""
    declared = of.constraints.inputs
    made: dict[str, Any] = {}
    for parameter, value in SAMPLES[of.name].items():
        kind = declared.get(parameter)
        if kind is None:
            made[parameter] = value(given) if callable(value) and not isinstance(value, type) else value
            continue
        dtype = instead.get(parameter, given[kind.strip("[]?")])
        made[parameter] = [lazy.ones(shape, dtype) for shape in value] if kind.startswith("[") else lazy.ones(value, dtype)
    for parameter, kind in declared.items():
        if is_dtype(parameter):
            made[parameter] = given[kind]
    return made


def is_dtype(parameter: str) -> bool:
    return parameter == "dtype" or parameter.endswith("_dtype")


_UNARY = """abs all any argmax argmin bitwise_not cast bitcast cos erfc exp flatten flip floor gelu is_finite log logical_not max mean min neg
ones_like prod relu rsqrt sigmoid sign silu sin softmax sqrt sum tanh iota_like var zeros_like"""
_BINARY = """add bitwise_and bitwise_or bitwise_xor div eq floor_div ge gt le logical_and logical_or logical_xor lt maximum minimum mod mul ne pow
shift_left shift_right_logical sub"""
_REVERSED = "_radd _rbitwise_and _rbitwise_or _rbitwise_xor _rdiv _rfloor_div _rmod _rmul _rpow _rshift_left _rsub"

SAMPLES: dict[str, Sample] = {
    **{name: sample(input=(2, 3)) for name in _UNARY.split()},
    **{name: sample(lhs=(2, 3), rhs=(3,)) for name in f"{_BINARY} {_REVERSED}".split()},
    "allclose": sample(input=(2,), other=(2,)),
    "arange": sample(start=1, stop=7, step=2),
    "avgpool": sample(input=(1, 2, 4), kernel_dims=(2,)),
    "broadcast_to": sample(input=(3,), shape=(2, 3)),
    "concatenate": sample(tensors=[(2, 1), (2, 3)], dim=1),
    "convolution": sample(input=(1, 2, 4), weight=(2, 2, 3), bias=(2,), padding=((1, 0),)),
    "convolution_transpose": sample(input=(1, 2, 4), weight=(2, 2, 3), bias=(2,), stride=(2,)),
    "copy": sample(input=(2,), device=lazy.device("cpu")),
    "cumsum": sample(input=(2, 3), dim=1),
    "dequantize": sample(input=(2, 3), scale=lambda given: lazy.ones((3,), given["T2"]), dim=1),
    "dot_general": sample(lhs=(2, 3), rhs=(2, 3), contracting=((1,), (1,))),
    "equal": sample(input=(2,), other=(2,)),
    "expand": sample(input=(3, 1), sizes=(-1, 2)),
    "full": sample(shape=(2,), value=True),
    "full_like": sample(input=(2,), value=True),
    "gather": sample(input=(2, 3), dim=1, index=(2,)),
    "iota": sample(shape=(3,)),
    "masked_fill": sample(input=(2, 3), mask=(3,), value=True),
    "matmul": sample(lhs=(2, 3), rhs=(3, 2)),
    "maxpool": sample(input=(1, 2, 4), kernel_dims=(2,)),
    "ones": sample(shape=(2,)),
    "outer": sample(vec1=(2,), vec2=(3,)),
    "pad": sample(input=(2,), pad=[(1, 1)]),
    "permute": sample(input=(2, 3), perm=(1, 0)),
    "quantize": sample(input=(2, 3), scale=()),
    "rand": sample(shape=(2,), seed=0),
    "randn": sample(shape=(2,), seed=0),
    "random_words": sample(seed=(1,), counter=(3,)),
    "repeat": sample(input=(2, 3), repeats=2, dim=0),
    "reshape": sample(input=(2, 3), shape=(3, 2)),
    "resize": sample(input=(1, 2, 4), output_shape=(1, 2, 6)),
    "split": sample(input=(2, 3), num_split_or_sizes=2),
    "squeeze": sample(input=(2, 1)),
    "stack": sample(tensors=[(2,), (2,)]),
    "topk": sample(input=(2, 3), k=2, dim=1),
    "transpose": sample(input=(2, 3), dim0=0, dim1=1),
    "tril": sample(tensor=(2, 3)),
    "triu": sample(tensor=(2, 3)),
    "unsqueeze": sample(input=(2,), dim=0),
    "where": sample(condition=(3,), input=(2, 3), other=()),
    "zeros": sample(shape=(2,)),
}
