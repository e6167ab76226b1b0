"""``write_state_dict``: a state dict as a file that NVIDIA's package reads, quantized parameters as its own tensors."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fusible.compat.nvidia_files.records import DTYPE, QUANTIZERS, TENSORS
from fusible.errors import CheckpointError, expected
from fusible.files import replace_file
from fusible.quantized import QuantizedTensor, Quantizer
from fusible.tex import DType

__all__ = ["write_state_dict"]


def write_state_dict(path: str | os.PathLike[str], state: Any) -> None:
    """Write ``state``, a state dict of modules of ``fusible.compat`` or of anything with tensors and plain values, as ``torch.save`` would.

    Quantized tensors become those of NVIDIA's package: a process that has imported it reads the file by ``torch.load(path)``, ``weights_only`` as it
    is by default. Version 2.20 of the package is meant; older ones call their tensors otherwise. The file is there when it is whole. Raises
    ``CheckpointError`` for a tensor of a class that the package has not, and ``FileError`` where it cannot be written.
    """
    file = io.BytesIO()
    torch.save(state, file, pickle_module=_PICKLE)
    replace_file(Path(path), file.getvalue())


class _Writer(vars(pickle)["_Pickler"]):  # type: ignore[misc]
    """Python's own writer, in Python: the one in C looks every name up that it writes, and NVIDIA's package need not be there."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, QuantizedTensor):
            self._save_tensor(obj)
        elif isinstance(obj, DType):
            self._save_call(DTYPE, (int(obj),))
        elif isinstance(obj, Quantizer):
            self._save_quantizer(obj)
        else:
            super().save(obj, save_persistent_id)

    def _save_tensor(self, tensor: Any) -> None:
        stored = next((each for each in TENSORS if isinstance(tensor, each.kind)), None)
        if stored is None:
            raise _refused(tensor)
        fields = {**tensor.get_metadata(), "shape": torch.Size(tensor.shape), "dtype": tensor.dtype}
        if fields.get("data") is not None:
            fields["data_transpose"] = None  # it follows from the data
        self._save_call(f"{stored.module}.{stored.function}", tuple(fields.get(name) for name in stored.fields))

    def _save_call(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._save_name(name)
        self.save(arguments)
        self.write(pickle.REDUCE)

    def _save_quantizer(self, quantizer: Any) -> None:
        """By its attributes, which are called as the package calls them, without what belongs to a process."""
        name = next((name for name, cls in QUANTIZERS.items() if cls is type(quantizer)), None)
        if name is None:
            raise _refused(quantizer)
        attributes = {each: getattr(quantizer, each) for each in _MORE if hasattr(quantizer, each)} | vars(quantizer)
        self._save_name(name)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(attributes | {each: value for each, value in _OF_A_PROCESS.items() if each in attributes})
        self.write(pickle.BUILD)

    def _save_name(self, name: str) -> None:
        module, _, own = name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())


_MORE = ("internal", "optimize_for_gemm", "block_len")
"""Attributes that a quantizer's class has here, and each quantizer there."""
_OF_A_PROCESS = {"with_amax_reduction": False, "amax_reduction_group": None}
_PICKLE = SimpleNamespace(Pickler=_Writer, __name__=__name__)
"""In the place of ``pickle``, for ``torch.save``."""


def _refused(of: object) -> CheckpointError:
    wanted, do = "tensors and quantizers that the package has, too", "dequantize it before it is saved"
    return CheckpointError(expected(wanted, of="a checkpoint for NVIDIA's package", got=f"a {type(of).__name__}", do=do))
