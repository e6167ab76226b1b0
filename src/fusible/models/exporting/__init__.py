"""Models for other processes and runtimes: as programs of torch, and as ONNX files."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.exporting.onnx_file import export_onnx
from fusible.models.exporting.program import export_program

__all__ = _public_names(globals())
