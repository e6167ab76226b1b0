"""``read_state_dict``: files of state dicts that NVIDIA's package wrote, of all its versions, without the package and without a pickle."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from fusible.compat.nvidia_files.extra_states import loaded_file, present_form
from fusible.errors import CheckpointError, expected
from fusible.files import map_file, read_file

__all__ = ["read_state_dict"]

_EXTRA = "_extra_state"


def read_state_dict(path: str | os.PathLike[str]) -> Any:
    """What ``torch.save`` wrote to the file ``path``, most often a state dict; or the tensors of a file in safetensors.

    Tensors are on the CPU. Quantized parameters of NVIDIA's package (``quantized_model_init``) become Fusible's of the same bytes. What its modules
    have in ``_extra_state`` becomes what versions 2.x read, a uint8 tensor, whichever version wrote it: so the result is taken by
    ``load_state_dict`` of ``fusible.compat``'s modules, and of NVIDIA's own. Nothing of the file is executed, and NVIDIA's package need not be there.

    Raises ``MissingFileError`` where there is none, and ``CheckpointError`` for a damaged file, and for one that names anything else.
    """
    name, mapped = os.fspath(path), map_file(path)
    if Path(name).suffix == ".safetensors" or mapped[8:9] == b"{":
        try:
            return _with_present_states(load(read_file(path)), name)
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(expected("tensors in safetensors", of=name, got=str(error), do="use an intact checkpoint")) from error
    return _with_present_states(loaded_file(mapped, name), name)


def _with_present_states(tree: Any, of: str) -> Any:
    if isinstance(tree, Mapping):
        made = {
            key: present_form(value, f"{key} in {of}") if _is_state(key, value) else _with_present_states(value, of) for key, value in tree.items()
        }
        if not isinstance(tree, OrderedDict):
            return made
        result: Any = OrderedDict(made)
        if hasattr(tree, "_metadata"):
            result._metadata = tree._metadata  # type: ignore[attr-defined]
        return result
    return [_with_present_states(each, of) for each in tree] if type(tree) is list else tree


def _is_state(key: Any, value: Any) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] == _EXTRA and value is not None
