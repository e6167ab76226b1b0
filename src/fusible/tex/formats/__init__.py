"""Number formats, one file each: how a quantized tensor of one lies in memory and is read, whatever the backend.

A format is one value (``Format``), and so is how quantizers scale to it (``Scheme``). Another one is a file like ``mxfp8.py``, and in each framework
that is to compute with it a ``BlockCodec``.
"""

from fusible.tex.formats.blocks import (
    WAYS,
    BlockCodec,
    BlockFormat,
    Copy,
    block_format_of,
    check_block_output,
    check_scales,
    checked_format,
)
from fusible.tex.formats.float8 import CURRENT, DELAYED, FLOAT8, transposed, update_buffers
from fusible.tex.formats.float8_blocks import FLOAT8_BLOCKS, FLOAT8_BLOCKS_SCHEME
from fusible.tex.formats.format import (
    PLAIN,
    Format,
    Scheme,
    a_buffer,
    format_named,
    format_of,
    is_quantized,
    logical_shape,
    nominal,
    scaling,
    scheme_named,
    scheme_of,
    usages,
)
from fusible.tex.formats.mxfp8 import MXFP8, MXFP8_SCHEME
from fusible.tex.formats.nvfp4 import NVFP4, NVFP4_OPTIONS, NVFP4_SCHEME

__all__ = [
    "BlockCodec",
    "BlockFormat",
    "CURRENT",
    "Copy",
    "DELAYED",
    "FLOAT8",
    "FLOAT8_BLOCKS",
    "FLOAT8_BLOCKS_SCHEME",
    "Format",
    "MXFP8",
    "MXFP8_SCHEME",
    "NVFP4",
    "NVFP4_OPTIONS",
    "NVFP4_SCHEME",
    "PLAIN",
    "Scheme",
    "WAYS",
    "a_buffer",
    "block_format_of",
    "check_block_output",
    "check_scales",
    "checked_format",
    "format_named",
    "format_of",
    "is_quantized",
    "logical_shape",
    "nominal",
    "scaling",
    "scheme_named",
    "scheme_of",
    "transposed",
    "update_buffers",
    "usages",
]
