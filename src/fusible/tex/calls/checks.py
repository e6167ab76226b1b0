"""The checks of arguments that backends of real and of lazy tensors share: whatever has ``shape`` and ``dtype`` is a tensor here.

``fp32`` is a backend's own value of that type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.formats import PLAIN, BlockFormat, format_named
from fusible.tex.interface.declare import Request
from fusible.tex.protocol import TensorLike, check_shape, outer

__all__ = [
    "adam_corrections",
    "check_gradient",
    "check_lists",
    "check_mask",
    "check_norm_backward",
    "check_norm_parameter",
    "check_norm_statistic",
    "check_probability",
    "check_rope",
    "check_row_scales",
    "check_scale_update",
    "check_scores",
    "check_scores_gradient",
    "check_width_even",
    "check_width_of_blocks",
    "refused_kind",
    "tensor_kinds",
]

_FLOATING_ARGUMENTS = frozenset(
    (
        "A B K Q dO dz fwd_input gamma grad grad_output output_grad_ output_grads output_grads_ q_grad_out qkv_input softmax_results_ tensor "
        "tensor_list weight x"
    ).split()
)
_OF_ANY_TYPE = frozenset(
    (
        "fp8_transpose fused_multi_row_padding fused_multi_row_unpadding grouped_swizzle_for_gemm moe_permute_bwd moe_permute_fwd moe_unpermute_fwd "
        "nvfp4_2d_scale_transpose nvfp4_data_transpose swap_first_dims swizzle_scales_for_gemm_"
    ).split()
)
"""Functions that take bytes, whatever the bytes mean. They check dtypes themselves where they tell them apart."""


def refused_kind(request: Request, floating: frozenset[Any], framework: str) -> str | None:
    """Why a backend of all functions refuses a request for a type among its arguments, or None.

    ``floating`` are its values of fp32, bf16, fp16, and fp64 where it has that; of block-scaled formats it
    serves those that have a codec for ``framework``.
    """
    if request.function in _OF_ANY_TYPE:
        return None
    for name, kind in request.kinds:
        asked = name in _FLOATING_ARGUMENTS or name == "input"
        for part in tensor_kinds(kind):
            form = format_named(part[0]) if len(part) == 3 else PLAIN
            if form is None:
                return f"serves FP8 of delayed and current scaling, and {name} is {part[0]}"
            if isinstance(form, BlockFormat) and framework not in form.codecs:
                return f"serves formats with a codec for {framework!r}, and {name} is {part[0]}"
            if asked and len(part) == 2 and part[1] not in floating and not request.function.startswith("prim_"):
                return f"serves {_listed(floating)}, and {name} is {part[1]}"
    return None


def _listed(floating: frozenset[Any]) -> str:
    """``floating`` in words, those of 32 bits first."""
    there = {str(x).removeprefix("torch.") for x in floating}
    *most, last = [name for name in ("float32", "bfloat16", "float16", "float64") if name in there]
    return f"{', '.join(most)} and {last}"


def tensor_kinds(kind: Any) -> Iterator[tuple[Any, ...]]:
    """The kinds of tensors and quantizers in a kind: itself, or those of a list, however nested."""
    if isinstance(kind, tuple) and kind and isinstance(kind[0], str):
        yield kind
    elif isinstance(kind, tuple):
        for part in kind:
            yield from tensor_kinds(part)


def check_probability(probability: float, function: str) -> None:
    """Raise ``ArgumentError`` unless ``0 <= probability < 1``."""
    if not 0 <= probability < 1:
        raise ArgumentError(expected("a probability in [0, 1)", of=function, got=probability, do="pass such a number"))


def check_gradient(grad: TensorLike, shape: Sequence[int], function: str) -> None:
    """Raise ``ShapeError`` unless ``grad`` has the shape of what ``function`` differentiates."""
    if grad.shape != shape:
        raise ShapeError(expected(f"shape {list(shape)}", of=f"grad of {function}", got=list(grad.shape), do="pass the gradient of its output"))


def check_width_even(x: TensorLike, function: str) -> None:
    """Raise ``ShapeError`` unless the last dimension of a gated activation's input has two halves."""
    if x.shape[-1] % 2:
        raise ShapeError(expected("an even last dimension", of=f"the input of {function}", got=list(x.shape), do="pass both halves side by side"))


def check_width_of_blocks(x: TensorLike, interleave: int, function: str) -> None:
    """Raise ``ShapeError`` unless the operands of a gate that alternate in blocks of ``interleave`` columns (0: do not) have whole blocks."""
    if interleave and (interleave < 0 or x.shape[-1] % (2 * interleave)):
        of, got = f"the input of {function} with glu_interleave_size {interleave}", list(x.shape)
        raise ShapeError(expected(f"a multiple of {2 * interleave} columns", of=of, got=got, do="pass whole blocks of both operands"))


def check_row_scales(act_scales: TensorLike, x: TensorLike, function: str) -> None:
    """Raise ``ShapeError`` unless there is one scale per row of ``x``."""
    if outer((*act_scales.shape, 1)) != outer(x.shape):
        got = list(act_scales.shape)
        raise ShapeError(expected(f"{list(x.shape[:-1])} scales", of=f"act_scales of {function}", got=got, do="pass one scale per row"))


def check_norm_parameter(parameter: TensorLike, x: TensorLike, of: str) -> None:
    """Raise ``ShapeError`` unless ``parameter`` has one value per column of ``x``."""
    if parameter.shape != x.shape[-1:]:
        check_shape(parameter, x.shape[-1:], of)


def check_norm_statistic(statistic: TensorLike, x: TensorLike, of: str) -> None:
    """Raise ``ShapeError`` unless ``statistic`` has one value per row of ``x``."""
    if statistic.shape == x.shape[:-1]:
        return
    rows = outer(x.shape)
    if math.prod(statistic.shape) != rows:
        raise ShapeError(expected(f"shape [{rows}]", of=of, got=list(statistic.shape), do="pass what the forward returned"))


def check_norm_backward(dz: TensorLike, x: TensorLike, rsigma: TensorLike, gamma: TensorLike, function: str) -> None:
    """Raise ``ShapeError`` unless the arguments that the gradients of every norm take fit ``x``."""
    if dz.shape != x.shape:
        check_shape(dz, x.shape, f"dz of {function}")
    check_norm_parameter(gamma, x, f"gamma of {function}")
    check_norm_statistic(rsigma, x, f"rsigma of {function}")


def check_rope(
    x: TensorLike, freqs: TensorLike, qkv_format: int, cu_seqlens: TensorLike | None, cp_size: int, cp_rank: int, function: str, fp32: Any
) -> None:
    """Raise for what the rotary embeddings refuse (``interface.rope.Rope``)."""
    sbhd, thd = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_THD
    if qkv_format not in (sbhd, NVTE_QKV_Format.NVTE_BSHD, thd):
        raise ArgumentError(expected("SBHD, BSHD or THD", of=f"qkv_format of {function}", got=qkv_format, do="pass one of the three"))
    rank, tensor = 3 if qkv_format == thd else 4, "output_grads" if function == "fused_rope_backward" else "the input"
    if x.ndim != rank:
        raise ShapeError(expected(f"{rank} dimensions", of=f"{tensor} of {function}", got=list(x.shape), do="reshape it"))
    if freqs.dtype is not fp32 or freqs.ndim != 4 or freqs.shape[1:3] != (1, 1):
        got = f"{freqs.dtype} {list(freqs.shape)}"
        raise ShapeError(expected("fp32 [positions, 1, 1, width]", of=f"freqs of {function}", got=got, do="pass the angles in that shape"))
    width = freqs.shape[3]
    if width % 2 or width > x.shape[-1]:
        raise ShapeError(expected(f"an even width up to {x.shape[-1]}", of=f"freqs of {function}", got=width, do="pass fewer frequencies"))
    if not 0 <= cp_rank < cp_size:
        raise ArgumentError(expected("0 <= cp_rank < cp_size", of=function, got=f"{cp_rank} of {cp_size}", do="pass a rank of the group"))
    if qkv_format == thd:
        if cu_seqlens is None:
            raise ArgumentError(expected("cu_seqlens", of=f"{function} of THD", got="None", do="pass the cumulative lengths [b + 1]"))
        return
    length = x.shape[0 if qkv_format == sbhd else 1]
    if length * cp_size > freqs.shape[0]:
        raise ShapeError(expected(f"at least {length * cp_size} positions", of=f"freqs of {function}", got=freqs.shape[0], do="make more angles"))


def check_scores(x: TensorLike, function: str, *, square: bool = False) -> None:
    """Raise ``ShapeError`` unless ``x`` is ``[b, h, q, k]``, or ``[b * h, s, s]`` where ``square``."""
    fits = (x.ndim == 3 and x.shape[1] == x.shape[2]) if square else x.ndim == 4
    if not fits:
        wanted = "[b * h, s, s]" if square else "[b, h, q, k]"
        tensor = "softmax_results_" if function.endswith("backward") else "input"
        raise ShapeError(expected(f"scores {wanted}", of=f"{tensor} of {function}", got=list(x.shape), do="reshape them"))


def check_mask(mask: TensorLike, x: TensorLike, function: str) -> None:
    """Raise unless ``mask`` is one byte ``[b or 1, 1, q, k]`` for each query and key of the scores ``x``."""
    if mask.dtype.itemsize != 1:
        raise DTypeError(expected("uint8", of=f"mask of {function}", got=mask.dtype, do="cast it"))
    batch, _, queries, keys = x.shape
    if tuple(mask.shape) not in ((batch, 1, queries, keys), (1, 1, queries, keys)):
        got = list(mask.shape)
        raise ShapeError(expected(f"[{batch} or 1, 1, {queries}, {keys}]", of=f"mask of {function}", got=got, do="pass a mask for all heads"))


def check_scores_gradient(g: TensorLike, y: TensorLike, function: str) -> None:
    """Raise unless the gradient ``g`` has the shape and dtype of the softmax results ``y``."""
    check_gradient(g, y.shape, function)
    if g.dtype is not y.dtype:
        raise DTypeError(expected(y.dtype, of=f"grad of {function}", got=g.dtype, do="cast one of the two"))


def check_lists(tensor_lists: Sequence[Sequence[Any]], counts: tuple[int, ...], function: str, alike: Callable[[Any], Any]) -> None:
    """Raise unless the number of lists is one of ``counts``, all lists are equally long, and the tensors at one place agree in ``alike(tensor)``."""
    if len(tensor_lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentError(expected(f"{wanted} lists", of=f"tensor_lists of {function}", got=len(tensor_lists), do="pass the lists it documents"))
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ArgumentError(expected("lists of equal length", of=f"tensor_lists of {function}", got=lengths, do="pass one of each per parameter"))
    for tensors in zip(*tensor_lists, strict=True):
        if len({alike(x) for x in tensors}) > 1:
            of, shapes = f"tensor_lists of {function}, of tensors that belong together", [tuple(x.shape) for x in tensors]
            raise ShapeError(expected("equal shapes", of=of, got=shapes, do="order the lists alike"))


def adam_corrections(mode: int, bias_correction: int, step: int, beta1: float, beta2: float) -> tuple[float, float]:
    """``1 - beta**step`` of both moments, or 1 without ``bias_correction``. Raises ``ArgumentError`` for a mode that is neither L2 nor AdamW."""
    if mode not in (0, 1):
        raise ArgumentError(expected("0 (L2) or 1 (AdamW)", of="mode of multi_tensor_adam", got=mode, do="pass one of the two"))
    return (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)


def check_scale_update(buffer: TensorLike, histories: Sequence[Any], scales: Sequence[Any], algorithm: str) -> list[int]:
    """How many numbers each of the scales has. Raises unless the arguments of ``fused_amax_and_scale_update_after_reduction`` add up."""
    if algorithm not in ("max", "most_recent"):
        raise ArgumentError(expected("'max' or 'most_recent'", of="amax_compute_algo", got=repr(algorithm), do="pass one of the two"))
    if len(histories) != len(scales):
        counts = f"{len(histories)} and {len(scales)}"
        raise ShapeError(expected("as many amax histories as scales", of="a scale update", got=counts, do="pass one history per scale tensor"))
    sizes = [math.prod(scale.shape) for scale in scales]
    for history, scale, size in zip(histories, scales, sizes, strict=True):
        if history.ndim != 2 or history.shape[1] != size or not history.shape[0]:
            shapes = f"{list(history.shape)} and {list(scale.shape)}"
            raise ShapeError(expected("[H, n] and [n]", of="amax_histories and scales", got=shapes, do="give each scale a column"))
    if math.prod(buffer.shape) != sum(sizes):
        got = math.prod(buffer.shape)
        raise ShapeError(expected(f"{sum(sizes)} amaxes", of="amax_reduction_buffer", got=got, do="concatenate one amax per scale"))
    return sizes
