"""Families of models, their checkpoints and tokenizers: in from Hugging Face, and out again."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.convert import conversion_report, convert

__all__ = _public_names(globals())
