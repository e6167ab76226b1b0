"""Softmax of attention scores."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Finite

__all__ = ["Softmax"]


class Softmax:
    """``y = softmax(scale_factor * input)`` over the last dimension, the keys, in fp32 with one rounding to ``input``'s dtype.

    Scores are ``[b, h, q, k]``, of any size; what a causal mask hides is exactly 0. Each backward gives
    ``scale_factor * y (g - sum(y g))`` of the results ``y`` and their gradient ``g``, in a new tensor of their dtype. Raises ``ShapeError`` for
    another rank or shape, ``DTypeError`` where ``y`` and ``g`` differ in dtype.
    """

    @function("input", input="float [b h q k]")
    def scaled_softmax_forward(self, input: Tensor, scale_factor: Finite) -> Any:
        """Without a mask: ``[b, h, q, k]``."""

    @function("output_grad_ softmax_results_", output_grad_="=softmax_results_ [b h q k]", softmax_results_="float [b h q k]")
    def scaled_softmax_backward(self, output_grad_: Tensor, softmax_results_: Tensor, scale_factor: Finite) -> Any:
        """The gradient of ``scaled_softmax_forward``."""

    @function("input", input="float [b h q k]", mask="byte|bool [_ 1 q k]")
    def scaled_masked_softmax_forward(self, input: Tensor, mask: Tensor, scale_factor: Finite) -> Any:
        """With a mask, uint8 ``[b or 1, 1, q, k]``: where it is 1, -10000 replaces the scaled score.

        A row whose largest score is -10000 becomes 0. Raises ``DTypeError`` for a mask of more than a byte an element.
        """

    @function("output_grad_ softmax_results_", output_grad_="=softmax_results_ [b h q k]", softmax_results_="float [b h q k]")
    def scaled_masked_softmax_backward(self, output_grad_: Tensor, softmax_results_: Tensor, scale_factor: Finite) -> Any:
        """The gradient of ``scaled_masked_softmax_forward``."""

    @function("input", input="float [n s s]")
    def scaled_upper_triang_masked_softmax_forward(self, input: Tensor, scale_factor: Finite) -> Any:
        """With a causal mask on ``[b * h, s, s]``: query ``i`` sees keys ``j <= i``."""

    @function("output_grads_ softmax_results_", output_grads_="=softmax_results_ [n s s]", softmax_results_="float [n s s]")
    def scaled_upper_triang_masked_softmax_backward(self, output_grads_: Tensor, softmax_results_: Tensor, scale_factor: Finite) -> Any:
        """The gradient of ``scaled_upper_triang_masked_softmax_forward``: 0 where the mask hides, whatever ``g`` has there."""

    @function("input", input="float [b h q k]")
    def scaled_aligned_causal_masked_softmax_forward(self, input: Tensor, scale_factor: Finite) -> Any:
        """With a causal mask aligned to the last key: query ``i`` sees keys ``j <= i + k - q``. A row that sees none is 0."""

    @function("output_grads_ softmax_results_", output_grads_="=softmax_results_ [b h q k]", softmax_results_="float [b h q k]")
    def scaled_aligned_causal_masked_softmax_backward(self, output_grads_: Tensor, softmax_results_: Tensor, scale_factor: Finite) -> Any:
        """The gradient of ``scaled_aligned_causal_masked_softmax_forward``: 0 where the mask hides, whatever ``g`` has there."""
