"""Functions that compose trace operations. Those that are methods only are registered by being imported here."""

from fusible.lazy.frontend.ops.indexing import getitem

__all__ = ["getitem"]
