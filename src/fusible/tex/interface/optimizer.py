"""Optimizer kernels over lists of tensors."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function, function_like
from fusible.tex.interface.domains import BooleanNumber, Decay, Epsilon, Finite, FP8DType, Positive, Size

__all__ = ["Optimizer"]


class Optimizer:
    """Each works on ``tensor_lists``: lists of equally many tensors, the i-th of each list belonging together. Arithmetic is fp32, with one rounding
    at each store. ``chunk_size`` never changes a result; ``noop_flag`` is int32 ``[1]``. Lists that do not fit raise ``ArgumentError``."""

    @function("tensor_lists", noop_flag="int32 [1]", before="noop_flag scale", disjoint="noop_flag tensor_lists[1]", idle="chunk_size")
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float) -> None:
        """``[inputs, outputs]``: writes ``output = input * scale``; sets ``noop_flag`` to 1 where an *input* is not finite. The flag is not read."""

    @function(
        "tensor_lists",
        is_infinite="int32 (1)",
        scale="fp32 (1)",
        before="is_infinite scale",
        disjoint="is_infinite tensor_lists[1]",
        idle="chunk_size",
    )
    def multi_tensor_scale_tensor(self, chunk_size: int, is_infinite: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: Tensor) -> None:
        """``multi_tensor_scale`` by a number on the device, fp32 ``[1]``; ``is_infinite`` is the flag."""

    @function("tensor_lists", tensor_lists="n * float", noop_flag="int32 [1]", before="noop_flag per_tensor_python", idle="chunk_size")
    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        """``[x]``: ``(norm, per_tensor)``, the L2 norm over all tensors, fp32 ``[1]``, and that of each, fp32 ``[n]`` (``[0]`` unless asked for).

        Sets ``noop_flag`` to 1 where a norm is not finite. The flag is not read.
        """

    @function(
        "tensor_lists",
        tensor_lists="n * float",
        noop_flag="int32 [1]",
        inv_scale="fp32 (1)",
        before="noop_flag inv_scale per_tensor_python",
        idle="chunk_size",
    )
    def multi_tensor_unscale_l2norm(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], inv_scale: Tensor, per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        """``multi_tensor_l2norm`` of ``x * inv_scale`` (fp32 ``[1]``); ``x`` itself is left alone."""

    @function(
        "tensor_lists",
        noop_flag="int32 [1]",
        before="lr beta1 beta2 epsilon step mode bias_correction weight_decay",
        disjoint="tensor_lists[1] tensor_lists[2] tensor_lists[3] tensor_lists[4]",
        idle="chunk_size",
    )
    def multi_tensor_adam(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        lr: Finite,
        beta1: Decay,
        beta2: Decay,
        epsilon: Epsilon,
        step: Size,
        mode: BooleanNumber,
        bias_correction: BooleanNumber,
        weight_decay: Finite,
    ) -> None:
        """``[g, p, m, v]`` or ``[g, p, m, v, master]``: one step of Adam in place (Kingma & Ba 2015; AdamW: Loshchilov & Hutter 2019).

        ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``u = (m / bc1) / (sqrt(v / bc2) + eps)``, ``p -= lr u`` with ``bc = 1 - b^step`` if
        ``bias_correction`` else 1. ``mode`` 0 adds ``weight_decay * p`` to ``g`` (L2), 1 adds it to ``u`` (AdamW). With fp32 ``master`` weights,
        ``p`` is read from them and written to both. ``g`` is left alone, and ``noop_flag`` is not read.
        """

    @function_like(multi_tensor_adam)
    def multi_tensor_adam_param_remainder(self) -> None:
        """``[g, p, m, v, remainder]``: ``multi_tensor_adam`` whose fp32 master weight is a bf16 ``p`` and an int16 ``remainder`` together.

        As bits, ``master = (p << 16) + remainder``: ``p`` is the master rounded to the nearest (ties away from zero), and the remainder, signed, what
        that is off by. Both are written. Raises ``DTypeError`` for other types.
        """

    @function_like(
        multi_tensor_adam,
        before="fp8_dtype",
        disjoint="tensor_lists[1] tensor_lists[2] tensor_lists[3] tensor_lists[4] tensor_lists[5] tensor_lists[6] tensor_lists[7]",
    )
    def multi_tensor_adam_fp8(self, fp8_dtype: FP8DType) -> None:
        """``[g, p, m, v, master, scale, amax, scale_inv]``: ``multi_tensor_adam`` of fp32 ``master`` weights, whose copy ``p`` (uint8, in the
        FP8 format ``fp8_dtype``) is written as ``cast(master * scale)``.

        ``amax`` becomes ``max(amax, max |master|)`` and ``scale_inv`` ``1 / scale``; these three are fp32, one number each. Raises ``DTypeError`` for
        other types.
        """

    @function_like(
        multi_tensor_adam,
        disjoint="tensor_lists[1] tensor_lists[2] tensor_lists[3] tensor_lists[4] tensor_lists[5] tensor_lists[6] tensor_lists[7]",
    )
    def multi_tensor_adam_scaled(self) -> None:
        """``[g, p, m, v, m_scale, v_scale]`` or ``[g, p, m, v, m_scale, v_scale, master, master_scale]``: ``multi_tensor_adam`` whose moments and
        masters are held in few bits, each tensor with one scale.

        ``m``, ``v`` and ``master`` are fp32 or bf16, without a scale (an empty tensor has its place); or fp16 or uint8 (E4M3), whose values are
        ``code * scale``, the scale being fp32, one number. Of the new values ``x`` the codes are ``cast(x * (1 / s))`` with
        ``s = max(max |x| / r, 2^-126)``, ``r`` being 448 for E4M3 and 32752, half of the largest number, for fp16. Written as the scale is ``s`` for
        fp16, and for E4M3 ``1 / (1 / s)``, by which quantized tensors are decoded. A master may be int16, the remainder of a bf16 ``p``
        (``multi_tensor_adam_param_remainder``). A ``p`` is written unscaled, from the master before its rounding. Raises ``DTypeError`` for other
        types.
        """

    @function_like(
        multi_tensor_adam,
        lr="fp32 (1)",
        step="int32|fp32 (1)",
        inv_scale="fp32 (1)",
        before="inv_scale noop_flag",
        disjoint="noop_flag tensor_lists",
    )
    def multi_tensor_adam_capturable(self, lr: Tensor, step: Tensor, inv_scale: Tensor) -> None:
        """``[g, p, m, v]``: ``multi_tensor_adam`` whose ``lr``, ``step`` and ``inv_scale`` are numbers on the device, ``[1]``, and that reads none of
        them back. Nothing is written where ``noop_flag`` is 1.

        ``g * inv_scale`` takes the place of ``g``, in the step unrounded and in the tensor rounded to its dtype.
        """

    @function_like(multi_tensor_adam_capturable)
    def multi_tensor_adam_capturable_master(self) -> None:
        """``[g, p, m, v, master]``: ``multi_tensor_adam_capturable`` whose parameter is read from fp32 ``master`` weights and written to both."""

    @function(
        "tensor_lists",
        noop_flag="int32 [1]",
        before="wd momentum dampening lr nesterov first_run wd_after_momentum scale noop_flag",
        disjoint="tensor_lists[1] tensor_lists[2] tensor_lists[3]",
        idle="chunk_size",
    )
    def multi_tensor_sgd(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        wd: Finite,
        momentum: Epsilon,
        dampening: Finite,
        lr: Finite,
        nesterov: bool,
        first_run: bool,
        wd_after_momentum: bool,
        scale: float,
    ) -> None:
        """``[g, p, mom]`` or ``[g, p, mom, copy]``: one step of stochastic gradient descent (Polyak 1964; Nesterov: Sutskever et al. 2013).

        ``d = g * scale``, and ``+ wd * p`` unless ``wd_after_momentum``. With a ``momentum``, ``mom`` becomes ``d`` in the ``first_run``, otherwise
        ``momentum * mom + (1 - dampening) * d``, and ``d`` becomes ``d + momentum * mom`` if ``nesterov``, else ``mom``; without one ``mom`` is left
        alone. Then ``+ wd * p`` if ``wd_after_momentum``, ``p -= lr * d``, and ``copy`` becomes ``p`` rounded. Nothing is written where ``noop_flag``
        is not 0.
        """

    @function("tensor_lists", noop_flag="int32 [1]", disjoint="tensor_lists[1] tensor_lists[2]", idle="chunk_size")
    def multi_tensor_compute_scale_and_scale_inv(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        max_fp8: Positive,
        force_pow_2_scales: bool,
        epsilon: Epsilon,
    ) -> None:
        """``[amax, scale, scale_inv]``, fp32, element by element: ``scale = max_fp8 / max(amax, epsilon)`` and ``scale_inv = 1 / scale``.

        The scale is 1 for an amax that is 0, infinite or NaN, FLT_MAX where the quotient overflows, and with ``force_pow_2_scales`` the power of two
        below. ``noop_flag`` is not read. Raises ``DTypeError`` for other types.
        """

    @function("tensor_lists", disjoint="tensor_lists[1]")
    def multi_tensor_compute_scale_inv_e8m0(self, chunk_size: int, dummy: Any, tensor_lists: Sequence[Sequence[Tensor]]) -> None:
        """``[amax, out]``: ``out = e8m0(amax * (1 / 448))``, the exponent byte rounded up, of amaxes in fp32, bf16 or fp16; ``out`` is uint8.

        0 gives 0, infinity 0xFE, NaN 0xFF. Raises ``DTypeError`` for other types. Source: OCP Microscaling Formats specification 1.0 (2023).
        """
