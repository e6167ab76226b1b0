"""Tensors that record what is done to them: Trace -> FlatIR -> StableHLO -> an executable by XLA.

Nothing here imports torch, and jaxlib is loaded at the first lowering.
"""

from fusible.lazy.device import device
from fusible.lazy.dtypes import bfloat16, bool, dtype, float8, float8e5m2, float16, float32, float64, int8, int32, int64, uint8, uint32, uint64
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.frontend.ops.arange import arange
from fusible.lazy.frontend.ops.reductions import mean, softmax
from fusible.lazy.frontend.ops.shaping import flatten, split, squeeze, stack, unsqueeze
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.runtime.executable import Executable, InputInfo, compile
from fusible.lazy.runtime.output import Output
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.trace.ops.argreduce import argmax, argmin
from fusible.lazy.trace.ops.binary import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    div,
    logical_and,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mul,
    pow,
    shift_left,
    shift_right_logical,
    sub,
)
from fusible.lazy.trace.ops.bitcast import bitcast
from fusible.lazy.trace.ops.cast import cast
from fusible.lazy.trace.ops.comparison import equal, greater, greater_equal, less, less_equal, not_equal
from fusible.lazy.trace.ops.concatenate import concatenate
from fusible.lazy.trace.ops.cumsum import cumsum
from fusible.lazy.trace.ops.expand import broadcast_to, expand
from fusible.lazy.trace.ops.fill import full, full_like, ones, ones_like, zeros, zeros_like
from fusible.lazy.trace.ops.gather import gather
from fusible.lazy.trace.ops.iota import iota
from fusible.lazy.trace.ops.matmul import dot_general, matmul
from fusible.lazy.trace.ops.pad import pad
from fusible.lazy.trace.ops.permute import permute, transpose
from fusible.lazy.trace.ops.reduce import all, any, max, min, prod, sum
from fusible.lazy.trace.ops.reshape import reshape
from fusible.lazy.trace.ops.slice import flip
from fusible.lazy.trace.ops.unary import abs, bitwise_not, cos, exp, floor, is_finite, log, logical_not, neg, rsqrt, sigmoid, sign, sin, sqrt, tanh
from fusible.lazy.trace.ops.where import where
from fusible.lazy.trace.trace import Trace

__all__ = [
    "Executable",
    "FlatIR",
    "InputInfo",
    "Output",
    "StableHLO",
    "Tensor",
    "Trace",
    "abs",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "bfloat16",
    "bitcast",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "bool",
    "broadcast_to",
    "cast",
    "compile",
    "concatenate",
    "cos",
    "cumsum",
    "device",
    "div",
    "dot_general",
    "dtype",
    "equal",
    "exp",
    "expand",
    "flatten",
    "flip",
    "float16",
    "float32",
    "float64",
    "float8",
    "float8e5m2",
    "floor",
    "full",
    "full_like",
    "gather",
    "greater",
    "greater_equal",
    "int32",
    "int64",
    "int8",
    "iota",
    "is_finite",
    "less",
    "less_equal",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "neg",
    "not_equal",
    "ones",
    "ones_like",
    "pad",
    "permute",
    "pow",
    "prod",
    "reshape",
    "rsqrt",
    "shift_left",
    "shift_right_logical",
    "sigmoid",
    "sign",
    "sin",
    "softmax",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "tanh",
    "transpose",
    "uint32",
    "uint64",
    "uint8",
    "unsqueeze",
    "where",
    "zeros",
    "zeros_like",
]
