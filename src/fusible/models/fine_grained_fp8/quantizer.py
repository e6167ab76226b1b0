"""transformers' loader of FP8 models for machines without a GPU, and the kernels that its FP8 modules call. This file imports transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations import finegrained_fp8, hub_kernels
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.import_utils import is_accelerate_available, is_torch_xpu_available

from fusible.errors import CheckpointError, MissingModuleError, NotServedError, expected
from fusible.models.fine_grained_fp8.products import batched_product, grouped_product, product
from fusible.models.fine_grained_fp8.weights import why_no_weight
from fusible.tex.calls.transaction import Write, run

__all__ = ["FusibleFP8Quantizer", "install", "uninstall"]

_KERNELS = "_FINEGRAINED_FP8"
"""Where transformers keeps the kernels of its FP8 modules, once they are loaded."""
_HUB_NAME = "finegrained-fp8"
_HUB_NAMES = {"matmul": "matmul_2d", "batched_matmul": "matmul_batched", "grouped_matmul": "matmul_grouped"}
"""Of the package of kernels, and of its functions."""
_DEQUANTIZE = "pass quantization_config=FineGrainedFP8Config(dequantize=True)"


class FusibleFP8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' own loader, but that a machine without a GPU need not dequantize: there Fusible computes the products."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if _has_gpu() or self.quantization_config.dequantize:
            super().validate_environment(*args, **kwargs)
        elif not is_accelerate_available():
            of, do = "transformers' loader of FP8 models", "install accelerate"
            raise MissingModuleError(expected("the package accelerate", of=of, got="none", do=do), name="accelerate")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        super()._process_model_before_weight_loading(model, **kwargs)
        if not _has_gpu():
            _check(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        for module in model.modules():  # beside a GPU, transformers would try DeepGEMM first
            if isinstance(module, finegrained_fp8.FP8Linear | finegrained_fp8.FP8Experts) and all(p.is_cpu for p in module.parameters()):
                module._deepgemm_disabled = True
        return model


class _Kernels(finegrained_fp8.FineGrainedFP8):
    """The functions that FP8 modules call: Fusible's for tensors on a CPU, and for others those that were there ``before``, or transformers' own."""

    before: Any

    @classmethod
    def of(cls, before: Any, quantize: bool) -> Any:
        made = cls(
            matmul=_on_cpu(partial(product, quantize=quantize), "matmul", before),
            batched_matmul=_on_cpu(partial(_batched, quantize=quantize), "batched_matmul", before),
            grouped_matmul=_on_cpu(partial(_grouped, quantize=quantize), "grouped_matmul", before),
        )
        object.__setattr__(made, "before", before)
        return made


def install(quantize: bool) -> None:
    """Put the loader and the kernels in the places of transformers' own. ``quantize``: of ``product``; that of the latest call holds."""
    made = _Kernels.of(_before(), quantize)
    run([partial(setattr, finegrained_fp8, _KERNELS, made), *_exchanged(FineGrainedFP8HfQuantizer, FusibleFP8Quantizer)])


def uninstall() -> None:
    """Give transformers its loader and its kernels back; models that it has loaded compute no more on a CPU."""
    run([partial(setattr, finegrained_fp8, _KERNELS, _before()), *_exchanged(FusibleFP8Quantizer, FineGrainedFP8HfQuantizer)])


def _before() -> Any:
    kernels = getattr(finegrained_fp8, _KERNELS)
    return kernels.before if isinstance(kernels, _Kernels) else kernels


def _exchanged(one: type, other: type) -> Iterator[Write]:
    return (partial(AUTO_QUANTIZER_MAPPING.__setitem__, name, other) for name, registered in AUTO_QUANTIZER_MAPPING.items() if registered is one)


def _on_cpu(ours: Callable[..., torch.Tensor], name: str, before: Any) -> Callable[..., torch.Tensor]:
    def computed(x: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        return (ours if x.is_cpu else _theirs(name, before))(x, *arguments, **more)

    return computed


def _theirs(name: str, before: Any) -> Any:
    """A kernel of transformers' hub, which it would have loaded at the first call."""
    kernels = hub_kernels.lazy_load_kernel(_HUB_NAME) if before is None else None
    found = getattr(before, name, None) or getattr(kernels, _HUB_NAMES[name], None)
    if found is None:
        do = "install the package kernels, or move the model to the CPU"
        raise NotServedError(expected("tensors on a CPU, or transformers' own kernels", of=f"{name} of FP8 modules", got="neither", do=do))
    return found


def _batched(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, expert_ids: torch.Tensor, block_size: Any, quantize: bool
) -> torch.Tensor:
    return batched_product(x, weight, scale, expert_ids, block_size, quantize=quantize)


def _grouped(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, offsets: torch.Tensor, block_size: Any, quantize: bool, **_: Any
) -> torch.Tensor:
    """``offsets [groups]``: the row behind each group."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return grouped_product(x, weight, scale, sizes, block_size, quantize=quantize)


def _has_gpu() -> bool:
    return torch.cuda.is_available() or is_torch_xpu_available()


def _check(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for the first of a model's FP8 modules whose weights no product takes, before anything is read of them."""
    for name, module in model.named_modules():
        for own, weight, scale in _weights(module):
            why = why_no_weight(weight, scale, module.block_size)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            if why:
                wanted = "E4M3 in blocks whose columns are multiples of 128, or 32 with scales of E8M0"
                raise CheckpointError(expected(wanted, of=f"{name}.{own}", got=why, do=_DEQUANTIZE))


def _weights(module: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The names of an FP8 module's weights, and of each one matrix that a product takes, with its scales."""
    if isinstance(module, finegrained_fp8.FP8Linear):
        groups = getattr(module, "n_groups", 1)
        weight, scale = module.weight, module.weight_scale_inv
        yield "weight", weight[: len(weight) // groups], scale[: len(scale) // groups] if scale.ndim else scale
    elif isinstance(module, finegrained_fp8.FP8Experts):
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weight = getattr(module, name, None)
            if weight is not None:
                yield name, weight[0], getattr(module, f"{name}_scale_inv")[0]
