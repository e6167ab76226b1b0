"""Checkpoints of Hugging Face's kind, plain and quantized: read as they are, written so that transformers and vLLM read them."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from fusible.models.checkpoints.mxfp4 import MXFP4WeightQuantizer, MXFP4WeightStorage, MXFP4WeightTensor
from fusible.models.checkpoints.quantize import quantize_checkpoint
from fusible.models.checkpoints.schemes import SCHEMES, Scheme
from fusible.models.checkpoints.writing import write_checkpoint

__all__ = _public_names(globals())
