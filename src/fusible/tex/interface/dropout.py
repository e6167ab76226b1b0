"""Dropout with a bit mask."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.arguments import Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Probability

__all__ = ["Dropout"]


class Dropout:
    """Dropout decided by one random byte per element, so the drop probability is ``floor(256 p) / 256``; the scale is exactly ``1 / (1 - p)``."""

    @function("input", input="any", out="any")
    def dropout_fwd(self, input: Tensor, dropout_probability: Probability, out: Tensor | None = None) -> list[Any]:
        """``[y, mask]`` with ``y = keep * x / (1 - p)``, ``keep`` where a random byte is at least ``floor(256 p)``.

        ``mask`` is uint8 ``[numel / 8]``, least significant bit first, 1 = kept. Bytes come from torch's default generator. ``input`` may be FP8;
        ``y`` has its nominal dtype. ``out``, where given, is written and returned. Raises ``ArgumentError`` unless ``0 <= p < 1``, ``ShapeError``
        unless ``numel`` is a multiple of 16 (Srivastava et al. 2014).
        """

    @function("grad_output", grad_output="float", mask="uint8", grad_input="=grad_output")
    def dropout_bwd(self, grad_output: Tensor, mask: Tensor, dropout_probability: Probability, grad_input: Tensor | None = None) -> Any:
        """``grad_output * keep / (1 - p)`` with the bits of ``mask``; ``grad_input``, where given, is written and returned."""
