"""FP8 with one scale for a tensor: value = data read as ``_fp8_dtype``, times ``_scale_inv``. Delayed scaling takes the scale from former amaxes
(Micikevicius et al. 2022, arXiv:2209.05433), current scaling from the tensor's own.

A tensor has ``_data`` and ``_transpose``, uint8, and ``_scale_inv``, fp32 ``[1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fusible.tex.formats.format import Format, Marks, Scheme, usages
from fusible.tex.protocol import fp8_format

__all__ = ["CURRENT", "DELAYED", "FLOAT8", "Float8", "transposed", "update_buffers"]


class Float8(Format):
    """FP8, one scale a tensor."""

    name = "float8"
    marks = Marks(("_fp8_dtype", "_scale_inv", "_data"))
    per_tensor = True
    member_fields: ClassVar[Mapping[str, str]] = {
        "rowwise_data": "_data",
        "columnwise_data": "_transpose",
        "scale_inv": "_scale_inv",
        "columnwise_scale_inv": "_scale_inv",
    }
    scale_fields = ("fp8_scale_inv",)

    def copies(self, x: Any) -> tuple[Any, Any]:
        return x._data, transposed(x)

    def buffer(self, x: Any) -> Any:
        return x._scale_inv

    def shape(self, x: Any) -> tuple[int, ...]:
        return super().shape(x) if x._data is None else tuple(x._data.shape)


FLOAT8: Float8 = Float8.value()
DELAYED = Scheme("delayed", FLOAT8, Marks(("scale", "amax"), lacks=("force_pow_2_scales",)), delayed=True)
CURRENT = Scheme("current", FLOAT8, Marks(("force_pow_2_scales", "with_amax_reduction")))


def transposed(x: Any) -> Any:
    """The transposed data of a tensor, or None where it has none that is up to date."""
    return None if getattr(x, "_transpose_invalid", False) else getattr(x, "_transpose", None)


def update_buffers(output: Any, quantizer: Any, data: Any, transpose: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> None:
    """Write ``data`` into the buffers of a tensor, each by ``buffer = put(buffer or None, new)``, and its transpose where there is to be one.

    The buffers that the quantizer asks for and those that the tensor has are written. A transpose that the quantizer does not ask for, beside data,
    is marked invalid instead.
    """
    rowwise, columnwise = usages(quantizer)
    has_data, has_transpose = output._data is not None, output._transpose is not None
    if rowwise or has_data:
        output._data = put(output._data, data)
    if columnwise or (has_transpose and not has_data):
        output._transpose = put(output._transpose, transpose(data))
        output._transpose_invalid = False
    elif has_transpose:
        output._transpose_invalid = True
    output._fp8_dtype = fp8_format(quantizer.dtype)
