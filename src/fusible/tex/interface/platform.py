"""What belongs to NVIDIA's libraries: versions, communication, expert parallelism, distributed linear algebra."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import DTypeLike, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import GivenDType

__all__ = ["Platform"]

_NVSHMEM = "needs NVSHMEM, NVIDIA's memory shared between GPUs"
_CUSOLVERMP = "needs cuSOLVERMp, NVIDIA's linear algebra over several GPUs"
_NCCL_EP = "needs NCCL's expert-parallel kernels on NVIDIA GPUs"
_USERBUFFERS = "needs the userbuffers of CommOverlap on NVIDIA GPUs"


class Platform:
    """Queries about NVIDIA's libraries, which every backend can answer for itself, and functions that are nothing but calls of them.

    The latter are declared with what they need. No backend of this package but the one that wraps NVIDIA's native library serves them; calling one
    elsewhere raises ``NotServedError``, which is a ``NotImplementedError``.
    """

    @function()
    def get_cublasLt_version(self) -> int:
        """The version of cuBLASLt, ``major * 10000 + minor * 100 + patch``. A backend that multiplies without cuBLASLt and has all that
        callers ask the version for answers 130600: FP8 products (from 120103), and grouped ones of operands in every format, whose sizes the
        device knows (from 130300 to 130600)."""

    @function()
    def get_cudnn_version(self) -> int:
        """The version of cuDNN, ``major * 10000 + minor * 100 + patch``. A backend without cuDNN answers 92500, from which on no caller
        takes a way around an older version's gaps."""

    @function()
    def get_num_cublas_streams(self) -> int:
        """How many products a backend may run side by side, and so how many workspaces callers keep; 1 where products are made one by one."""

    @function()
    def get_stream_priority_range(self, device_id: int = -1) -> tuple[int, int]:
        """``(lowest, highest)`` priority of a stream on the device (-1: the current one), the smaller first; ``(0, 0)`` without priorities."""

    @function()
    def device_supports_multicast(self, device_id: int = -1) -> bool:
        """Whether the device (-1: the current one) writes to several devices at once."""

    @function()
    def ubuf_built_with_mpi(self) -> bool:
        """Whether the buffers of overlapped communication are set up by MPI, rather than by torch.distributed."""

    @function()
    def nvte_built_with_cublasmp(self) -> bool:
        """Whether overlapped communication can go through cuBLASMp."""

    @function(unserved=_NVSHMEM)
    def init_nvshmem_backend(self, process_group: Any) -> None:
        """Set NVSHMEM up among the ranks of a ``torch.distributed`` process group."""

    @function(unserved=_NVSHMEM)
    def create_nvshmem_tensor(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        """A tensor of ``shape`` and torch ``dtype`` in memory that every rank can reach."""

    @function("src", unserved=_NVSHMEM)
    def nvshmem_send_on_current_stream(self, src: Tensor, dst: Tensor, peer: int, signal: Tensor) -> None:
        """Write ``src`` to ``dst`` on rank ``peer``, then raise ``signal`` there; in order on the current stream."""

    @function("signal", unserved=_NVSHMEM)
    def nvshmem_wait_on_current_stream(self, signal: Tensor, wait_kind: str) -> None:
        """Let the current stream wait for ``signal``; ``wait_kind`` says how: ``"kernel"``, ``"nvshmem"`` or ``"stream"``."""

    @function(unserved=_NVSHMEM)
    def nvshmem_finalize(self) -> None:
        """Give back what ``init_nvshmem_backend`` took."""

    @function(unserved=_CUSOLVERMP)
    def cusolvermp_ctx_create(self, nccl_comm_ptr: int, nranks: int, rank: int) -> int:
        """The address of a cuSOLVERMp context over an NCCL communicator, which is given by its address."""

    @function(unserved=_CUSOLVERMP)
    def cusolvermp_ctx_destroy(self, ctx_ptr: int) -> None:
        """Give back a context that ``cusolvermp_ctx_create`` made."""

    @function("x", unserved=_CUSOLVERMP)
    def newton_schulz(self, ctx_ptr: int, m: int, n: int, x: Tensor, num_iterations: int, coefficients: Sequence[float]) -> None:
        """Orthogonalize an ``m x n`` matrix by Newton-Schulz iterations, in place in ``x``, this rank's columns of it."""

    @function(unserved=_NCCL_EP)
    def ep_initialize(
        self,
        comm_ptr: int,
        group_name: str,
        num_experts: int,
        max_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        hidden_dim: int,
        max_num_sms: int = 0,
        max_token_dtype: GivenDType = None,
        zero_copy: bool = False,
        num_topk: int = 0,
        drop_on_overflow: bool = False,
    ) -> None:
        """Set expert parallelism up over an NCCL communicator, which is given by its address."""

    @function(unserved=_NCCL_EP)
    def ep_finalize(self) -> None:
        """Give back what ``ep_initialize`` took."""

    @function(unserved=_NCCL_EP)
    def ep_get_zero_copy(self) -> bool:
        """Whether ``ep_initialize`` was asked for transfers without a staging copy."""

    @function(unserved=_NCCL_EP)
    def ep_zero_copy_supported(self) -> bool:
        """Whether transfers without a staging copy are possible."""

    @function(unserved=_NCCL_EP)
    def ep_handle_mem_size(self, top_k: int, dispatch_output_per_expert_alignment: int = 0) -> int:
        """The bytes of ``handle_mem`` for tokens that go to ``top_k`` experts each."""

    @function("topk_idx", unserved=_NCCL_EP)
    def ep_prepare(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens_per_expert: Tensor,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        total_recv_tokens: Tensor,
    ) -> None:
        """Plan the exchange of tokens; writes ``handle_mem``, ``tokens_per_expert`` and ``total_recv_tokens``."""

    @function("tokens", unserved=_NCCL_EP)
    def ep_dispatch(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens: Tensor,
        topk_weights: Tensor,
        recv_tokens: Tensor | None,
        recv_topk_weights: Tensor | None,
        tokens_scale_inv: Tensor | None = None,
        recv_scale_inv: Tensor | None = None,
    ) -> None:
        """Send tokens to the ranks of their experts; writes ``recv_tokens``, ``recv_topk_weights`` and, of MXFP8 tokens, ``recv_scale_inv``."""

    @function("tokens", unserved=_NCCL_EP)
    def ep_prepare_and_dispatch(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens: Tensor,
        topk_weights: Tensor,
        tokens_per_expert: Tensor,
        total_recv_tokens: Tensor,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        recv_tokens: Tensor | None = None,
        recv_topk_weights: Tensor | None = None,
        recv_scale_inv: Tensor | None = None,
        tokens_scale_inv: Tensor | None = None,
    ) -> list[Any]:
        """``ep_prepare`` and ``ep_dispatch`` in one; gives the receive buffers that it made, or ``[]`` where they were given."""

    @function("expert_out", unserved=_NCCL_EP)
    def ep_combine(self, handle_mem: Tensor, expert_out: Tensor, result: Tensor) -> None:
        """Send what the experts made back to the ranks of the tokens, and add it up in ``result``."""

    @function("grad", unserved=_NCCL_EP)
    def ep_dispatch_bwd(self, handle_mem: Tensor, grad: Tensor, g_recv_topk_weights: Tensor, grad_tokens: Tensor, grad_topk_weights: Tensor) -> None:
        """The gradient of ``ep_dispatch``; writes ``grad_tokens`` and ``grad_topk_weights``."""

    @function("grad", unserved=_NCCL_EP)
    def ep_combine_bwd(
        self,
        handle_mem: Tensor,
        grad: Tensor,
        grad_expert_out: Tensor,
        grad_scale_inv: Tensor | None = None,
        grad_expert_out_scale_inv: Tensor | None = None,
    ) -> None:
        """The gradient of ``ep_combine``; writes ``grad_expert_out`` and, of an MXFP8 gradient, its scales."""

    @function(unserved=_USERBUFFERS)
    def bulk_overlap_ag_with_external_gemm(self, allgather_communicator: Any, send_stream: Any, recv_stream: Any) -> None:
        """Gather the communicator's buffer on the two streams while a product runs elsewhere."""
