"""What ``transformer_engine.pytorch.quantization`` has with signatures of its own: contexts, questions of support, and what is in force."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fusible import pytorch, quantized
from fusible.compat.nvidia_package import SUPPORT, support
from fusible.compat.te_recipes import DelayedScaling
from fusible.errors import NotServedError, expected
from fusible.pytorch.engine.autocast import current_autocast, leave_autocasts
from fusible.pytorch.quantized_init import current_model_init, leave_model_inits, quantized_model_init
from fusible.quantized import Recipe

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

fp8_model_init = quantized_model_init


class autocast(pytorch.autocast):
    """``fusible.autocast`` with the order of arguments that scripts know. Without ``amax_reduction_group`` the maximum of amaxes is taken over all
    processes of ``torch.distributed``, where there are several: each of them calls the same modules in the same order.

    Raises ``NotServedError`` for ``calibrating``: Fusible collects no statistics of passes that are not quantized.
    """

    def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None, amax_reduction_group: Any = None) -> None:
        if calibrating:
            do = "quantize from the first step, or take a recipe without state"
            raise NotServedError(expected("calibrating=False", of="autocast", got=calibrating, do=do))
        if amax_reduction_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            amax_reduction_group = dist.group.WORLD
        super().__init__(enabled, get_default_recipe() if recipe is None else recipe, amax_reduction_group=amax_reduction_group)


def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None) -> autocast:
    """``autocast`` by its former name and arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def get_default_recipe() -> Recipe:
    """The recipe of an ``autocast`` that is given none."""
    return DelayedScaling()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether tensors can be quantized by ``DelayedScaling`` and ``Float8CurrentScaling``; ``return_reason``: ``(answer, why not)``."""
    return _available("fp8", return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As ``is_fp8_available``, by ``MXFP8BlockScaling``."""
    return _available("mxfp8", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As ``is_fp8_available``, by ``Float8BlockScaling``."""
    return _available("fp8_block_scaling", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As ``is_fp8_available``, by ``NVFP4BlockScaling``."""
    return _available("nvfp4", return_reason)


def check_fp8_support() -> tuple[bool, str]:
    """``is_fp8_available`` with the reason, by its former name."""
    return support(quantized, SUPPORT["fp8"])


def check_mxfp8_support() -> tuple[bool, str]:
    """``is_mxfp8_available`` with the reason, by its former name."""
    return support(quantized, SUPPORT["mxfp8"])


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """``is_fp8_block_scaling_available`` with the reason, by its former name."""
    return support(quantized, SUPPORT["fp8_block_scaling"])


def check_nvfp4_support() -> tuple[bool, str]:
    """``is_nvfp4_available`` with the reason, by its former name."""
    return support(quantized, SUPPORT["nvfp4"])


def _available(name: str, return_reason: bool) -> bool | tuple[bool, str]:
    answer = support(quantized, SUPPORT[name])
    return answer if return_reason else answer[0]


class FP8GlobalStateManager:
    """The contexts that are open in this thread, by the methods that operations call. Only ``reset`` changes anything: use ``autocast``."""

    @staticmethod
    def reset() -> None:
        """Forget the contexts that are open in this thread: no recipe is in force, and parameters are made unquantized."""
        leave_autocasts()
        leave_model_inits()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether an ``autocast`` with a recipe is open."""
        return current_autocast().recipe is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """Its recipe, or the default one."""
        return current_autocast().recipe or get_default_recipe()

    @staticmethod
    def get_fp8_group() -> Any:
        """The group over which it reduces amaxes, or None."""
        return current_autocast().amax_reduction_group

    @staticmethod
    def is_fp8_calibration() -> bool:
        """False: see ``autocast``."""
        return False

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Whether a ``quantized_model_init`` that is enabled is open."""
        context = current_model_init()
        return context is not None and context.recipe is not None

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Whether it keeps the values that weights are quantized from."""
        context = current_model_init()
        return context is not None and context.recipe is not None and context.preserve_high_precision_init_val

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
