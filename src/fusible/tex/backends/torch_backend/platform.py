"""The queries about a platform, answered for torch operations: constants, for nothing here depends on NVIDIA's libraries."""

from __future__ import annotations

from fusible.tex.interface.platform import Platform

__all__ = ["PlatformKernels"]


class PlatformKernels(Platform):
    def get_cublasLt_version(self) -> int:
        return 130600

    def get_cudnn_version(self) -> int:
        return 92500

    def get_num_cublas_streams(self) -> int:
        return 1

    def get_stream_priority_range(self, device_id: int = -1) -> tuple[int, int]:
        return 0, 0

    def device_supports_multicast(self, device_id: int = -1) -> bool:
        return False

    def ubuf_built_with_mpi(self) -> bool:
        return False

    def nvte_built_with_cublasmp(self) -> bool:
        return False
