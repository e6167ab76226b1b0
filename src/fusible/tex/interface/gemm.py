"""The matrix product."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.enums import CommOverlapType
from fusible.tex.interface.arguments import Quantizer, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Finite, RealDType

__all__ = ["GEMM"]


class GEMM:
    """Matrix products with fp32 accumulation and a fused epilogue; of operands in fp64, both of them, all is computed in it."""

    @function(
        "A transA B transB D quantizer output_dtype bias gelu",
        A="any [* a]",
        B="any [* b]",
        bias="real",
        gelu_in="real",
        extra_output="any",
        idle="workspace workspace_size",
    )
    def generic_gemm(
        self,
        A: Tensor,
        transA: bool,
        B: Tensor,
        transB: bool,
        D: Tensor | None,
        quantizer: Quantizer | None,
        output_dtype: RealDType | None,
        bias: Tensor | None,
        bias_type: RealDType | None,
        gelu: bool,
        gelu_in: Tensor | None,
        grad: bool,
        workspace: Tensor | None,
        workspace_size: int,
        accumulate: bool,
        use_split_accumulator: bool,
        comm_overlap: Any = None,
        comm_type: CommOverlapType | None = None,
        extra_output: Tensor | None = None,
        bulk_overlap: bool = False,
        alpha: Finite = 1.0,
        beta: Finite | None = None,
    ) -> list[Any]:
        """``[D, bias_grad, pre_gelu_out, extra_output]`` with ``D = alpha * op(B) @ op(A) + beta * D`` and an epilogue.

        ``A`` and ``B`` are flattened to matrices; ``op(A) = A.T`` if ``transA``, likewise B (so D is row-major what BLAS computes column-major). The
        layout is named by A then B:

        * TN (fprop): weight ``[N, K]``, x ``[*leading, K]`` -> ``[*leading, N]``
        * NN (dgrad): weight ``[N, K]``, dy ``[*leading, N]`` -> ``[*leading, K]``
        * NT (wgrad): x ``[*leading, K]``, dy ``[*leading, N]`` -> ``[N, K]``

        Forward (``grad`` false): ``+ bias``, then with ``gelu`` ``pre_gelu_out`` is that sum (in D's dtype; in ``bias_type`` for FP8 operands) and
        ``D`` is its GELU (tanh form); ``gelu_in`` is ignored. Backward: ``bias`` only asks for ``bias_grad``, the row sum of B in D's dtype, and is
        not added; ``gelu`` multiplies by ``gelu'(gelu_in)``, and with both, ``bias_grad`` is the row sum of that product.

        ``accumulate`` adds ``beta`` (default 1) times the given D; without it ``beta`` must be 0 or None. Everything is fp32 up to one rounding at
        the store. A given D is written and returned. With ``quantizer`` the result is quantized: under delayed scaling with per-tensor FP8 operands
        straight from the accumulator, else after rounding to ``output_dtype`` (default: D's dtype, else A's). Of an empty product, D is 0
        (unchanged if accumulating) without bias. ``workspace`` is scratch, and ``use_split_accumulator`` changes nothing where accumulation is fp32.

        A quantized operand of any format stands for its value. Of a block-scaled one, that copy is multiplied whose blocks lie along the contracted
        dimension: A's row-wise one if ``transA``, B's if not ``transB``, else the column-wise one. Where both have a Hadamard transform, the two
        cancel; a single one is taken back.

        Raises ``ShapeError``, ``DTypeError`` or ``ArgumentError`` before anything is written.
        """
