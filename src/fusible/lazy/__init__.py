"""Tensors that record what is done to them: Trace -> FlatIR -> StableHLO -> an executable by XLA.

Nothing here imports torch, and jaxlib is loaded at the first lowering.
"""

from fusible.errors import FusibleError as TripyException
from fusible.facade import public_names as _public_names
from fusible.lazy import types
from fusible.lazy.compilation.compile import *
from fusible.lazy.compilation.executable import Executable
from fusible.lazy.compilation.input_info import Bounds, DimensionInputInfo, InputInfo, NamedDimension
from fusible.lazy.config import *
from fusible.lazy.device import *
from fusible.lazy.dtypes import *
from fusible.lazy.engine.output import *
from fusible.lazy.engine.plugins import register_plugin
from fusible.lazy.engine.stream import *
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.frontend import DimensionSize, Tensor
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
from fusible.lazy.ops import comparison as _comparison  # the operators of Tensor
from fusible.lazy.ops import convolution as _convolution  # declared, for modules to call
from fusible.lazy.ops import indexing as _indexing  # x[...]
from fusible.lazy.ops import padding as _padding  # what operations do on padded tensors
from fusible.lazy.ops.agreement import *
from fusible.lazy.ops.arange import *
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
from fusible.lazy.ops.fill import *
from fusible.lazy.ops.gather import gather
from fusible.lazy.ops.iota import iota, iota_like
from fusible.lazy.ops.matmul import dot_general, matmul
from fusible.lazy.ops.pad import pad
from fusible.lazy.ops.permute import permute, transpose
from fusible.lazy.ops.plugin import plugin
from fusible.lazy.ops.pooling import avgpool, maxpool
from fusible.lazy.ops.products import *
from fusible.lazy.ops.quantize import dequantize, quantize
from fusible.lazy.ops.random import *
from fusible.lazy.ops.random_words import random_words
from fusible.lazy.ops.reduce import all, any, max, min, prod, sum
from fusible.lazy.ops.reductions import mean, softmax, var
from fusible.lazy.ops.reshape import reshape
from fusible.lazy.ops.resize import resize
from fusible.lazy.ops.shaping import *
from fusible.lazy.ops.slice import flip
from fusible.lazy.ops.topk import topk
from fusible.lazy.ops.triangle import tril, triu
from fusible.lazy.ops.unary import (
    abs,
    bitwise_not,
    cos,
    erfc,
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
from fusible.lazy.stablehlo.module import *
from fusible.lazy.trace.trace import *
from fusible.version import __version__ as __version__

__all__ = _public_names(globals(), "types")
