"""Patches by which NVIDIA's Python package ``transformer_engine`` runs on ``fusible.tex``.

The package is pure Python over a compiled extension. It loads native libraries when imported, asks for the extension by a function, and asks the
device whether a format is supported; each of these is answered around the module that has it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusible import knobs, tex
from fusible.compat import linear_attention
from fusible.compat.device_map.mode import is_in_force
from fusible.compat.finder import Patch, after, replace
from fusible.compat.nvidia_state import patch_pickle, patch_state
from fusible.compat.nvidia_tensors import register_classes
from fusible.compat.triton_functions import TRITON_PATCHES
from fusible.compat.uncaptured import run_uncaptured

__all__ = ["PATCHES", "SUPPORT", "TENSOR_PATCHES", "support"]


@contextmanager
def _patch_common(module: ModuleType) -> Iterator[None]:
    """The package loads no native library: the finder has put tex under the extension's name already."""
    with knobs.setting(NVTE_PROJECT_BUILDING="1"):
        yield
    load: Callable[[str], None] = vars(module)["load_framework_extension"]

    def load_framework_extension(framework: str) -> None:
        if framework == "torch":
            importlib.import_module("transformer_engine_torch")
            _load_plugin(knobs.NVTE_PLUGIN.get())
            return
        try:
            load(framework)
        except FileNotFoundError as error:  # which the package warns of; an ImportError it takes for a framework that is not used
            raise ImportError(str(error)) from error

    vars(module)["load_framework_extension"] = load_framework_extension


def _load_plugin(name: str | None) -> None:
    """Call the plugin that ``NVTE_PLUGIN`` names, as the package does. Where it fails, warn and go on without it."""
    if name is None:
        return
    former = sys.modules["transformer_engine_torch"]
    try:
        importlib.import_module(name).load_plugins()
    except Exception as error:
        sys.modules["transformer_engine_torch"] = former
        warnings.warn(f"NVTE_PLUGIN={name} did not load, so that tex serves without it: {error}", RuntimeWarning, stacklevel=2)


@contextmanager
def _patch_jit(module: ModuleType) -> Iterator[None]:
    """The package's small fused functions are not compiled: on a host that costs more than it gains."""
    with knobs.setting(NVTE_TORCH_COMPILE="0"):
        yield


def _patch_storage(function: str) -> Patch:
    """Dequantize on the device where the data lies. The package would move the data to a GPU first, which bare storages cannot do."""

    def change(module: ModuleType) -> None:
        vars(module)[function].forward = staticmethod(lambda _, tensor, dtype: tex.dequantize(tensor, dtype))

    return after(change)


@after
def _patch_quantization(module: ModuleType) -> None:
    """A format is supported where a backend of tex quantizes to it, whatever the device. The default recipe still depends on the device."""
    for name, quantizer in SUPPORT.items():
        setattr(module, f"_compute_{name}_support", _asking_tex(quantizer))
    delayed: Callable[[], Any] = vars(module)["DelayedScaling"]

    def of_device(default: Callable[[], Any]) -> Callable[[], Any]:
        def get_default_fp8_recipe() -> Any:
            older = torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0)
            return delayed() if older else default()

        return get_default_fp8_recipe

    replace(module, "get_default_fp8_recipe", of_device)


def _asking_tex(quantizer_class: str) -> Callable[[], tuple[bool, str]]:
    return lambda: support(importlib.import_module("transformer_engine.pytorch.tensor"), quantizer_class)


def support(quantizers: ModuleType, quantizer_class: str) -> tuple[bool, str]:
    """Whether a backend of tex quantizes by a class of ``quantizers``, and why not."""
    quantizer = getattr(quantizers, quantizer_class)(**_OPTIONS.get(quantizer_class, {"fp8_dtype": tex.DType.kFloat8E4M3}), **_BOTH)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decision = tex.explain("quantize", torch.empty(0, dtype=torch.bfloat16, device=device), quantizer)
    return decision.backend is not None, "" if decision.backend is not None else str(decision)


_BOTH = {"rowwise": True, "columnwise": True}
_OPTIONS: dict[str, dict[str, Any]] = {
    "Float8CurrentScalingQuantizer": {"fp8_dtype": tex.DType.kFloat8E4M3, "device": "cpu"},
    "NVFP4Quantizer": {},
}
SUPPORT = {
    "fp8": "Float8CurrentScalingQuantizer",
    "fp8_block_scaling": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}
"""By the format in the names of NVIDIA's functions: the quantizer that is asked about."""

TENSOR_PATCHES: dict[str, Patch] = {
    "transformer_engine.pytorch.tensor": after(register_classes),
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": _patch_storage("_FromFloat8Func"),
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": _patch_storage("_FromMXFP8Func"),
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": _patch_storage("_FromNVFP4Func"),
}
"""By module: the patches by which every backend makes and reads the package's quantized tensors."""


@after
def _patch_linear_attention(module: ModuleType) -> None:
    """Tensors of the host go through our delta rules; the package's are cuDNN's."""

    def ours_on_host(theirs: Callable[[str, str], Callable[..., Any]]) -> Callable[[str, str], Callable[..., Any]]:
        def _import_linear_attention_op(op_name: str, variant: str) -> Callable[..., Any]:
            own = getattr(linear_attention, op_name)
            return lambda q, *rest, **named: (own if q.is_cpu else theirs(op_name, variant))(q, *rest, **named)

        return _import_linear_attention_op

    replace(module, "_import_linear_attention_op", ours_on_host)


class _OfTheDevice(torch.Tensor):
    """A tensor of the host that says it is on a CUDA device: the package asks for the device's type alone."""

    device: Any = SimpleNamespace(type="cuda")  # pyright: ignore[reportIncompatibleVariableOverride]


@after
def _patch_grouped_linear(module: ModuleType) -> None:
    """The package refuses ``m_splits`` that are not on a GPU; beside an input on the host, those on the host are accepted."""
    autograd: Any = vars(module)["_GroupedLinear"]
    theirs = getattr(autograd, "of_package", None) or (autograd.forward, autograd._forward_grouped_tensor)

    def forward(ctx: Any, inp: torch.Tensor, m_splits: torch.Tensor, *rest: Any) -> Any:
        return theirs[0](ctx, inp, m_splits.as_subclass(_OfTheDevice) if inp.is_cpu else m_splits, *rest)

    def forward_grouped_tensor(ctx: Any, *, m_splits: torch.Tensor, **named: Any) -> Any:
        return theirs[1](ctx, m_splits=m_splits.as_subclass(torch.Tensor), **named)

    autograd.forward, autograd._forward_grouped_tensor = staticmethod(forward), staticmethod(forward_grouped_tensor)
    autograd.of_package = theirs


@after
def _patch_graph(module: ModuleType) -> None:
    """Where there are no CUDA graphs, modules that the package would capture run eagerly."""

    def eager_without_graphs(theirs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(theirs)

        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available() and not is_in_force():
                return theirs(*args, **kwargs)
            options = signature.bind(*args, **kwargs).arguments
            return run_uncaptured(vars(module)["autocast"], options["modules"], options)

        return make_graphed_callables

    replace(module, "make_graphed_callables", eager_without_graphs)


PATCHES: dict[str, Patch] = {
    "megatron.core.extensions.transformer_engine": patch_pickle,
    "transformer_engine.common": _patch_common,
    "transformer_engine.pytorch.attention.linear_attention.base": _patch_linear_attention,
    "transformer_engine.pytorch.graph": _patch_graph,
    "transformer_engine.pytorch.jit": _patch_jit,
    "transformer_engine.pytorch.module.base": patch_state,
    "transformer_engine.pytorch.module.grouped_linear": _patch_grouped_linear,
    "transformer_engine.pytorch.ops.op": patch_state,
    "transformer_engine.pytorch.quantization": _patch_quantization,
    **TENSOR_PATCHES,
    **TRITON_PATCHES,
}
