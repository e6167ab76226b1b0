"""The compiled extension. Its functions check their arguments before they write, and release the GIL while they run.

Tensors are read by torch's DLPack exchange interface or by duck typing (``data_ptr()``, ``dtype``, ``shape``, ``is_contiguous()``). They must be in
host memory of their own (one that was freed, faked or deferred is refused), and contiguous unless they are ``StridedTensorLike``. Of an argument that
is only read, torch's negative bit is resolved; of one that is written, it is refused. Indices in tensors are checked against what they point into.
``num_threads``: threads for this call; 0 = the module's setting (``set_num_threads``), fewer where there is little work. In a forked child
every call runs on one thread. Errors: ``DTypeError`` (a ``TypeError``), ``ShapeError`` and ``ArgumentError`` (both a ``ValueError``), and
``MemoryError`` where there is no scratch memory: what the call was to write is unspecified then, and the next call is as good as any.
"""

from collections.abc import Callable, Sequence
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

class StridedTensorLike(Protocol):
    """A tensor that need not be contiguous."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...

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

def quantize_mxfp8(
    src: TensorLike,
    fp8_dtype: DTypeLike,
    dst: TensorLike | None = None,
    exponents: TensorLike | None = None,
    dst_columns: TensorLike | None = None,
    exponents_columns: TensorLike | None = None,
    tiled: bool = False,
    num_threads: int = 0,
) -> None:
    """MXFP8: ``dst = fp8(src / 2^e)`` in blocks of 32 along each row, and, or, along each column; both from one read.

    ``2^e`` is the least power of two that is not below ``amax / fp8_max`` of the block, and its byte is ``e + 127``: 0 for a block of zeros, 0xFE
    where there is an infinity, 0xFF where there is a NaN, of which all codes are NaN then. Source: OCP Microscaling Formats specification 1.0 (2023).

    Args:
        src: ``[*leading, cols]`` float32, float16 or bfloat16; read as a matrix ``[rows, cols]`` whose sizes are multiples of 32.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        dst: as many elements, uint8 or the FP8 dtype; with ``exponents``, a matrix of at least ``rows x cols / 32`` bytes.
        dst_columns: the same; with ``exponents_columns``, a matrix of at least ``rows / 32 x cols`` bytes.
        tiled: squares of 32 have one exponent, which each of their lines repeats; the two copies have equal codes.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def dequantize_mxfp8(src: TensorLike, exponents: TensorLike, along_rows: bool, dst: TensorLike, fp8_dtype: DTypeLike, num_threads: int = 0) -> bool:
    """``dst = value(src) * 2^(exponent - 127)``, in float32 and rounded once to the dtype of ``dst``; NaN for an exponent of 0xFF.

    ``src``, ``exponents``: a copy that ``quantize_mxfp8`` gives, whose blocks lie along rows or columns. The result says whether every value is 0 or
    within 2^-60 .. 2^60: then bfloat16 holds all of them, and no product of two is subnormal or infinite.
    """

def quantize_nvfp4(
    src: TensorLike,
    amax: float | TensorLike,
    dst: TensorLike,
    scale_bytes: TensorLike,
    columns: bool = False,
    tiled: bool = False,
    seed: TensorLike | None = None,
    num_threads: int = 0,
) -> None:
    """NVFP4: E2M1 codes, two a byte, of blocks of 16 along each row, or along each column; the lines of ``dst`` are those rows, or columns.

    With ``S = min(448 * 6 / amax, FLT_MAX)``, 1 where ``amax`` is 0 or infinite: the scale of a block is ``e4m3(max |block| * S / 6)``, and its codes
    are ``e2m1(block / (scale / S))``, saturated; of a block with a NaN they are 6. Each step is float32, rounded once. Source: NVIDIA 2025,
    arXiv:2509.25149.

    Args:
        src: ``[*leading, cols]`` float32, float16 or bfloat16; read as a matrix ``[rows, cols]`` whose sizes are multiples of 16.
        dst: half as many bytes; with ``scale_bytes``, a matrix of at least ``lines x blocks`` bytes of E4M3.
        tiled: squares of 16 have one scale, which each of their lines repeats.
        seed: int64 ``[1]``: round to one of two neighbours, by the words of the places in ``dst``; None: to the nearest, ties to even.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def transform_columns(
    src: TensorLike,
    transform: TensorLike,
    dst: TensorLike,
    out: TensorLike | None = None,
    source_amax: TensorLike | None = None,
    num_threads: int = 0,
) -> float:
    """``dst = src`` with each block of 16 elements of a column, rounded to bfloat16, times ``transform``, in float32, and rounded so again.

    Args:
        src: as in ``quantize_nvfp4``, which casts what is written.
        transform: float32 ``[16, 16]``.
        dst: bfloat16, of as many elements; it may be ``src``.
        out: float32 ``[1]``, for what is returned.
        source_amax: float32 ``[1]``, for ``max |src|``.

    Returns:
        ``max |dst|``: NaN if there is a NaN, else inf if there is an infinity, 0 when empty.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def dequantize_nvfp4(src: TensorLike, scale_bytes: TensorLike, dst: TensorLike, num_threads: int = 0) -> None:
    """``dst = value(code) * value(scale)``, exactly: lines that ``quantize_nvfp4`` wrote, into float32, float16 or bfloat16 ``[lines, length]``."""

def quantize_block_fp8(
    src: TensorLike,
    fp8_dtype: DTypeLike,
    dst: TensorLike | None = None,
    scale_inv: TensorLike | None = None,
    dst_columns: TensorLike | None = None,
    scale_inv_columns: TensorLike | None = None,
    tiled: bool = False,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    num_threads: int = 0,
) -> None:
    """``dst = fp8(src * scale)`` in blocks of 128 along each row, and, or, along each column; both from one read. Written beside it is ``1 / scale``.

    ``scale = fp8_max / max(amax, epsilon)`` of the block in float32; where that overflows, the largest finite number of the dtype of ``src``; 1 where
    the amax is 0, infinite or NaN. A NaN keeps its sign, infinities saturate. Source: DeepSeek-AI 2024, arXiv:2412.19437.

    Args:
        src: ``[*leading, cols]`` float32, float16 or bfloat16; read as a matrix ``[rows, cols]``, whose last blocks may be smaller.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        dst: as many elements, uint8 or the FP8 dtype; with ``scale_inv``, a float32 matrix of at least ``ceil(cols / 128) x rows``.
        dst_columns: the same, transposed: ``[cols, rows]``; with ``scale_inv_columns``, at least ``ceil(rows / 128) x cols``.
        tiled: squares of 128 x 128 have one scale: at least ``ceil(rows / 128) x ceil(cols / 128)``, of ``scale_inv_columns`` the transpose.
        power_of_two: scales are rounded down to powers of two.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def dequantize_block_fp8(src: TensorLike, scale_inv: TensorLike, tiled: bool, dst: TensorLike, fp8_dtype: DTypeLike, num_threads: int = 0) -> bool:
    """``dst = value(src) * scale``, in float32 and rounded once to the dtype of ``dst``.

    ``src``, ``scale_inv``: a copy that ``quantize_block_fp8`` gives, as it is stored: blocks lie along its last dimension. The result says whether
    every scale is a power of two and every value 0 or within 2^-60 .. 2^60: then bfloat16 holds all of them, and no product of two is subnormal or
    infinite.
    """

def amax(src: TensorLike, out: TensorLike | None = None, num_threads: int = 0) -> float:
    """``max |src|``: NaN if there is a NaN, else inf if there is an infinity, 0 when empty; also written to ``out``, float32 ``[1]``."""

def column_sums(src: TensorLike, dst: TensorLike, num_threads: int = 0) -> None:
    """``dst[c] = sum over r of src[r, c]``, in float32, in an order that does not depend on the threads: at most 64 parts of the rows, each added up
    row by row. ``src``: ``[*leading, cols]`` float32, float16 or bfloat16; ``dst``: float32 ``[cols]``."""

def transpose_bytes(src: TensorLike, dst: TensorLike, num_threads: int = 0) -> None:
    """``dst[c, r] = src[r, c]`` for elements of one byte; ``src`` is ``[*leading, cols]`` and ``dst`` ``[cols, *leading]``."""

def activation(
    name: str,
    src: TensorLike,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    num_threads: int = 0,
) -> None:
    """``dst = f(src)``, in float32 and rounded once to ``dtype``, or quantized as by ``quantize``; one read serves every output that is given.

    Args:
        name: ``f``: sigmoid, or an elementwise activation of ``tex`` by its name.
        src: float32, float16 or bfloat16.
        dst: as many elements of ``dtype`` (uint8 too, for FP8); None where only the transposed copy is wanted.
        dtype: a wide float or an FP8 format; what follows is for the latter.
        dst_transposed, scale, amax, accumulate_amax: as in ``quantize``; ``amax`` is that of the float32 results.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def activation_backward(
    name: str,
    grad: TensorLike,
    src: TensorLike,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    bias_grad: TensorLike | None = None,
    num_threads: int = 0,
) -> None:
    """``dst = grad * f'(src)``; ``bias_grad``, float32 ``[cols]``, is set to the sum of the float32 results over the rows.

    ``grad`` and ``src`` may differ in dtype; everything else is as in ``activation``.
    """

def gated_activation(
    name: str,
    src: TensorLike,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    beta1: float = 4.0,
    beta2: float = 25.0,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    num_threads: int = 0,
) -> None:
    """``dst[r, c] = f(a, b)`` with ``a = src[r, c]`` and ``b = src[r, H + c]``, for ``src`` of ``[*leading, 2H]`` and ``dst`` of ``[*leading, H]``.

    ``name`` is geglu, qgeglu, reglu, glu, swiglu, sreglu, situglu (of ``beta1, beta2``) or clamped_swiglu (of ``limit, alpha, offset``);
    everything else is as in ``activation``.
    """

def gated_activation_backward(
    name: str,
    grad: TensorLike,
    src: TensorLike,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    beta1: float = 4.0,
    beta2: float = 25.0,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    num_threads: int = 0,
) -> None:
    """``dst = [grad * df/da, grad * df/db]`` side by side, of the shape of ``src``, for ``grad`` of ``[*leading, H]``; see ``gated_activation``."""

def norm_fwd(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None,
    mu: TensorLike | None,
    rsigma: TensorLike,
    eps: float | TensorLike,
    zero_centered_gamma: bool,
    dst: TensorLike | None,
    dtype: DTypeLike,
    dst_transposed: TensorLike | None = None,
    scale: float | TensorLike = 1.0,
    amax: TensorLike | None = None,
    accumulate_amax: bool = False,
    num_threads: int = 0,
) -> None:
    """``dst = (x - mu) * rsigma * g + bias`` (LayerNorm) or, where ``mu`` is None, ``dst = x * rsigma * g`` (RMSNorm), in float32.

    Per row, ``mu = mean(x)`` and ``rsigma = 1 / sqrt(mean((x - mu)^2) + eps)``, the mean taken first; ``g`` is ``weight``, plus 1 where
    ``zero_centered_gamma``. Results are rounded once: to ``dtype``, or to FP8 after multiplication by ``scale``.

    Args:
        x: ``[*leading, cols]`` float32, float16 or bfloat16.
        weight, bias: ``[cols]``, each of one of these dtypes; ``bias`` may be None, and is without ``mu``.
        mu, rsigma: float32 ``[rows]``, written.
        dst: ``[*leading, cols]`` of ``dtype``, FP8 also as uint8; None where only the transposed copy is wanted.
        dtype: float32, float16, bfloat16 or an FP8 format.
        dst_transposed: ``[cols, *leading]`` codes; only with an FP8 ``dtype``.
        amax: float32 ``[1]``, set to (or, with ``accumulate_amax``, raised to) ``max |y|`` of the float32 results; only with an FP8 ``dtype``.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def norm_bwd(
    dz: TensorLike,
    x: TensorLike,
    mu: TensorLike | None,
    rsigma: TensorLike,
    weight: TensorLike,
    zero_centered_gamma: bool,
    dx: TensorLike,
    dgamma: TensorLike,
    dbeta: TensorLike | None = None,
    add: TensorLike | None = None,
    num_threads: int = 0,
) -> None:
    """The gradients of ``norm_fwd`` from its statistics: ``dx = rsigma * (dy - mean(dy) - xh * mean(dy * xh)) + add``, in float32.

    ``xh = (x - mu) * rsigma`` and ``dy = dz * g``; RMSNorm, which is meant where ``mu`` is None, has no ``mean(dy)``. ``dgamma`` is the sum of
    ``dz * xh`` and ``dbeta`` that of ``dz`` over the rows, in an order that does not depend on the threads.

    Args:
        dz, x, add: ``[*leading, cols]`` float32, float16 or bfloat16, each of its own dtype; ``add`` may be None.
        mu, rsigma: float32 ``[rows]``.
        weight: ``[cols]`` float32, float16 or bfloat16.
        dx: ``[*leading, cols]`` of the dtype of ``x``.
        dgamma, dbeta: ``[cols]`` float32, float16 or bfloat16; ``dbeta`` if and only if there is ``mu``.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def multi_tensor_adam(
    gradients: Sequence[TensorLike],
    weights: Sequence[TensorLike],
    first: Sequence[TensorLike],
    second: Sequence[TensorLike],
    masters: Sequence[TensorLike],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
    weight_decay: float,
    num_threads: int = 0,
) -> None:
    """One step of Adam in place, in fp32 with one rounding at each store (``tex.multi_tensor_adam``).

    The lists hold a tensor each per parameter, float32, float16 or bfloat16 in any mix. Where ``masters`` are not empty, weights are read
    from them and written to both. ``correction1`` and ``correction2`` divide the moments; ``decoupled`` is AdamW.
    """

def multi_tensor_adam_scaled(
    gradients: Sequence[TensorLike],
    weights: Sequence[TensorLike],
    first: Sequence[TensorLike],
    second: Sequence[TensorLike],
    first_scales: Sequence[TensorLike],
    second_scales: Sequence[TensorLike],
    masters: Sequence[TensorLike],
    master_scales: Sequence[TensorLike],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
    weight_decay: float,
    num_threads: int = 0,
) -> None:
    """``multi_tensor_adam`` of moments and masters that may be float16 or E4M3 (uint8) with a scale each, float32, one number; where a tensor has
    none, an empty one has its place (``tex.multi_tensor_adam_scaled``). ``masters`` may be int16 remainders of bfloat16 weights; both lists of
    masters may be empty. Two passes, the first of which writes nothing: what is encoded has to be known by its largest number.
    """

def multi_tensor_l2norm(tensors: Sequence[TensorLike], num_threads: int = 0) -> tuple[float, list[float]]:
    """The L2 norm over all tensors, and that of each, summed in double in an order that does not depend on the threads."""

def multi_tensor_scale(
    inputs: Sequence[TensorLike], outputs: Sequence[TensorLike], scale: float, flag: TensorLike | None = None, num_threads: int = 0
) -> bool:
    """``output = input * scale`` in fp32, rounded once; returns whether every element of the inputs is finite."""

def fingerprints(tensors: Sequence[TensorLike], num_threads: int = 0) -> list[tuple[int, int]]:
    """128 bits for the bytes of each tensor, of any dtype and shape, which do not enter.

    Equal bytes have equal ones, whatever the level and the threads. Bytes of one length that differ in a single word of 32 bits (four bytes from a
    multiple of four) have different ones for certain; any others have equal ones with a chance of 2^-32 at most, by what is no accident alone. Not
    for what an adversary may choose: finding two tensors of one fingerprint is easy.
    """

def call_key(entries: bytes, kinds: object, sort: object, integers: object) -> object:
    """A function that computes the key of a call in tex's dispatcher from as many arguments as there are ``entries``: the letters of
    ``fusible.tex.selection.call_keys``. ``kinds[type(x)](x)``, ``sort(x)`` and ``integers(x)`` describe what is no tensor on a CPU."""

def layouts(tensors: list) -> object:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    """The dtypes, shapes and strides of torch tensors in host memory, as bytes to compare; None where one is anything else."""

def program(  # pyright: ignore[reportUnknownParameterType]
    tensors: int,
    values: list,
    calls: list,  # pyright: ignore[reportMissingTypeArgument]
) -> Callable[[list], bool]:  # pyright: ignore[reportMissingTypeArgument]
    """Calls of native functions as one function ``run(tensors)``, which makes them in order without Python between them. It returns whether it has:
    not where memory that one writes to is another tensor's, too, or where numbers are negated in word only (``torch._neg_view``).

    Args:
        tensors: how many a run is given: host memory that is read and written where it lies.
        values: what calls read and write, each as ``(number of a tensor, byte at which it begins, dtype, shape, strides)``.
        calls: ``(name of a function, {parameter: what is the same each time}, {parameter: number of a value})``: of the functions of tensors here,
            and of ``copy(src, dst)``, whose ``src`` may have any strides, ``zero(dst)``, ``quotient(src, by, dst)``: ``src / by`` in float32,
            and ``round(src, dst)`` of float32 to bfloat16, to nearest even.

    Raises:
        ArgumentError, DTypeError, ShapeError: here for what does not fit together; by a run for tensors with less memory than the values reach,
            before anything is called, and for what a function refuses.
    """

def has_exchange() -> bool:
    """Whether torch's tensors have DLPack's exchange interface, by which they are read at once."""

def multi_tensor_sgd(
    gradients: Sequence[TensorLike],
    weights: Sequence[TensorLike],
    momenta: Sequence[TensorLike],
    copies: Sequence[TensorLike],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    scale: float,
    nesterov: bool,
    first_run: bool,
    decay_after: bool,
    num_threads: int = 0,
) -> None:
    """One step of stochastic gradient descent in place, in fp32 with one rounding at each store (``tex.multi_tensor_sgd``).

    The lists hold a tensor each per parameter, float32, float16 or bfloat16 in any mix; ``copies`` is one, written as the weights are, or empty.
    Without a ``momentum`` the momenta are left alone; in the ``first_run`` they are not read. ``scale`` multiplies the gradients.
    """

def rope(
    src: StridedTensorLike,
    dst: TensorLike,
    freqs: TensorLike,
    sequence_first: bool,
    interleaved: bool,
    backward: bool,
    start_positions: TensorLike | None = None,
    cu_seqlens: TensorLike | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    num_threads: int = 0,
) -> None:
    """``dst = src cos f + R(src) sin f``, or its transpose, with ``f`` the angles of the token's position (``tex.fused_rope_forward``).

    Cosines and sines are those of the fp32 angles, to 0.51 units in the last place, and made once for all heads.

    Args:
        src: float32, float16 or bfloat16 ``[s, b, h, d]`` (``sequence_first``), ``[b, s, h, d]``, or ``[t, h, d]`` with ``cu_seqlens``; a view of
            a larger tensor is read as it lies, if the elements of a head are neighbours.
        dst: contiguous, of the shape and dtype of ``src``; elements of a head beyond ``d2`` are copied, tokens beyond the last sequence zero.
        freqs: float32 ``[positions, 1, 1, d2]``.
        start_positions: int32 ``[b]``, the position of each sequence's first token.
        cu_seqlens: int32 ``[b + 1]``, where packed sequences begin and end, over all ranks.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written; a position without angles too, unless tokens are packed: they take
            the nearest one that has.
    """

def softmax_forward(
    src: TensorLike, dst: TensorLike, scale: float, mask: TensorLike | None = None, causal: bool = False, num_threads: int = 0
) -> None:
    """``dst = softmax(scale * src)`` over the last dimension, in fp32 and rounded once.

    Args:
        src: float32, float16 or bfloat16 ``[*, q, k]``; ``[b, h, q, k]`` with a mask.
        dst: of the shape and dtype of ``src``.
        mask: uint8 ``[b or 1, 1, q, k]``: where it is 1, -10000 replaces the score; a row whose largest score is -10000 becomes 0.
        causal: query ``i`` sees keys ``j <= i + k - q``; the others become 0, and so does a row that sees none.
    """

def softmax_backward(grads: TensorLike, results: TensorLike, dst: TensorLike, scale: float, causal: bool = False, num_threads: int = 0) -> None:
    """``dst = scale * results * (grads - sum(results * grads))``, all of one dtype; what a causal mask hides is not read and becomes 0."""

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
    right_scales: TensorLike | None = None,
    right_tiled: bool = False,
    left_scales: TensorLike | None = None,
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
        right_scales: of blocks along ``depth``. Up to 24 rows of a ``left`` that is not transposed, and with a ``right`` that is, the codes of
            a block are read as they lie, and the sum of their products is multiplied by the scale. For more, codes times their scales are
            packed where the level's units hold these exactly (bf16: powers of two, and all scales of four bits), as float32 where a scale is
            too near the ends of its range; with other scales sums are multiplied. E8M0 bytes ``[cols, depth / 32]`` of
            FP8; E4M3 bytes ``[cols, depth / 16]`` of ``float4_e2m1fn_x2``, whose codes are ``[cols, depth / 2]`` bytes of two; float32
            ``[depth / 128, cols]`` of FP8, or, ``right_tiled``, ``[cols / 128, depth / 128]``, both rounded up. A ``right`` that is not
            transposed is FP8 with E8M0 bytes ``[depth / 32, cols]``. The matrix may have more rows and columns than that.
        left_scales: of blocks along ``depth``, as ``right_scales`` of a ``right`` that is transposed, for a ``left`` that is not; none of squares.
            A ``left`` that is transposed is FP8 with E8M0 bytes ``[depth / 32, rows]``. Its codes are multiplied by their scales when they are
            packed: the product is one of float32 where bf16 does not hold what comes of it.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def attention_forward(
    q: StridedTensorLike,
    k: StridedTensorLike,
    v: StridedTensorLike,
    out: StridedTensorLike,
    stats: StridedTensorLike,
    largest: StridedTensorLike,
    scale: float,
    causal: bool,
    causal_bottom_right: bool,
    window_left: int,
    window_right: int,
    window_bottom_right: bool,
    lengths_q: TensorLike | None = None,
    starts_q: TensorLike | None = None,
    lengths_kv: TensorLike | None = None,
    starts_kv: TensorLike | None = None,
    page_table_k: TensorLike | None = None,
    page_table_v: TensorLike | None = None,
    extra_logits: TensorLike | None = None,
    dropout: float = 0.0,
    rng_state: TensorLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    num_threads: int = 0,
) -> None:
    """``out = dropout(softmax(scale * q k^T)) v`` in tiles, with an online softmax in float32 (``tex.fused_attn_fwd``).

    At the level ``avx512bf16``, bfloat16 operands are multiplied in pairs, and probabilities are rounded to bfloat16 for it. Results do not
    depend on the threads.

    Args:
        q: ``[b, s, h, d]``, or ``[t, h, d]`` with ``lengths_q``: float32, float16 or bfloat16, with a contiguous last dimension, as all that
            follow. ``k``, ``v``: ``[b, s, g, d]``, or ``[t, g, d]`` with ``lengths_kv``, of q's dtype; ``g`` divides ``h``.
        out: of q's tokens and heads and v's width, any of the three dtypes. ``stats`` (logsumexp of the scores) and ``largest`` (score): float32,
            of width 1. Rows of no sequence are not written.
        causal: query i sees keys ``j <= i``, or ``j <= i + keys - queries`` if ``causal_bottom_right``.
        window_left: it sees keys from ``i - window_left`` to ``i + window_right`` (-1: unbounded), ``keys - queries`` further if
            ``window_bottom_right``.
        lengths_q: int32 ``[b + 1]``, cumulative lengths, as ``lengths_kv``. Queries beyond them give 0 and a logsumexp of -inf.
        starts_q: int32 ``[b]``, where sequences of ``[t, h, d]`` begin, if not at the cumulative lengths; ``starts_kv`` likewise.
        page_table_k: int32 ``[b, max_pages]``: k is ``[pages, page_size, g, d]``, and a sequence's keys are in these pages. ``page_table_v``: k's,
            if None.
        extra_logits: float32 ``[h]``, the logit of an extra term of each head's denominator.
        dropout: the probability that a score is dropped, by the words of ``rng_state`` (int64 ``[2]``) at ``((b * h + head) * max_seqlen_q + i) *
            max_seqlen_kv + j``.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def attention_backward(
    q: StridedTensorLike,
    k: StridedTensorLike,
    v: StridedTensorLike,
    out: StridedTensorLike,
    grad: StridedTensorLike,
    stats: StridedTensorLike,
    dq: StridedTensorLike,
    dk: StridedTensorLike,
    dv: StridedTensorLike,
    scale: float,
    causal: bool,
    causal_bottom_right: bool,
    window_left: int,
    window_right: int,
    window_bottom_right: bool,
    lengths_q: TensorLike | None = None,
    starts_q: TensorLike | None = None,
    lengths_kv: TensorLike | None = None,
    starts_kv: TensorLike | None = None,
    extra_logits: TensorLike | None = None,
    extra_gradient: TensorLike | None = None,
    dropout: float = 0.0,
    rng_state: TensorLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    num_threads: int = 0,
) -> None:
    """The gradients ``dq``, ``dk``, ``dv`` of ``attention_forward`` from ``grad``, that of ``out``; probabilities are computed again from ``stats``.

    Arguments are those of the forward call; ``out`` and ``grad`` have q's dtype, the gradients any of the three. ``extra_gradient``: float32
    ``[h]``, set to the gradient of ``extra_logits``. Gradients of tokens of no sequence are not written. Sums have one order, whatever the threads.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def copy_to_cache(
    new_k: StridedTensorLike,
    k_cache: StridedTensorLike,
    new_v: StridedTensorLike,
    v_cache: StridedTensorLike,
    table: TensorLike | None,
    new_lengths: TensorLike,
    cached_lengths: TensorLike,
    paged: bool,
    num_threads: int = 0,
) -> None:
    """Puts the new tokens of each sequence, ``[b, s, g, d]`` or ``[t, g, d]``, at the end of what a cache ``[pages, page_size, g, d]`` has of it.

    ``new_lengths`` and ``cached_lengths`` (int32 ``[b + 1]``) are cumulative, the second with the new tokens; ``table`` is int32 ``[b, max_pages]``,
    or, without ``paged``, ``[b]``: the rows of the cache that have held the sequences, each of which moves to its own row (``tex.copy_to_kv_cache``).
    Where two sequences write to one page, the later one wins. Entries of the table past a sequence's last page are not read.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is written.
    """

def xla_handler() -> object:
    """The capsule of an XLA FFI handler by which compiled programs call the functions of ``xla_functions``, with the same checks.

    A call's attribute ``function`` names one; each other attribute is a parameter by its name: a number (bool, int64 or double), a text, or of a
    tensor its place, from 0 among the operands and from -1 downwards among the results. One call runs at a time, on the threads that kernels may use.
    """

def xla_functions() -> list[str]:
    """The native functions that compiled programs can call."""

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

def run_with_team(body: Callable[[], object]) -> object:
    """``body()``, which runs a compiled program: meanwhile the other threads of OpenMP help with the loops of the program's calls."""

def compiler() -> str:
    """The compiler of this build and its version."""
