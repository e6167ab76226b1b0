"""transformers' own FP8 models on machines without a GPU: its modules, whose products are Fusible's."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.fine_grained_fp8.serving import serve_transformers_fp8

__all__ = _public_names(globals())
