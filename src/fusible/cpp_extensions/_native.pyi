"""The compiled extension. Its functions check their arguments before they write, and release the GIL while they run.

Tensors are read by duck typing (``data_ptr()``, ``dtype``, ``shape``, ``is_contiguous()``); they must be contiguous and in host memory.
``num_threads``: threads for this call; 0 = the module's setting (``set_num_threads``), fewer where there is little work. In a forked child
every call runs on one thread. Errors: ``DTypeError`` (a ``TypeError``), ``ShapeError`` and ``ArgumentError`` (both a ``ValueError``).
"""

from typing import Protocol, TypeAlias

import torch

class TensorLike(Protocol):
    """What a native function needs of a tensor; a ``torch.Tensor`` is one."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...

DTypeLike: TypeAlias = torch.dtype | int | str
"""A torch dtype, a value of ``tex.DType``, or a name such as ``"float8_e4m3fn"``."""

def quantize(
    src: TensorLike,
    dst: TensorLike | None,
    scale: float | TensorLike,
    fp8_dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    bias_grad: TensorLike | None = None,
    noop: TensorLike | None = None,
    num_threads: int = 0,
) -> None:
    """``dst = fp8(src * scale)``: the product in float32, rounded to nearest even, saturated to +-448 (E4M3) or +-57344 (E5M2).

    Infinities saturate too; NaN becomes the format's NaN (0x7f / 0x7e) and signs are kept, those of zeros and NaNs included. One read
    of ``src`` serves every output that is given.

    Args:
        src: ``[*leading, cols]`` float32, float16 or bfloat16; read as a matrix ``[rows, cols]``.
        dst: ``[*leading, cols]`` uint8 or the FP8 dtype; None where only the transposed copy is wanted.
        scale: a number, or float32 ``[1]``.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        dst_transposed: ``[cols, *leading]`` uint8 or the FP8 dtype.
        amax: float32 ``[1]``, set to ``max |src|``: NaN if there is a NaN, else inf if there is an infinity, 0 when empty.
        accumulate_amax: keep the value in ``amax`` where it is larger (or NaN).
        bias_grad: float32 ``[cols]``, set to the sum of ``src`` over its rows, in an order that does not depend on the threads.
        noop: float32 ``[1]``; where it holds 1, nothing is written.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def dequantize(src: TensorLike, dst: TensorLike, scale_inv: float | TensorLike, fp8_dtype: DTypeLike, num_threads: int = 0) -> None:
    """``dst = value(src) * scale_inv``, in float32 and rounded once to the dtype of ``dst`` (float32, float16 or bfloat16).

    ``src`` holds codes as uint8 or as the FP8 dtype, ``dst`` as many elements.
    """

def amax(src: TensorLike, out: TensorLike | None = None, num_threads: int = 0) -> float:
    """``max |src|``: NaN if there is a NaN, else inf if there is an infinity, 0 when empty; also written to ``out``, float32 ``[1]``."""

def transpose_bytes(src: TensorLike, dst: TensorLike, num_threads: int = 0) -> None:
    """``dst[c, r] = src[r, c]`` for elements of one byte; ``src`` is ``[*leading, cols]`` and ``dst`` ``[cols, *leading]``."""

def gemm(
    left: TensorLike,
    left_transposed: bool,
    left_dtype: DTypeLike,
    left_scale: float | TensorLike,
    right: TensorLike,
    right_transposed: bool,
    right_dtype: DTypeLike,
    right_scale: float | TensorLike,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    bias: TensorLike | None = None,
    addend: TensorLike | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    gelu: int = 0,
    pre_gelu: TensorLike | None = None,
    column_sums: TensorLike | None = None,
    num_threads: int = 0,
) -> None:
    """``dst = g(alpha * left_scale * right_scale * op(left) @ op(right) + beta * addend + bias)``, accumulated in float32 and rounded once.

    Args:
        left: ``[*leading, depth]``, read as ``[rows, depth]``; or, ``left_transposed``, ``[depth, rows]``.
        left_dtype: what its elements are; codes may be given as uint8. FP8 and bfloat16, or any wide float.
        left_scale: what the values of its codes are to be multiplied by, as ``right_scale``.
        right: ``[depth, cols]``; or, ``right_transposed``, ``[cols, depth]``.
        dst: ``[rows, cols]`` of ``dtype``: float32, float16, bfloat16, or FP8 codes (uint8 or the FP8 dtype).
        dst_transposed: ``[cols, rows]`` codes, beside ``dst`` or without it.
        scale: of codes: ``fp8(result * scale)``. ``amax`` (float32 ``[1]``) is set to the largest magnitude of an FP8 result.
        accumulate_amax: keep the value in ``amax`` where it is larger (or NaN).
        bias: ``[cols]``, a wide float. ``addend``: ``[rows, cols]``, a wide float, read where ``beta`` is not 0; it may be ``dst``.
        gelu: 0: ``g`` does nothing. 1: ``g`` is the tanh form of GELU, and its input is written to ``pre_gelu``, where given. 2: the result is
            multiplied by GELU's derivative at ``pre_gelu``.
        pre_gelu: ``[rows, cols]``, a wide float.
        column_sums: float32 ``[cols]``, set to the sum of the float32 results over the rows, in an order that does not depend on the threads.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def set_level(name: str) -> None:
    """Makes kernels use at most this instruction set: one of ``usable_levels()``, or ``""`` for the best. For tests and comparisons."""

def get_level() -> str:
    """The instruction set that kernels use now."""

def usable_levels() -> list[str]:
    """The levels that this build has and this CPU runs, lowest first."""

def compiled_levels() -> list[str]:
    """The levels that this build has, lowest first."""

def cpu_features() -> list[str]:
    """The vector extensions of this CPU, of those that the levels look at."""

def set_num_threads(count: int) -> None:
    """Sets the threads of calls that do not say; 0 follows OpenMP, whose runtime is torch's (``torch.set_num_threads``)."""

def get_num_threads() -> int:
    """Threads that a large call gets now; 1 in a forked child and inside a parallel region."""

def has_openmp() -> bool:
    """Whether kernels can run on several threads."""

def compiler() -> str:
    """The compiler of this build and its version."""
