"""What of NVIDIA's native library is used: what gives the interface's results, as the conformance suite found on a GPU.

That was an H200 (capability 9.0) with version 2.20.2 of the library. What it computes otherwise, or for shapes that it does not take, is left to the
next backend. Functions that no other backend of this package has are its own: they go in as they come. And so does nearly all where NVIDIA's Python
package calls tex in its library's place (``NVTE_PLUGIN``): it means those kernels, and knows what they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusible.tex.activations import ACTIVATIONS
from fusible.tex.enums import DType
from fusible.tex.formats import CURRENT, DELAYED, FLOAT8, FLOAT8_BLOCKS_SCHEME, MXFP8_SCHEME, NVFP4_SCHEME, PLAIN, format_of, scheme_named, scheme_of
from fusible.tex.interface.context_parallel import ContextParallel
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.protocol import to_torch

__all__ = ["out_of_reach", "refused"]

_ROUNDED = [row for row in ACTIVATIONS if not any(part in name for part in ("relu", "clamped") for name in (row.name, row.of))]
"""Activations whose native kernels are those of the interface; the others take NaN for a number."""

VERIFIED = frozenset(
    f"""bgrad_quantize copy_data_ptrs_to_device create_empty_quantized_tensor dequantize fp8_transpose fused_multi_row_padding
    fused_multi_row_unpadding fused_rope_backward fused_rope_forward fused_score_for_moe_aux_loss_bwd fused_score_for_moe_aux_loss_fwd generic_gemm
    layernorm_bwd layernorm_fwd multi_tensor_scale multi_tensor_unscale_l2norm quantize rmsnorm_bwd rmsnorm_bwd_add rmsnorm_fwd
    splits_to_offsets_multi swap_first_dims device_supports_multicast get_cublasLt_version get_cudnn_version
    get_grouped_gemm_setup_workspace_size get_num_cublas_streams get_stream_priority_range nvte_built_with_cublasmp ubuf_built_with_mpi
    {" ".join(f"{row.name} {row.gradient} dbias_{row.gradient}" for row in _ROUNDED)}""".split()
)
"""The functions that gave the interface's results."""

_HALF = frozenset({torch.float16, torch.bfloat16})
_HALF_ALONE = ("dropout_fwd", "dropout_bwd")
_GROUP_QUANTIZING = ("group_quantize", "bgrad_group_quantize")
_IN_DOUBLE = frozenset(vars(ContextParallel))
_BLACKWELL = (10, 0)
_OF_BLACKWELL = {MXFP8_SCHEME, NVFP4_SCHEME}
_NORMS = {"layernorm_fwd": ("input", "weight"), "rmsnorm_fwd": ("input", "weight")}
_NORMS |= {"layernorm_bwd": ("dz", "x", "gamma"), "rmsnorm_bwd": ("dz", "x", "gamma"), "rmsnorm_bwd_add": ("dz", "x", "add", "gamma")}
"""The arguments of norms, which their kernels read in one dtype."""

Kinds = dict[str, tuple[str, torch.dtype]]


def refused(request: Request, of_package: bool) -> str | None:
    """Why the library does not serve a request, told by the kinds of its arguments. ``of_package``: whether NVIDIA's package calls tex."""
    plain: Kinds = {name: kind for name, kind in request.kinds if isinstance(kind, tuple) and len(kind) == 2 and isinstance(kind[1], torch.dtype)}
    rules = _OF_THE_LIBRARY if of_package else (*_OF_THE_LIBRARY, *_OF_THE_INTERFACE)
    return next((reason for rule in rules if (reason := rule(request, plain)) is not None), None)


def _of_another_gpu(request: Request, plain: Kinds) -> str | None:
    names = {kind[0] for _, kind in request.kinds if isinstance(kind, tuple) and kind and isinstance(kind[0], str)}
    wanted = {name for name in (*names, request.function.split("_")[0]) if scheme_named(name) in _OF_BLACKWELL}
    if not wanted or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) >= _BLACKWELL else f"its native kernels for {min(wanted)} need capability 10.0, and the GPU has {major}.{minor}"


def _unverified(request: Request, plain: Kinds) -> str | None:
    if request.function in VERIFIED or DECLARATIONS[request.function].unserved:
        return None
    return "its native kernel was not seen to give the interface's results on a GPU"


def _in_blocks(request: Request, plain: Kinds) -> str | None:
    names = {kind[0] for _, kind in request.kinds if isinstance(kind, tuple) and kind and isinstance(kind[0], str)}
    found = any(scheme_named(name) is FLOAT8_BLOCKS_SCHEME for name in names)
    return "its native kernels for FP8 in blocks were not seen to give the interface's results on a GPU" if found else None


def _unquantized(request: Request, plain: Kinds) -> str | None:
    if request.function == "generic_gemm" and not {"A", "B"}.isdisjoint(plain):
        return "its native product of unquantized operands is cuBLAS's, as torch's is, and of fp32 one of TF32"
    if request.function.startswith("dbias_") and request["quantizer"] is None:
        return "its native kernel gives quantized gradients alone"
    return None


def _not_half(request: Request, plain: Kinds) -> str | None:
    if "softmax" in request.function or request.function in _HALF_ALONE:
        for name, (_, dtype) in plain.items():
            if dtype not in _HALF and name != "mask":
                return f"its native kernel reads float16 and bfloat16, and {name} is {dtype}"
    return None


def _delayed_group(request: Request, plain: Kinds) -> str | None:
    if request.function in _GROUP_QUANTIZING:
        for name, kind in request.kinds:
            if name == "quantizer" and isinstance(kind, tuple) and scheme_named(kind[0]) is DELAYED:
                return "its native kernel has no delayed scaling"
    return None


def _double(request: Request, plain: Kinds) -> str | None:
    found = [name for name, (_, dtype) in plain.items() if dtype is torch.float64] if request.function not in _IN_DOUBLE else []
    return f"its native kernels have no float64, and {found[0]} is of it" if found else None


def _unlike(request: Request, plain: Kinds) -> str | None:
    dtypes = {name: plain[name][1] for name in _NORMS.get(request.function, ()) if name in plain}
    if dtypes and "otype" in dict(request.kinds):
        dtypes["otype"] = to_torch(request["otype"])
    return f"its native kernel reads {' and '.join(dtypes)} of one dtype" if len(set(dtypes.values())) > 1 else None


_OF_THE_LIBRARY = _not_half, _double, _delayed_group
_OF_THE_INTERFACE = _unverified, _of_another_gpu, _in_blocks, _unquantized, _unlike


# What shapes and values tell.

_WHOLE = 16
"""Elements of FP8 in a vector."""


def out_of_reach(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    """Whether the library does not take a call that its kinds do not tell."""
    return any(rule(function, arguments, quantizer) for rule in _REACH)


def _empty(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    return any(_has_empty(value) for name, value in arguments.items() if name not in ("workspace", "gelu_in", "noop_flag"))


def _has_empty(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_empty, value))
    return (type(value) is torch.Tensor or type(value) is torch.nn.Parameter) and not value.numel()


def _without_vectors(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    """FP8 of one scale whose transposed copy has no whole vectors, or stands alone. A gate's input is twice as wide as what is quantized."""
    if quantizer is None or isinstance(quantizer, list | tuple) or scheme_of(quantizer) not in (DELAYED, CURRENT):
        return False
    x = next((x for x in arguments.values() if type(x) is torch.Tensor or type(x) is torch.nn.Parameter), None)
    if x is None or not quantizer.columnwise_usage:
        return False
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    return not quantizer.rowwise_usage or bool(rows % _WHOLE or columns % (2 * _WHOLE))


def _norm(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    """Norms read matrices, and give no E5M2."""
    if function not in _NORMS:
        return False
    return arguments[_NORMS[function][0]].dim() != 2 or int(getattr(quantizer, "dtype", 0) or 0) == DType.kFloat8E5M2


def _product(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    """Products of FP8 contract whole vectors, of the copies along which they lie, into fp32 or half precision, with a bias forward."""
    if function != "generic_gemm":
        return False
    A, B, get = arguments["A"], arguments["B"], arguments.get
    if any(format_of(x) is not FLOAT8 for x in (A, B)) or (get("D") is not None and format_of(get("D")) is not PLAIN):
        return True
    shapes = [torch.Size(x.size()) for x in (A, B)]
    if any(shape[-1] % _WHOLE or shape[:-1].numel() % _WHOLE for shape in shapes) or A._fp8_dtype == B._fp8_dtype == DType.kFloat8E5M2:
        return True
    along = [_has_copy(x, transposed) for x, transposed in ((A, not get("transA")), (B, get("transB")))]
    bias, half = get("bias"), get("output_dtype") is not None and to_torch(get("output_dtype")) in _HALF
    with_bias = bias is not None and (get("grad") or not half or bias.dtype is not to_torch(get("output_dtype")))
    more = get("gelu") or quantizer is not None or get("alpha") != 1.0 or get("extra_output") is not None
    return bool(not all(along) or with_bias or more)


def _has_copy(x: Any, transposed: Any) -> bool:
    return (x._transpose is not None and not x._transpose_invalid) if transposed else x._data is not None


def _bias_of_one_copy(function: str, arguments: Mapping[str, Any], quantizer: Any) -> bool:
    """Below capability 10.0 the gradient of a bias is summed by the kernel that also transposes, under delayed scaling."""
    sums = function.startswith("dbias_") or function == "bgrad_quantize"
    return sums and quantizer is not None and scheme_of(quantizer) is DELAYED and not (quantizer.rowwise_usage and quantizer.columnwise_usage)


_REACH = _empty, _without_vectors, _norm, _bias_of_one_copy, _product
