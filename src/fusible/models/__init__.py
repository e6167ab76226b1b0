"""Families of models, their checkpoints and tokenizers: in from Hugging Face, and out again."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.convert import conversion_report, convert
from fusible.models.exporting import export_onnx, export_program
from fusible.models.language_model import LanguageModel
from fusible.models.pretrained import from_config, from_pretrained, save_pretrained

__all__ = _public_names(globals())
