"""The enumerations of the tex interface, with NVIDIA's values (Transformer Engine 2.20.2).

Each is an ``IntEnum``: usable in ``isinstance``, convertible by ``int()``, and picklable by name. The members are exactly the
exported ones: NVIDIA's Python package compares ``__members__`` with its own and refuses to import over a superset.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "CommOverlapAlgo",
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "Float8BlockScaleTensorFormat",
    "NVTEQBHistogramMode",
    "NVTERoutingMapFormat",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]


class DType(IntEnum):
    """Element types that cross the interface."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: int) -> DType:
        """The member of the value of ``dtype``: an integer, or a member of another such enumeration."""
        return cls(int(dtype))


class Float8BlockScaleTensorFormat(IntEnum):
    """How the scales of a block-scaled tensor lie: as a product reads them, or compact."""

    GEMM_READY = 0
    COMPACT = 1
    INVALID = 2


class NVTEScalingMode(IntEnum):
    """How a quantized tensor is scaled: as a whole, or in blocks of one or two dimensions."""

    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


class NVTE_QKV_Format(IntEnum):
    """Order of the token dimensions: s = sequence, b = batch, t = tokens of all sequences, h = heads, d = head width."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


class NVTE_QKV_Layout(IntEnum):
    """How Q, K and V lie in memory: one packed buffer, Q beside a packed KV, or three buffers."""

    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24
    NVTE_BHSD_BHSD_BHSD = 25
    NVTE_QKV_Layout_NOT_SET = 26


class NVTE_Bias_Type(IntEnum):
    """What is added to attention scores, before or after they are scaled."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    """Which keys a query may see: of its own sequence, and none after it; bottom right aligns the last query with the last key."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    """Whether attention probabilities may sum to less than one: by a one in the denominator, or by a learnable offset per head."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_Fused_Attn_Backend(IntEnum):
    """Which family of attention kernels serves a problem; none where ``NVTE_No_Backend``."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class NVTERoutingMapFormat(IntEnum):
    """How a routing map of experts is stored: a byte or a bit per pair of token and expert."""

    BYTEMAP = 0
    BITMAP_U8 = 1


class NVTEQBHistogramMode(IntEnum):
    """How a histogram is made: by two kernels, or by one with atomic additions."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


class CommOverlapType(IntEnum):
    """The collective that is overlapped with a product: reduce-scatter or all-gather."""

    RS = 0
    AG = 1


class CommOverlapAlgo(IntEnum):
    """How a collective is overlapped with a product."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7
    EXTERNAL_BULK_OVERLAP_AG = 8


class FP8FwdTensors(IntEnum):
    """The places of the forward tensors of up to three products in an array of scales."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """The places of the gradients of up to three products in an array of scales."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5
