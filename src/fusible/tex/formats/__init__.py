"""Number formats, one file each: how a quantized tensor of one lies in memory and is read, whatever the backend.

A format is one value (``Format``), and so is how quantizers scale to it (``Scheme``). Another one is a file like ``mxfp8.py``, and in each framework
that is to compute with it a ``BlockCodec``.
"""

from fusible.facade import public_names as _public_names
from fusible.tex.formats.blocks import *
from fusible.tex.formats.float8 import CURRENT, DELAYED, FLOAT8, transposed, update_buffers
from fusible.tex.formats.float8_blocks import FLOAT8_BLOCKS, FLOAT8_BLOCKS_SCHEME
from fusible.tex.formats.format import *
from fusible.tex.formats.mxfp8 import MXFP8, MXFP8_SCHEME
from fusible.tex.formats.nvfp4 import NVFP4, NVFP4_OPTIONS, NVFP4_SCHEME, NVFP4QuantizerLike

__all__ = _public_names(globals())
