"""The extra state of NVIDIA's modules, read without running anything of it.

The package keeps the state of delayed scaling as a pickle in a uint8 tensor. It reads that by ``pickle.loads``, and by ``torch.load`` with
``weights_only=False`` where a checkpoint is older, if an environment variable says that the checkpoint is trusted. Here both are done by a reader
that makes plain values, tensors and the package's recipes, and nothing else; so no trust is asked for. A framework's own class of a recipe is
taken where the program has loaded it; none of its functions is called.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

from fusible.compat.finder import after
from fusible.errors import CheckpointError, expected
from fusible.quantized import DelayedScaling

__all__ = ["Recipe", "UnknownRecord", "patch_pickle", "patch_state", "read_pickled_state", "read_state", "write_state"]

_RECIPES = "transformer_engine.common.recipe"
_RECORDS = (
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "_FormatHelper",
    "_OverrideLinearPrecision",
)
"""The classes of the package's recipes: dataclasses, an enumeration and tuples of plain values."""


def read_state(data: bytes) -> Any:
    """Unpickle an extra state. Raises ``CheckpointError`` for a pickle that names another function or class, and runs nothing of it."""
    return _read(_Reader, data)


_Unpickler: Any = vars(pickle)["_Unpickler"]
"""Python's own reader, written in Python: the one in C cannot be told which of its objects it may call."""


class _Reader(_Unpickler):
    """A reader of pickles that calls what ``find_class`` gives, and no object that is among the values."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Unpickler.dispatch)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._functions: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        found = _allowed(module, name)
        self._functions.append(found)
        return found

    def _check_call(self, function: Any, bare: bool = False) -> None:
        """Raise ``CheckpointError`` for a call of what ``find_class`` has not given. A class that somebody derived from a recipe may be called
        without arguments alone (``bare``): what it does with arguments is unknown."""
        if not any(function is known for known in self._functions) or (_is_derived(function) and not bare):
            raise _refused(f"a call of {getattr(function, '__qualname__', type(function).__qualname__)}")

    def load_reduce(self) -> None:
        self._check_call(self.stack[-2])
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check_call(self.stack[-2], bare=self.stack[-1] == ())
        super().load_newobj()

    def load_newobj_ex(self) -> None:
        self._check_call(self.stack[-3])
        super().load_newobj_ex()

    def load_build(self) -> None:
        """The values of a recipe, not its methods, and of nothing else: what a class or a function is, no file may change."""
        state, of = self.stack.pop(), self.stack[-1]
        if not _is_record(type(of)) or not isinstance(state, dict) or not all(_is_value(of, name) for name in state):
            raise _refused(f"attributes of {type(of).__qualname__}")
        vars(of).update(state)

    def load_extension(self) -> None:
        raise _refused("a name by number")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.EXT1[0]] = dispatch[pickle.EXT2[0]] = dispatch[pickle.EXT4[0]] = load_extension


class UnknownRecord:
    """Stands for a recipe or a format of the package, by what a pickle says of it: the ``arguments`` that it is made with, its ``fields``, and the
    ``member`` of an enumeration that it is."""

    arguments: tuple[Any, ...] = ()
    fields: Mapping[str, Any] = MappingProxyType({})
    member: str | None = None

    def __new__(cls, *arguments: Any) -> UnknownRecord:
        made = super().__new__(cls)
        made.arguments = arguments
        return made


def _unknown_member(of: Any, name: Any) -> UnknownRecord:
    """``_member`` where the enumeration need not be there."""
    if of is not UnknownRecord or not isinstance(name, str):
        raise _refused("builtins.getattr")
    made = UnknownRecord()
    made.member = name
    return made


class _PickleReader(_Reader):
    """A reader that needs none of the package's classes: it puts ``UnknownRecord`` in the place of recipes."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Reader.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == _RECIPES and name in _RECORDS:
            self._functions.append(UnknownRecord)
            return UnknownRecord
        if (module, name) == ("builtins", "getattr"):
            self._functions.append(_unknown_member)
            return _unknown_member
        return super().find_class(module, name)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], UnknownRecord):
            state = self.stack.pop()
            if isinstance(state, dict):
                self.stack[-1].fields = state
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_pickled_state(data: bytes) -> Any:
    """``read_state`` where the package need not be there: of recipes it gives an ``UnknownRecord``."""
    return _read(_PickleReader, data)


def _read(reader: type[_Reader], data: bytes) -> Any:
    try:
        return reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises whatever the step that meets the damage does
        raise _refused(f"damaged bytes ({type(error).__name__})") from error


class Recipe(NamedTuple):
    """A recipe of delayed scaling, as the package's pickles have it: by the name of its class, and its fields."""

    fields: dict[str, Any]

    @classmethod
    def of(cls, recipe: DelayedScaling) -> Recipe:
        """Functions for amaxes and scales, which no pickle of ours names, are left out: the package takes them from its ``autocast``."""
        algorithm = recipe.amax_compute_algo
        fields = {"margin": recipe.margin, "fp8_format": _Member(recipe.fp8_format.name), "amax_history_len": recipe.amax_history_len}
        fields["amax_compute_algo"] = "max" if callable(algorithm) else algorithm
        fields |= {"scaling_factor_compute_algo": None, "reduce_amax": recipe.reduce_amax, "fp8_dpa": False, "fp8_mha": False}
        return cls({**fields, "backward_override": None})


class _Member(NamedTuple):
    """A member of ``Format`` by its name."""

    name: str


class _Writer(vars(pickle)["_Pickler"]):  # type: ignore[misc]
    """Writes ``Recipe`` and ``_Member`` as the package's objects, which need not be there; and equal states as equal bytes."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Recipe):
            self.write(pickle.GLOBAL + f"{_RECIPES}\nDelayedScaling\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            super().save(obj.fields)
            self.write(pickle.BUILD)
        elif isinstance(obj, _Member):
            self.write(pickle.GLOBAL + b"builtins\ngetattr\n" + pickle.GLOBAL + f"{_RECIPES}\nFormat\n".encode())
            super().save(obj.name)
            self.write(pickle.TUPLE2 + pickle.REDUCE)
        elif isinstance(obj, torch.storage.TypedStorage):
            self.save_reduce(torch.storage._load_from_bytes, (_stored(obj),), obj=obj)
        else:
            super().save(obj, save_persistent_id)


def _stored(storage: torch.storage.TypedStorage) -> bytes:
    """The file within a pickle of torch's that has the memory of a tensor. torch names memory by its address there, twice, before the values; here it
    is named 0, so that the bytes are those of any other process."""
    file = io.BytesIO()
    torch.save(storage, file, _use_new_zipfile_serialization=False)
    data = file.getvalue()
    values = len(data) - storage._untyped_storage.nbytes()
    return data[:values].replace(_text(str(storage._untyped_storage._cdata)), _text("0")) + data[values:]


def _text(value: str) -> bytes:
    """A string as a pickle has it."""
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def write_state(state: dict[str, Any]) -> torch.Tensor:
    """A uint8 tensor of the pickle of ``state``: of plain values, tensors and a ``Recipe``."""
    file = io.BytesIO()
    _Writer(file, protocol=4).dump(state)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _allowed(module: str, name: str) -> Any:
    """What a pickle gets for a name. Raises ``CheckpointError`` for a name that it may not use; some get a stand-in that takes fewer arguments."""
    if (found := _STAND_INS.get((module, name))) is not None:
        return found
    if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
        return found
    if module == _RECIPES and name in _RECORDS and isinstance(found := getattr(sys.modules.get(module), name, None), type):
        return found
    if _is_derived(found := getattr(sys.modules.get(module), "__dict__", {}).get(name)):
        return found
    raise _refused(f"{module}.{name}")


def _member(of: Any, name: Any) -> Any:
    """A member of an enumeration, as some versions of Python write it: ``getattr(Format, "HYBRID")``."""
    if not (isinstance(of, type) and issubclass(of, Enum) and isinstance(name, str)):
        raise _refused("builtins.getattr")
    return of[name]


def _storage(data: Any) -> Any:
    """The memory of a tensor, which is a file of torch's within the pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> torch.Tensor:
    """A tensor that lies within its storage. Raises ``CheckpointError`` for one that does not: torch would enlarge the storage."""
    whole = storage._untyped_storage.nbytes() // storage.dtype.itemsize
    if min((offset, *size, *stride), default=0) < 0 or len(size) != len(stride):
        raise _refused("a tensor of negative sizes")
    if math.prod(size) and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= whole:
        raise _refused(f"a tensor {list(size)} in the memory of {whole} values")
    return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage._untyped_storage, offset, size, stride)


_STAND_INS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}


def _is_own(of: type) -> bool:
    return of.__module__ == _RECIPES and of.__name__ in _RECORDS and is_dataclass(of)


def _is_derived(found: Any) -> bool:
    """Whether this is a class that somebody has derived from the package's recipes, made without a function of its own."""
    return isinstance(found, type) and not _is_own(found) and any(map(_is_own, found.__mro__)) and found.__new__ is object.__new__


def _is_record(of: type) -> bool:
    return _is_own(of) or _is_derived(of)


def _is_value(of: object, name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__") and not callable(getattr(type(of), name, None))


def _refused(got: str) -> CheckpointError:
    what = "tensors, plain values and recipes of Transformer Engine"
    return CheckpointError(expected(what, of="the extra state of a module", got=got, do="use a checkpoint without it: nothing of it was run"))


_PICKLE = SimpleNamespace(dumps=pickle.dumps, loads=read_state)
"""In the place of ``pickle``, in modules that write and read extra state."""


@after
def patch_pickle(module: ModuleType) -> None:
    """Patch a module of a framework that takes the package's extra state apart by itself, as Megatron-core does with that of grouped layers."""
    vars(module)["pickle"] = _PICKLE


@after
def patch_state(module: ModuleType) -> None:
    """Patch a module of the package that reads extra state: it reads by ``read_state``, and whether or not pickles are trusted."""
    names = vars(module)
    if names["pickle"] is _PICKLE:
        return
    names["pickle"] = _PICKLE
    names["should_load_extra_state_pickle"] = _whether_to_load(names["should_load_extra_state_pickle"])
    owner = names.get("TransformerEngineBaseModule")
    if owner is not None:
        names["unsafe_pickle_extra_state_enabled"] = lambda: False
        owner.set_extra_state = _reading_files(owner.set_extra_state)


def _whether_to_load(ask: Callable[[bytes, str], bool]) -> Callable[[bytes, str], bool]:
    """``ask`` says whether a pickle holds a state, and raises ``RuntimeError`` where it wants the file to be trusted: that is not needed here."""

    def should_load(data: bytes, context: str) -> bool:
        try:
            return ask(data, context)
        except RuntimeError:
            return True

    return should_load


def _reading_files(set_extra_state: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``set_extra_state`` that also takes a file of torch's, the form of old checkpoints: it is read with ``weights_only=True``, and handed on as a
    tensor."""

    def set_state(self: Any, state: Any) -> None:
        if isinstance(state, io.BytesIO):
            try:
                records = [getattr(sys.modules[_RECIPES], name) for name in _RECORDS if hasattr(sys.modules[_RECIPES], name)]
                with torch.serialization.safe_globals(records):
                    values = torch.load(io.BytesIO(state.getvalue()), map_location="cpu", weights_only=True)
            except Exception as error:
                raise _refused(f"what torch reads for no weights ({type(error).__name__})") from error
            state = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
        set_extra_state(self, state)

    return set_state
