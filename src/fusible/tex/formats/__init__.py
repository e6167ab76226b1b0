"""Number formats: how a quantized tensor of one lies in memory and is read, whatever the backend."""

from fusible.tex.formats.format import (
    Format,
    Scaling,
    a_buffer,
    format_of,
    is_quantized,
    logical_shape,
    nominal,
    scaling,
    transposed,
    update_buffers,
    usages,
)

__all__ = [
    "Format",
    "Scaling",
    "a_buffer",
    "format_of",
    "is_quantized",
    "logical_shape",
    "nominal",
    "scaling",
    "transposed",
    "update_buffers",
    "usages",
]
