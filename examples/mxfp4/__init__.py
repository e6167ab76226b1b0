"""MXFP4 as a package of its own would add it: E2M1 in blocks of 32 with E8M0 scales (OCP Microscaling Formats specification 1.0, 2023).

``number_format`` says what a tensor consists of, ``tensors`` has the classes of quantizers and tensors, ``on_torch`` and ``on_lazy`` compute: one
for real tensors, one for lazy ones. A ``CustomRecipe`` trains in it::

    recipe = CustomRecipe(qfactory=lambda role: MXFP4Quantizer() if role.tensor_type in ("input", "weight", "grad_output") else None)
"""

from mxfp4 import on_lazy, on_torch
from mxfp4.number_format import MXFP4, MXFP4_SCHEME
from mxfp4.tensors import MXFP4Quantizer, MXFP4Tensor, MXFP4TensorStorage

MXFP4.codecs["torch"] = on_torch.CODEC
MXFP4.codecs["lazy"] = on_lazy.CODEC

__all__ = ["MXFP4", "MXFP4Quantizer", "MXFP4Tensor", "MXFP4TensorStorage", "MXFP4_SCHEME"]
