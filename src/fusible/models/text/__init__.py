"""Text to tokens and back: tokenizers, chat templates, and text that is shown while it grows."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.text.chat import ChatTemplate
from fusible.models.text.streaming import Detokenizer, StopStrings, TextStream
from fusible.models.text.tokenizer import Tokenizer

__all__ = _public_names(globals())
