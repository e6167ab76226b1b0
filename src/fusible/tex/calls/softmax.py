"""The softmax functions by the three steps that backends differ in."""

from __future__ import annotations

from typing import Any

from fusible.tex.calls.checks import check_mask, check_scores, check_scores_gradient
from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.softmax import Softmax
from fusible.tex.protocol import TensorLike

__all__ = ["MASKED_SCORE", "SoftmaxBySteps"]

MASKED_SCORE = -10000.0
"""What replaces a masked score."""


class SoftmaxBySteps(Softmax):
    """Checks the arguments of each function and hands them to a backend's ``softmax_forward`` or ``softmax_backward``."""

    HELPERS = frozenset({"softmax_operand", "softmax_forward", "softmax_backward"})

    def softmax_operand(self, x: Tensor) -> Any:
        """``x`` as a plain tensor."""
        raise NotImplementedError

    def softmax_forward(self, x: TensorLike, scale: float, mask: TensorLike | None, causal: bool) -> Any:
        """``softmax(scale * x)``, with a mask or None, or with the causal mask whose last query sees every key."""
        raise NotImplementedError

    def softmax_backward(self, g: TensorLike, y: TensorLike, scale: float, causal: bool) -> Any:
        """``scale * y (g - sum(y g))``, 0 where the causal mask hides."""
        raise NotImplementedError

    def scaled_softmax_forward(self, input: Tensor, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_softmax_forward")
        return self.softmax_forward(x, scale_factor, None, False)

    def scaled_masked_softmax_forward(self, input: Tensor, mask: TensorLike, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_masked_softmax_forward")
        check_mask(mask, x, "scaled_masked_softmax_forward")
        return self.softmax_forward(x, scale_factor, mask, False)

    def scaled_upper_triang_masked_softmax_forward(self, input: Tensor, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_upper_triang_masked_softmax_forward", square=True)
        return self.softmax_forward(x, scale_factor, None, True)

    def scaled_aligned_causal_masked_softmax_forward(self, input: Tensor, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_aligned_causal_masked_softmax_forward")
        return self.softmax_forward(x, scale_factor, None, True)

    def scaled_softmax_backward(self, output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Any:
        return self._backward(output_grad_, softmax_results_, scale_factor, "scaled_softmax_backward")

    def scaled_masked_softmax_backward(self, output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Any:
        return self._backward(output_grad_, softmax_results_, scale_factor, "scaled_masked_softmax_backward")

    def scaled_upper_triang_masked_softmax_backward(self, output_grads_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Any:
        function = "scaled_upper_triang_masked_softmax_backward"
        return self._backward(output_grads_, softmax_results_, scale_factor, function, causal=True, square=True)

    def scaled_aligned_causal_masked_softmax_backward(self, output_grads_: Tensor, softmax_results_: Tensor, scale_factor: float) -> Any:
        function = "scaled_aligned_causal_masked_softmax_backward"
        return self._backward(output_grads_, softmax_results_, scale_factor, function, causal=True)

    def _backward(self, grad: Tensor, results: Tensor, scale: float, function: str, *, causal: bool = False, square: bool = False) -> Any:
        g, y = self.softmax_operand(grad), self.softmax_operand(results)
        check_scores(y, function, square=square)
        check_scores_gradient(g, y, function)
        return self.softmax_backward(g, y, scale, causal)
