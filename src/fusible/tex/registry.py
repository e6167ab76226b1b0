"""``fusible.tex.selection.registry`` by the name that plugins written for TransformerEngine-FL import it by."""

from __future__ import annotations

from fusible.tex.selection.registry import Decision, Registry, registry

__all__ = ["Decision", "Registry", "registry"]
