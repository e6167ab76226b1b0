"""The backends of this package. Importing it registers them; none is probed before it is needed."""

from __future__ import annotations

from fusible.tex.backends import cpu, flaggems, nvidia, torch_backend, xla

__all__ = ["cpu", "flaggems", "nvidia", "torch_backend", "xla"]
