"""The softmax functions by the three steps that backends differ in."""

from __future__ import annotations

from typing import Any

from fusible.tex.calls.checks import check_mask, check_scores, check_scores_gradient
from fusible.tex.interface.softmax import Softmax

__all__ = ["MASKED_SCORE", "SoftmaxBySteps"]

MASKED_SCORE = -10000.0
"""What replaces a masked score."""


class SoftmaxBySteps(Softmax):
    """Checks the arguments of each function and hands them to a backend's ``softmax_forward`` or ``softmax_backward``."""

    HELPERS = frozenset({"softmax_operand", "softmax_forward", "softmax_backward"})

    def softmax_operand(self, x: Any) -> Any:
        """``x`` as a plain tensor."""
        raise NotImplementedError

    def softmax_forward(self, x: Any, scale: float, mask: Any, causal: bool) -> Any:
        """``softmax(scale * x)``, with a mask or None, or with the causal mask whose last query sees every key."""
        raise NotImplementedError

    def softmax_backward(self, g: Any, y: Any, scale: float, causal: bool) -> Any:
        """``scale * y (g - sum(y g))``, 0 where the causal mask hides."""
        raise NotImplementedError

    def scaled_softmax_forward(self, input: Any, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_softmax_forward")
        return self.softmax_forward(x, scale_factor, None, False)

    def scaled_masked_softmax_forward(self, input: Any, mask: Any, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_masked_softmax_forward")
        check_mask(mask, x, "scaled_masked_softmax_forward")
        return self.softmax_forward(x, scale_factor, mask, False)

    def scaled_upper_triang_masked_softmax_forward(self, input: Any, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_upper_triang_masked_softmax_forward", square=True)
        return self.softmax_forward(x, scale_factor, None, True)

    def scaled_aligned_causal_masked_softmax_forward(self, input: Any, scale_factor: float) -> Any:
        x = self.softmax_operand(input)
        check_scores(x, "scaled_aligned_causal_masked_softmax_forward")
        return self.softmax_forward(x, scale_factor, None, True)

    def scaled_softmax_backward(self, output_grad_: Any, softmax_results_: Any, scale_factor: float) -> Any:
        return self._backward(output_grad_, softmax_results_, scale_factor, "scaled_softmax_backward")

    def scaled_masked_softmax_backward(self, output_grad_: Any, softmax_results_: Any, scale_factor: float) -> Any:
        return self._backward(output_grad_, softmax_results_, scale_factor, "scaled_masked_softmax_backward")

    def scaled_upper_triang_masked_softmax_backward(self, output_grads_: Any, softmax_results_: Any, scale_factor: float) -> Any:
        function = "scaled_upper_triang_masked_softmax_backward"
        return self._backward(output_grads_, softmax_results_, scale_factor, function, causal=True, square=True)

    def scaled_aligned_causal_masked_softmax_backward(self, output_grads_: Any, softmax_results_: Any, scale_factor: float) -> Any:
        function = "scaled_aligned_causal_masked_softmax_backward"
        return self._backward(output_grads_, softmax_results_, scale_factor, function, causal=True)

    def _backward(self, grad: Any, results: Any, scale: float, function: str, *, causal: bool = False, square: bool = False) -> Any:
        g, y = self.softmax_operand(grad), self.softmax_operand(results)
        check_scores(y, function, square=square)
        check_scores_gradient(g, y, function)
        return self.softmax_backward(g, y, scale, causal)
