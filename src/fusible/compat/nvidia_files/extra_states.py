"""Every form that the extra state of NVIDIA's modules has had, as a dictionary, and as the present form: a pickle in a uint8 tensor.

Versions 2.x have that. Versions 1.x write the same dictionary without a recipe, by ``torch.save`` into an ``io.BytesIO``, for modules without scales
too, of which it holds None; the first ones wrote a list. The files are read with ``weights_only=True``, the pickles by ``nvidia_state``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fusible.compat.nvidia_files.records import NamedFile, stand_ins
from fusible.compat.nvidia_state import Recipe, read_pickled_state, write_state
from fusible.errors import CheckpointError, expected
from fusible.locks import Lock
from fusible.quantized import DelayedScaling

__all__ = ["extra_state", "is_stateless", "loaded_file", "present_form"]

_IN_ORDER = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
"""The first entries of the list of old versions, by their later names."""
_ZIP = b"PK\x03\x04"


def loaded_file(file: Any, of: str) -> Any:
    """What ``torch.save`` wrote to ``file``, a stream of bytes: tensors on the CPU, plain values, and stand-ins of what NVIDIA's package names.
    Raises ``CheckpointError``, and has run nothing of it."""
    try:
        with _reading, _these_alone():
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file raises whatever the step that meets the damage does
        got = f"what torch reads for no weights ({_reason(error)})"
        wanted = "tensors, plain values and quantized tensors of Transformer Engine"
        do = "use an intact checkpoint of these alone: nothing of it was run"
        raise CheckpointError(expected(wanted, of=of, got=got, do=do)) from error


def _reason(error: Exception) -> str:
    """What torch says, without its advice to trust the file."""
    text = " ".join(str(error).split())
    for before in ("from a trusted source.", "in the following error message.", "WeightsUnpickler error:"):
        text = text.rpartition(before)[2]
    for behind in (" was not an allowed global", " Check the documentation"):
        text = text.partition(behind)[0]
    return text.strip()[:200]


_reading = Lock()


@contextmanager
def _these_alone() -> Iterator[None]:
    """While open, torch knows the stand-ins by the names of NVIDIA's package, which has told it of its own classes where it was imported."""
    former, ours = torch.serialization.get_safe_globals(), stand_ins()
    names = {name for _, name in ours}
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*(each for each in former if _name_of(each) not in names), *ours])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(former)


def _name_of(known: Any) -> str:
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"


def extra_state(value: Any, of: str) -> Any:
    """The state that an ``_extra_state`` of any version is: a dictionary, or None. ``of``: whose it is, for the sentence of an error."""
    content = value.content if isinstance(value, NamedFile) else value.getvalue() if isinstance(value, io.BytesIO) else None
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        content = value.detach().cpu().numpy().tobytes()
        if not content.startswith(_ZIP):
            return read_pickled_state(content) if content else None
    if content is not None:
        value = loaded_file(io.BytesIO(content), of)
    if isinstance(value, list | tuple) and len(value) >= len(_IN_ORDER) and all(isinstance(each, torch.Tensor) for each in value[: len(_IN_ORDER)]):
        return {**dict(zip(_IN_ORDER, value, strict=False)), "extra_fp8_variables": {}}
    if value is not None and not isinstance(value, Mapping):
        do = "load it by NVIDIA's package and save it anew, or with strict=False"
        raise CheckpointError(expected("a uint8 tensor, or the file or the list of older versions", of=of, got=type(value).__name__, do=do))
    return value


def is_stateless(state: Any) -> bool:
    """Whether a state has nothing of delayed scaling: of a recipe that keeps nothing, some versions write the recipe alone."""
    return state is None or (isinstance(state, Mapping) and "extra_fp8_variables" in state and not any(name in state for name in _IN_ORDER))


def present_form(value: Any, of: str) -> torch.Tensor:
    """An ``_extra_state`` of any version as versions 2.x read it; of one that is in this form already, itself."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and not value[:4].cpu().numpy().tobytes().startswith(_ZIP):
        return value
    state = extra_state(value, of)
    if is_stateless(state):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        kept: dict[str, Any] = {name: state[name].detach().cpu().contiguous() for name in _IN_ORDER}
        recipe = DelayedScaling(amax_history_len=len(kept["amax_history_fwd"]))
        extra = {name: each for name, each in state.get("extra_fp8_variables", {}).items() if isinstance(each, bool | int | float | str)}
    except (AttributeError, KeyError, TypeError) as error:
        do = "use an intact checkpoint, or load it with strict=False"
        raise CheckpointError(expected("scales and amaxes", of=of, got=f"otherwise ({error!r})", do=do)) from error
    return write_state({"recipe": Recipe.of(recipe), **kept, "extra_fp8_variables": {"fp8_checkpoint": True, **extra}})
