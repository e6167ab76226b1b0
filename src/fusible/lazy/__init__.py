"""Tensors that record what is done to them: Trace -> FlatIR -> StableHLO -> an executable by XLA.

Nothing here imports torch, and jaxlib is loaded at the first lowering.
"""

from fusible.errors import FusibleError as TripyException
from fusible.lazy import types
from fusible.lazy.compilation.compile import compile
from fusible.lazy.compilation.executable import Executable
from fusible.lazy.compilation.input_info import Bounds, DimensionInputInfo, InputInfo, NamedDimension
from fusible.lazy.config import config
from fusible.lazy.device import device
from fusible.lazy.dtypes import (
    bfloat16,
    bool,
    dtype,
    float8,
    float8e5m2,
    float16,
    float32,
    float64,
    floating,
    int4,
    int8,
    int16,
    int32,
    int64,
    integer,
    uint8,
    uint32,
    uint64,
)
from fusible.lazy.engine.output import Output
from fusible.lazy.engine.plugins import register_plugin
from fusible.lazy.engine.stream import Stream, default_stream
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.frontend.tensor import DimensionSize, Tensor
from fusible.lazy.logger import logger
from fusible.lazy.modules import (
    BatchNorm,
    Conv,
    ConvTranspose,
    DefaultParameter,
    Embedding,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Linear,
    Module,
    Sequential,
    UninitializedError,
)
from fusible.lazy.ops import comparison as _comparison  # noqa: F401 - the operators of Tensor
from fusible.lazy.ops import convolution as _convolution  # noqa: F401 - declared, for modules to call
from fusible.lazy.ops import indexing as _indexing  # noqa: F401 - x[...]
from fusible.lazy.ops import padding as _padding  # noqa: F401 - what operations do on padded tensors
from fusible.lazy.ops.agreement import allclose, equal
from fusible.lazy.ops.arange import arange
from fusible.lazy.ops.argreduce import argmax, argmin
from fusible.lazy.ops.binary import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    div,
    floor_div,
    logical_and,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mod,
    mul,
    pow,
    shift_left,
    shift_right_logical,
    sub,
)
from fusible.lazy.ops.bitcast import bitcast
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.concatenate import concatenate
from fusible.lazy.ops.copy import copy
from fusible.lazy.ops.cumsum import cumsum
from fusible.lazy.ops.expand import broadcast_to, expand
from fusible.lazy.ops.fill import full, full_like, ones, ones_like, zeros, zeros_like
from fusible.lazy.ops.gather import gather
from fusible.lazy.ops.iota import iota, iota_like
from fusible.lazy.ops.matmul import dot_general, matmul
from fusible.lazy.ops.pad import pad
from fusible.lazy.ops.permute import permute, transpose
from fusible.lazy.ops.plugin import plugin
from fusible.lazy.ops.pooling import avgpool, maxpool
from fusible.lazy.ops.products import outer, repeat
from fusible.lazy.ops.quantize import dequantize, quantize
from fusible.lazy.ops.random import manual_seed, rand, randn
from fusible.lazy.ops.random_words import random_words
from fusible.lazy.ops.reduce import all, any, max, min, prod, sum
from fusible.lazy.ops.reductions import mean, softmax, var
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.resize import resize
from fusible.lazy.ops.shaping import flatten, split, squeeze, stack, unsqueeze
from fusible.lazy.ops.slice import flip
from fusible.lazy.ops.topk import topk
from fusible.lazy.ops.triangle import tril, triu
from fusible.lazy.ops.unary import (
    abs,
    bitwise_not,
    cos,
    exp,
    floor,
    gelu,
    is_finite,
    log,
    logical_not,
    neg,
    relu,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    sqrt,
    tanh,
)
from fusible.lazy.ops.where import masked_fill, where
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.trace.trace import Trace
from fusible.version import __version__ as __version__

__all__ = [
    "BatchNorm",
    "Bounds",
    "Conv",
    "ConvTranspose",
    "DefaultParameter",
    "DimensionInputInfo",
    "DimensionSize",
    "Embedding",
    "Executable",
    "FlatIR",
    "GroupNorm",
    "InputInfo",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "Module",
    "NamedDimension",
    "Output",
    "Sequential",
    "StableHLO",
    "Stream",
    "Tensor",
    "Trace",
    "TripyException",
    "UninitializedError",
    "abs",
    "add",
    "all",
    "allclose",
    "any",
    "arange",
    "argmax",
    "argmin",
    "avgpool",
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
    "config",
    "copy",
    "cos",
    "cumsum",
    "default_stream",
    "dequantize",
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
    "floating",
    "floor",
    "floor_div",
    "full",
    "full_like",
    "gather",
    "gelu",
    "int16",
    "int32",
    "int4",
    "int64",
    "int8",
    "integer",
    "iota",
    "iota_like",
    "is_finite",
    "log",
    "logger",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "manual_seed",
    "masked_fill",
    "matmul",
    "max",
    "maximum",
    "maxpool",
    "mean",
    "min",
    "minimum",
    "mod",
    "mul",
    "neg",
    "ones",
    "ones_like",
    "outer",
    "pad",
    "permute",
    "plugin",
    "pow",
    "prod",
    "quantize",
    "rand",
    "randn",
    "random_words",
    "register_plugin",
    "relu",
    "repeat",
    "reshape",
    "resize",
    "rsqrt",
    "shift_left",
    "shift_right_logical",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "split",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "tanh",
    "topk",
    "transpose",
    "tril",
    "triu",
    "types",
    "uint32",
    "uint64",
    "uint8",
    "unsqueeze",
    "var",
    "where",
    "zeros",
    "zeros_like",
]
