"""Files of NVIDIA's package: its state dicts, in and out, without the package."""

from __future__ import annotations

from fusible.compat.nvidia_files.operations import operations_from_nvidia, operations_to_nvidia
from fusible.compat.nvidia_files.reading import read_state_dict
from fusible.compat.nvidia_files.writing import write_state_dict
from fusible.facade import public_names as _public_names

__all__ = _public_names(globals())
