"""The classes of the interface: a record of FP8 scales, and the communicators that overlap a collective with a product.

The communicators are buffers that NVIDIA GPUs share. Here they are names: making one gives the native library's object where a backend provides that
library, and elsewhere raises the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusible.errors import NotServedError, check_callable, expected

__all__ = [
    "CommOverlap",
    "CommOverlapBase",
    "CommOverlapCore",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "CommOverlapP2PBase",
    "FP8TensorMeta",
]


class FP8TensorMeta:
    """The scales of n FP8 tensors under delayed scaling: ``scale``, ``scale_inv`` fp32 ``[n]``, ``amax_history`` fp32 ``[H, n]``; first None."""

    def __init__(self) -> None:
        self.scale: Any = None
        self.scale_inv: Any = None
        self.amax_history: Any = None


_provider: Callable[[str], Any] = lambda name: "no backend here wraps NVIDIA's native library"  # noqa: E731


def provide_classes(provider: Callable[[str], Any]) -> None:
    """Let ``provider(name)`` give the class that stands behind a communicator's name, or say in a phrase why there is none."""
    global _provider
    check_callable(provider, "provider of provide_classes")
    _provider = provider


class _Native:
    """A class whose instances are those of the native class of the same name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        native = _provider(cls.__name__)
        if not isinstance(native, str):
            return native(*args, **kwargs)
        do = "leave communication overlap off, or run where it is"
        raise NotServedError(expected("NVIDIA's native library", of=f"tex.{cls.__name__}", got=f"none ({native})", do=do))


class CommOverlapHelper(_Native):
    """``CommOverlapHelper(world_group=None, intra_node_group=None)``: how the ranks of a communicator find one another."""


class CommOverlapCore(_Native):
    """What every communicator is."""


class CommOverlapBase(CommOverlapCore):
    """A communicator of whole collectives."""


class CommOverlapP2PBase(CommOverlapCore):
    """A communicator of messages around a ring."""


class CommOverlap(CommOverlapBase):
    """``CommOverlap(buffer_shape, buffer_dtype, helper, tp_size, use_cublasmp=False, comm_type=RS, num_splits=4, num_max_streams=3, comm_cga_size=2,
    gemm_priority=0, comm_priority=0, num_comm_sm=16, set_sm_margin=True, atomic_gemm=False, rs_overlap_first_gemm=False)``: by whole collectives."""


class CommOverlapP2P(CommOverlapP2PBase):
    """``CommOverlapP2P(buffer_shape, buffer_dtype, helper, tp_size, comm_type, num_max_streams=3, comm_cga_size=1, gemm_priority=0, comm_priority=0,
    num_comm_sm=1, set_sm_margin=False, atomic_gemm=False, use_ce=True, aggregate=False, use_cublasmp=False)``: by messages around a ring."""
