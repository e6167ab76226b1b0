"""Tensors that are many in one: their quantization and their products."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import GroupedTensor, Quantizer, Tensor
from fusible.tex.interface.declare import function, function_like
from fusible.tex.interface.domains import Count, Finite, FloatingDType, GivenTensor, Positive

__all__ = ["Grouped"]

_MEMBERS = {"first_dims": "integer [num_tensors]", "last_dims": "integer [num_tensors]", "tensor_offsets": "integer [>num_tensors]"}
"""What describes the members of a group."""


class Grouped:
    """Many matrices at once: the experts of a mixture, each with its own number of tokens.

    A *grouped tensor* is ``num_tensors`` members in one flat buffer, one after the other or at ``tensor_offsets`` (int64 ``[num_tensors + 1]``, in
    elements). ``first_dims`` and ``last_dims`` (int64 ``[num_tensors]`` or None) are the members' rows and columns: without either, they are equal
    slices of the rows of ``logical_shape``; with ``first_dims`` they share the columns. Scales lie member after member, each padded as the format
    says. Rows beyond the last member belong to nobody. A quantized grouped tensor holds for each member exactly what ``quantize`` gives for that
    member alone. The functions raise ``ShapeError``, ``DTypeError`` or ``ArgumentError`` before anything is written.
    """

    @function("A B transb D", A="n * any [* a]", B="n * any [* b]", bias="n * any", pre_gelu_out="n * any", alone="D")
    def te_general_grouped_gemm(
        self,
        A: list[Tensor],
        transa: bool,
        B: list[Tensor],
        transb: bool,
        D: list[Tensor] | None,
        D_type: FloatingDType,
        m_splits: list[int],
        bias: list[Tensor],
        bias_type: FloatingDType | None,
        single_output: bool,
        pre_gelu_out: list[Tensor],
        grad: bool,
        workspace: list[Tensor],
        workspaceSize: int,
        accumulate: bool,
        use_split_accumulator: bool,
        math_sm_count: int,
    ) -> Any:
        """``D[i] = op(B[i]) @ op(A[i])`` with the epilogue of ``generic_gemm``, for every i; returns ``bias``.

        The results are written to ``D[i]``, or with ``single_output`` to consecutive blocks of rows of ``D[0]``; ``D_type`` is their dtype. An empty
        ``bias[i]`` or ``pre_gelu_out[i]`` is none. Forward: ``bias[i]`` is added; a given ``pre_gelu_out[i]`` receives that sum, and ``D[i]`` its
        GELU. With ``grad``, a given ``bias[i]`` receives the bias gradient, and ``pre_gelu_out[i]`` is the input of the GELU whose derivative
        multiplies the product. ``accumulate`` adds to D. Of an empty problem D is 0 (unchanged if accumulating), as are a given bias gradient and
        ``pre_gelu_out``. ``m_splits``, the workspaces and ``math_sm_count`` change nothing.
        """

    @function("A B D", bias_scale="fp32|fp64", alpha="fp32", beta="fp32", alone="D")
    def te_general_grouped_gemm_for_grouped_tensor(
        self,
        A: GroupedTensor | Sequence[Tensor],
        transa: bool,
        B: GroupedTensor | Sequence[Tensor],
        transb: bool,
        D: GroupedTensor | Sequence[Tensor],
        bias: GroupedTensor | None,
        bias_scale: Tensor | None,
        alpha: Tensor,
        beta: Tensor,
        workspace_setup: Tensor | None,
        workspace_cublas: Tensor | None,
        use_split_accumulator: bool,
        math_sm_count: int,
    ) -> Any:
        """``D_i = alpha_i * op(B_i) @ op(A_i) + beta_i * D_i + bias_i`` for the members of grouped tensors A, B and D; returns D.

        A and B are quantized or not, D is not. ``bias``: a grouped tensor of one row ``[columns]`` per member, or None; each row of D takes it times
        its entry of ``bias_scale`` (fp32, one per row of D), where given. It is added in fp32 to what was rounded to D's dtype, and the sum rounded
        again: in NVIDIA's library a kernel of its own does it after the product. ``alpha`` and ``beta``: fp32 ``[1]`` or one per member. An empty
        product counts as 0, without bias.
        """

    @function_like(te_general_grouped_gemm_for_grouped_tensor)
    def te_general_grouped_gemm_for_discrete_in(self) -> Any:
        """``te_general_grouped_gemm_for_grouped_tensor`` whose A is a list of tensors."""

    @function_like(te_general_grouped_gemm_for_grouped_tensor)
    def te_general_grouped_gemm_for_discrete_out(self) -> Any:
        """``te_general_grouped_gemm_for_grouped_tensor`` whose D is a list of tensors."""

    @function()
    def get_grouped_gemm_setup_workspace_size(self, num_tensors: Count) -> int:
        """The bytes of ``workspace_setup`` for ``num_tensors`` problems: 0 where a backend needs none."""

    @function("tensor quantizer", tensor="float [* n]", **_MEMBERS, noop_flag="fp32 [1]")
    def group_quantize(
        self,
        tensor: Tensor,
        quantizer: Quantizer | None,
        num_tensors: Count,
        first_dims: Tensor | None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
        noop_flag: Tensor | None = None,
        output: GroupedTensor | None = None,
    ) -> Any:
        """The members of ``tensor``, quantized each by itself, as a grouped tensor whose logical shape is that of ``tensor`` flattened to a matrix.

        With ``quantizer`` None the data stays as it is. Under delayed scaling its ``scale`` and ``amax`` may have an entry for each member, ``[n]``;
        under current scaling the group has both, fp32 ``[n]``. ``tensor_offsets`` not given are counted where ``first_dims`` or ``last_dims`` are.
        With ``output``, that grouped tensor's buffers are written and it is returned; where ``noop_flag[0] == 1``, nothing is written.
        """

    @function("input")
    def group_dequantize(self, input: GroupedTensor, otype: FloatingDType) -> Any:
        """The unquantized grouped tensor of a quantized one, in ``otype``."""

    @function("tensor quantizer", tensor="real [* n]", **_MEMBERS)
    def bgrad_group_quantize(
        self,
        tensor: Tensor,
        quantizer: Quantizer | None,
        num_tensors: Count,
        first_dims: Tensor | None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
    ) -> Any:
        """``[group_quantize(tensor), grad_bias]``: and each member's sum over its rows, ``[num_tensors, columns]`` in ``tensor``'s dtype.

        The members share their columns.
        """

    @function("grouped_x quantizer", first_dims="integer [num_tensors]", tensor_offsets="integer [>num_tensors]")
    def group_requantize_inplace(
        self,
        grouped_x: GroupedTensor,
        quantizer: Quantizer,
        num_tensors: Count,
        first_dims: Tensor | None,
        otype: FloatingDType,
        tensor_offsets: Tensor | None = None,
        return_dequantized: bool = False,
    ) -> Any:
        """Add to a grouped tensor that arrived with row-wise data alone the column-wise copy that ``quantizer`` asks for.

        The copy is a quantization of the dequantized members; under delayed and current scaling it is the transposed data. Row-wise data and what is
        there already stay as they are, but for scales of MXFP8 and NVFP4 where the quantizer's ``optimize_for_gemm`` asks for swizzled ones.
        ``grouped_x`` takes on ``quantizer``, ``num_tensors``, ``first_dims`` and ``tensor_offsets``. Returns the dequantized values,
        ``logical_shape`` in ``otype``, if ``return_dequantized``, else None.
        """

    @function(
        "tensor quantizer",
        tensor="float [* n]",
        first_dims="integer [num_tensors]",
        last_dims="integer [num_tensors]",
        rowwise_amax="fp32 (num_tensors)",
        columnwise_amax="fp32 (num_tensors)",
        tensor_offsets="integer [>num_tensors]",
    )
    def nvfp4_group_quantize_with_amax(
        self,
        tensor: Tensor,
        quantizer: Quantizer,
        num_tensors: Count,
        first_dims: Tensor,
        last_dims: Tensor | None = None,
        rowwise_amax: GivenTensor = None,
        columnwise_amax: GivenTensor = None,
        tensor_offsets: Tensor | None = None,
    ) -> Any:
        """``group_quantize`` to NVFP4 by given amaxes: ``rowwise_amax`` and ``columnwise_amax``, fp32 ``[num_tensors]``.

        Both must be given: NVIDIA's signature has them behind a parameter with a default. Raises ``DTypeError`` without.
        """

    @function("input_2h prob quantizer", input_2h="float [*n 2*h]", prob="float (n)", **_MEMBERS)
    def group_scaled_swiglu(
        self,
        input_2h: Tensor,
        prob: Tensor,
        quantizer: Quantizer | None,
        num_tensors: Count,
        first_dims: Tensor | None = None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
    ) -> Any:
        """``scaled_swiglu(input_2h, prob)`` as a grouped tensor of logical shape ``[N, H]``, column-wise alone.

        ``input_2h``: ``[N, 2H]``, the activated half first; ``prob``: ``[N]``. The values are rounded to ``input_2h``'s dtype and then quantized.
        ``tensor_offsets`` are those of the result.
        """

    @function("input_2h prob quantizer", input_2h="float [*n 2*h]", prob="float (n)", **_MEMBERS)
    def group_scaled_clamped_swiglu(
        self,
        input_2h: Tensor,
        prob: Tensor,
        quantizer: Quantizer | None,
        num_tensors: Count,
        limit: Positive,
        alpha: Finite = 1.702,
        glu_linear_offset: Finite = 1.0,
        first_dims: Tensor | None = None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
    ) -> Any:
        """``group_scaled_swiglu`` of ``scaled_clamped_swiglu``; ``limit`` is positive and the three numbers finite."""
