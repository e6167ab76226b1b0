"""Families of models, their checkpoints and tokenizers: in from Hugging Face, and out again."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.convert import conversion_report, convert
from fusible.models.encoder_decoder_model import EncoderDecoderModel
from fusible.models.encoder_model import EncoderModel
from fusible.models.exporting import export_onnx, export_program
from fusible.models.fine_grained_fp8 import serve_transformers_fp8
from fusible.models.language_model import LanguageModel
from fusible.models.pretrained import from_config, from_pretrained, save_pretrained
from fusible.models.pretrained_model import PretrainedModel
from fusible.models.transformer_engine import from_transformer_engine, to_transformer_engine

__all__ = _public_names(globals())
