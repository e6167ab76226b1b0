"""Training of language models: documents, packed windows, the order of batches, steps, adapters of low rank, and states that are resumed."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.training.corpus import Corpus, tokenize
from fusible.models.training.documents import Document, read_documents
from fusible.models.training.lora import Adapted, adapters_of, add_adapters, merge_adapters, save_adapters
from fusible.models.training.packing import Order, PackedBatch, Windows, pack
from fusible.models.training.processes import Processes
from fusible.models.training.saved_run import fingerprint, has_run, load_run, read_manifest, save_run
from fusible.models.training.schedule import Cosine, hash_seed
from fusible.models.training.trainer import StepOptions, Trainer

__all__ = _public_names(globals())
