"""Training of language models: documents, packed windows, the order of batches, steps, adapters of low rank, and states that are resumed."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.training.schedule import Cosine, hash_seed

__all__ = _public_names(globals())
