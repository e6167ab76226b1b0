"""Tensors that are many in one: their quantization and their products."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Count, Finite, FloatingDType, GivenTensor, Positive

__all__ = ["Grouped"]


class Grouped:
    """Many matrices at once: the experts of a mixture, each with its own number of tokens.

    A *grouped tensor* is ``num_tensors`` members in one flat buffer, one after the other or at ``tensor_offsets`` (int64 ``[num_tensors + 1]``, in
    elements). ``first_dims`` and ``last_dims`` (int64 ``[num_tensors]`` or None) are the members' rows and columns: without either, they are equal
    slices of the rows of ``logical_shape``; with ``first_dims`` they share the columns. Scales lie member after member, each padded as the format
    says. Rows beyond the last member belong to nobody. A quantized grouped tensor holds for each member exactly what ``quantize`` gives for that
    member alone. The functions raise ``ShapeError``, ``DTypeError`` or ``ArgumentError`` before anything is written.
    """

    @function("A", "B", "transb", "D")
    def te_general_grouped_gemm(
        self,
        A: list[Any],
        transa: bool,
        B: list[Any],
        transb: bool,
        D: list[Any] | None,
        D_type: FloatingDType,
        m_splits: list[int],
        bias: list[Any],
        bias_type: FloatingDType | None,
        single_output: bool,
        pre_gelu_out: list[Any],
        grad: bool,
        workspace: list[Any],
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

    @function("A", "B", "D")
    def te_general_grouped_gemm_for_grouped_tensor(
        self,
        A: Any,
        transa: bool,
        B: Any,
        transb: bool,
        D: Any,
        bias: Any,
        bias_scale: Any,
        alpha: Any,
        beta: Any,
        workspace_setup: Any,
        workspace_cublas: Any,
        use_split_accumulator: bool,
        math_sm_count: int,
    ) -> Any:
        """``D_i = alpha_i * op(B_i) @ op(A_i) + beta_i * D_i + bias_i`` for the members of grouped tensors A, B and D; returns D.

        A and B are quantized or not, D is not. ``bias``: a grouped tensor of one row ``[columns]`` per member, or None; each row of D takes it times
        its entry of ``bias_scale`` (fp32, one per row of D), where given. ``alpha`` and ``beta``: fp32 ``[1]`` or one per member. An empty product
        counts as 0, without bias.
        """

    @function("A", "B", "D")
    def te_general_grouped_gemm_for_discrete_in(
        self,
        A: Any,
        transa: bool,
        B: Any,
        transb: bool,
        D: Any,
        bias: Any,
        bias_scale: Any,
        alpha: Any,
        beta: Any,
        workspace_setup: Any,
        workspace_cublas: Any,
        use_split_accumulator: bool,
        math_sm_count: int,
    ) -> Any:
        """``te_general_grouped_gemm_for_grouped_tensor`` whose A is a list of tensors."""

    @function("A", "B", "D")
    def te_general_grouped_gemm_for_discrete_out(
        self,
        A: Any,
        transa: bool,
        B: Any,
        transb: bool,
        D: Any,
        bias: Any,
        bias_scale: Any,
        alpha: Any,
        beta: Any,
        workspace_setup: Any,
        workspace_cublas: Any,
        use_split_accumulator: bool,
        math_sm_count: int,
    ) -> Any:
        """``te_general_grouped_gemm_for_grouped_tensor`` whose D is a list of tensors."""

    @function()
    def get_grouped_gemm_setup_workspace_size(self, num_tensors: Count) -> int:
        """The bytes of ``workspace_setup`` for ``num_tensors`` problems: 0 where a backend needs none."""

    @function("tensor", "quantizer")
    def group_quantize(
        self,
        tensor: Any,
        quantizer: Any,
        num_tensors: Count,
        first_dims: Any,
        last_dims: Any = None,
        tensor_offsets: Any = None,
        noop_flag: Any = None,
        output: Any = None,
    ) -> Any:
        """The members of ``tensor``, quantized each by itself, as a grouped tensor whose logical shape is that of ``tensor`` flattened to a matrix.

        With ``quantizer`` None the data stays as it is. Under delayed scaling its ``scale`` and ``amax`` may have an entry for each member, ``[n]``.
        With ``output``, that grouped tensor's buffers are written and it is returned; where ``noop_flag[0] == 1``, nothing is written.
        """

    @function("input")
    def group_dequantize(self, input: Any, otype: FloatingDType) -> Any:
        """The unquantized grouped tensor of a quantized one, in ``otype``."""

    @function("tensor", "quantizer")
    def bgrad_group_quantize(
        self, tensor: Any, quantizer: Any, num_tensors: Count, first_dims: Any, last_dims: Any = None, tensor_offsets: Any = None
    ) -> Any:
        """``[group_quantize(tensor), grad_bias]``: and each member's sum over its rows, ``[num_tensors, columns]`` in ``tensor``'s dtype.

        The members share their columns.
        """

    @function("grouped_x", "quantizer")
    def group_requantize_inplace(
        self,
        grouped_x: Any,
        quantizer: Any,
        num_tensors: Count,
        first_dims: Any,
        otype: FloatingDType,
        tensor_offsets: Any = None,
        return_dequantized: bool = False,
    ) -> Any:
        """Add to a grouped tensor that arrived with row-wise data alone the column-wise copy that ``quantizer`` asks for.

        The copy is a quantization of the dequantized members; under delayed and current scaling it is the transposed data. Row-wise data and what is
        there already stay as they are. ``grouped_x`` takes on ``quantizer``, ``num_tensors``, ``first_dims`` and ``tensor_offsets``. Returns the
        dequantized values, ``logical_shape`` in ``otype``, if ``return_dequantized``, else None.
        """

    @function("tensor", "quantizer")
    def nvfp4_group_quantize_with_amax(
        self,
        tensor: Any,
        quantizer: Any,
        num_tensors: Count,
        first_dims: Any,
        last_dims: Any = None,
        rowwise_amax: GivenTensor = None,
        columnwise_amax: GivenTensor = None,
        tensor_offsets: Any = None,
    ) -> Any:
        """``group_quantize`` to NVFP4 by given amaxes: ``rowwise_amax`` and ``columnwise_amax``, fp32 ``[num_tensors]``.

        Both must be given: NVIDIA's signature has them behind a parameter with a default. Raises ``DTypeError`` without.
        """

    @function("input_2h", "prob", "quantizer")
    def group_scaled_swiglu(
        self, input_2h: Any, prob: Any, quantizer: Any, num_tensors: Count, first_dims: Any = None, last_dims: Any = None, tensor_offsets: Any = None
    ) -> Any:
        """``scaled_swiglu(input_2h, prob)`` as a grouped tensor of logical shape ``[N, H]``, column-wise alone.

        ``input_2h``: ``[N, 2H]``, the activated half first; ``prob``: ``[N]``. The values are rounded to ``input_2h``'s dtype and then quantized.
        ``tensor_offsets`` are those of the result.
        """

    @function("input_2h", "prob", "quantizer")
    def group_scaled_clamped_swiglu(
        self,
        input_2h: Any,
        prob: Any,
        quantizer: Any,
        num_tensors: Count,
        limit: Positive,
        alpha: Finite = 1.702,
        glu_linear_offset: Finite = 1.0,
        first_dims: Any = None,
        last_dims: Any = None,
        tensor_offsets: Any = None,
    ) -> Any:
        """``group_scaled_swiglu`` of ``scaled_clamped_swiglu``; ``limit`` is positive and the three numbers finite."""
