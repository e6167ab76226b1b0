# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from typing import Any
from fusible import nvte
from fusible import ops
from fusible.ops import Add
from fusible.ops import Context

def add_erf_gelu_bwd_fused(add: Add, act: ops.ErfGELU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """ErfGELU's backward also sums the gradient of the bias."""

def add_gelu_bwd_fused(add: Add, act: ops.GELU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """GELU's backward also sums the gradient of the bias."""

def add_qgelu_bwd_fused(add: Add, act: ops.QGELU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """QGELU's backward also sums the gradient of the bias."""

def add_relu_bwd_fused(add: Add, act: ops.ReLU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """ReLU's backward also sums the gradient of the bias."""

def add_silu_bwd_fused(add: Add, act: ops.SiLU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """SiLU's backward also sums the gradient of the bias."""

def add_srelu_bwd_fused(add: Add, act: ops.SReLU, add_ctx: Context, act_ctx: Context, dy: nvte.Tensor) -> Any:
    """SReLU's backward also sums the gradient of the bias."""
