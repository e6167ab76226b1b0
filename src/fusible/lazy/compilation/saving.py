"""Executables in files.

A file is a line that names the format and its version, a line with the SHA-256 of all that follows, and a zip archive of

* ``executable.json``: names, dtypes, dimensions and their bounds, the types of the results, and the conditions on sizes;
* ``module.stablehlo``: the program as a portable StableHLO artifact, which later versions read too. Its dynamic sizes are ``?``;
* ``constants.safetensors``: the tensors that it was compiled with (int4 as int8);
* ``binary``, where it was asked for: the compiled program of the usual sizes, which fits one version of the engine and one kind of processor.

Nothing in it is code of Python's. Nothing in it is compressed, so reading takes no more memory than the file is long. It is written beside its place
and then renamed, so that a reader finds the old file or the new one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy

from fusible.errors import ArgumentError, CheckpointError, CompileError, expected
from fusible.files import parse_json, read_file, replace_file
from fusible.lazy.assumptions import Condition
from fusible.lazy.compilation.argument_checks import ArgumentCheck, SizeCheck, checks_of
from fusible.lazy.compilation.signature import Signature
from fusible.lazy.compilation.signature_json import parameters_from_json, parameters_to_json
from fusible.lazy.compilation.source import ModuleSource
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dims import Size, Symbol
from fusible.lazy.dims_json import from_json, to_json
from fusible.lazy.dtypes import DTYPES, dtype, int4
from fusible.lazy.engine.engines import current_engine
from fusible.lazy.engine.host import aligned
from fusible.lazy.source import UNKNOWN
from fusible.lazy.trace import Storage

if TYPE_CHECKING:
    from fusible.lazy.compilation.executable import Executable

__all__ = ["load", "save"]

_FORMAT = b"fusible executable 1\n"
_DIGEST = 64
_MANIFEST, _MODULE, _CONSTANTS, _BINARY = "executable.json", "module.stablehlo", "constants.safetensors", "binary"
_SAVED_DTYPES = {"bool": "BOOL", "bfloat16": "BF16", "float8": "F8_E4M3", "float8e5m2": "F8_E5M2", "int4": "I8"}
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    CompileError,
    EOFError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    safetensors.SafetensorError,
    zipfile.BadZipFile,
)
"""The errors that reading a damaged archive, text or table raises."""


def save(executable: Executable, path: str | os.PathLike[str], binary: bool) -> None:
    """Write ``executable`` to ``path``. See the module.

    Raises ``ArgumentError`` where there is no such directory, ``FileError`` where the system refuses: no room, no permission.
    """
    if not Path(path).parent.is_dir():
        raise ArgumentError(expected("a directory that exists", of=f"a file to save, {os.fspath(path)}", got=Path(path).parent, do="make it first"))
    contents = {
        _MANIFEST: json.dumps(_manifest(executable, current_engine().tag() if binary else None), indent=1).encode(),
        _MODULE: executable.saved.source.module().portable,
        _CONSTANTS: safetensors.numpy.save({f"c{i}": _bits(op.data) for i, op in enumerate(executable.saved.source.storages)}),
    }
    if binary:
        contents[_BINARY] = executable.saved.usual_program().serialize()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    body = archive.getvalue()
    replace_file(Path(path), b"".join((_FORMAT, hashlib.sha256(body).hexdigest().encode(), b"\n", body)))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(np.int8) if array.dtype == int4.numpy else array


def _manifest(executable: Executable, engine: str | None) -> dict[str, Any]:
    saved = executable.saved
    return {
        "name": executable.name,
        "level": saved.source.level,
        "single": saved.single,
        "parameters": parameters_to_json(saved.signature.parameters),
        "results": [[[to_json(n) for n in shape], of.name, place.name] for shape, of, place in saved.results],
        "conditions": [condition.to_json() for condition in saved.conditions],
        "constants": [[list(op.shape), op.dtype.name] for op in saved.source.storages],
        "engine": engine,
    }


def load(cls: type[Executable], path: str | os.PathLike[str], trust_binary: bool) -> Executable:
    """The executable that ``path`` holds. See the module."""
    content = read_file(path, do="save the executable again")
    head = len(_FORMAT) + _DIGEST + 1
    if not content.startswith(_FORMAT):
        first = content.split(b"\n")[0]
        known = first.startswith(_FORMAT[: _FORMAT.rindex(b" ")])
        raise _damaged(path, f"a file of another version ({first.decode(errors='replace')})" if known else "something else")
    body = content[head:]
    if hashlib.sha256(body).hexdigest().encode() != content[len(_FORMAT) : head - 1]:
        raise _damaged(path, "one that is truncated or altered")
    try:
        parts = _parts(body)
        manifest = parse_json(parts[_MANIFEST], of=f"{_MANIFEST} in {os.fspath(path)}", do="save the executable again")
        made = _made(cls, manifest, parts, trust_binary)
        # What was read has to be written again as it was: then no entry was left over, or misread as one that it resembles.
        if json.dumps(_manifest(made, manifest["engine"]), sort_keys=True) != json.dumps(manifest, sort_keys=True):
            raise ValueError("entries of another kind")
        return made
    except _DAMAGE as error:
        raise _damaged(path, f"damaged contents ({type(error).__name__}: {str(error).rpartition(chr(10))[2]})") from error


def _parts(body: bytes) -> dict[str, bytes]:
    """The members of an archive. Raises ``ValueError`` for one that ``save`` does not write: an unknown or doubled name, compression, overlap."""
    with zipfile.ZipFile(io.BytesIO(body)) as file:
        members = file.infolist()
        names = [member.filename for member in members]
        if not set(names) <= {_MANIFEST, _MODULE, _CONSTANTS, _BINARY} or len(set(names)) != len(names):
            raise ValueError(f"the members {', '.join(names)[:80]}")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError(f"{member.filename} is compressed")
        if sum(member.file_size for member in members) > len(body):
            raise ValueError("members that overlap")
        return {name: file.read(name) for name in names}


def _damaged(path: str | os.PathLike[str], got: str) -> CheckpointError:
    return CheckpointError(expected("an intact file of Executable.save", of=os.fspath(path), got=got, do="save the executable again"))


def _made(cls: type[Executable], manifest: Any, parts: dict[str, bytes], trust_binary: bool) -> Executable:
    if type(manifest["name"]) is not str:
        raise TypeError(f"the name {manifest['name']!r}")
    signature = Signature(manifest["name"], parameters_from_json(manifest["parameters"]))
    checks = checks_of(signature)
    known = {symbol.name: symbol for a in checks for symbol, _ in a.origins}
    results = [(tuple([from_json(n, known) for n in shape]), DTYPES[of], device(place)) for shape, of, place in manifest["results"]]
    storages = _storages(parts[_CONSTANTS], manifest["constants"])
    inputs = [(a.shape, a.dtype) for a in checks] + [(op.shape, op.dtype) for op in storages]
    outputs = [(shape, of) for shape, of, _ in results]
    level = int(manifest["level"])
    source = ModuleSource(parts[_MODULE], inputs, outputs, _sizes(checks), storages, level)  # type: ignore[arg-type] - see Shape
    if trust_binary and _BINARY in parts and manifest["engine"] == current_engine().tag():
        source.binary = {symbol: symbol.opt for symbol in known.values()}, parts[_BINARY]
    conditions = [Condition.from_json(data, known) for data in manifest["conditions"]]
    return cls(manifest["name"], signature, checks, results, source, single=bool(manifest["single"]), conditions=conditions)


def _sizes(checks: list[ArgumentCheck]) -> dict[int, Symbol]:
    return {i: a.origins[0][0] for i, a in enumerate(checks) if isinstance(a, SizeCheck) and isinstance(a.size, Size)}


def _saved_dtype(of: dtype) -> str:
    """The name in safetensors of the dtype that a constant is saved in."""
    return _SAVED_DTYPES.get(of.name) or of.name.replace("uint", "U").replace("int", "I").replace("float", "F").upper()


def _storages(data: bytes, types: list[Any]) -> list[Storage]:
    """The constants, as stored tensors."""
    found = dict(safetensors.deserialize(data))
    if set(found) != {f"c{i}" for i in range(len(types))}:
        raise ValueError(f"{len(found)} constants, not the {len(types)} of the program")
    made = []
    for i, (shape, name) in enumerate(types):
        of = DTYPES[name]
        stored = found[f"c{i}"]
        if list(stored["shape"]) != list(shape) or stored["dtype"] != _saved_dtype(of):
            raise ValueError(f"constant {i} is {stored['dtype']} {stored['shape']}, not {name} {shape}")
        array = aligned(np.frombuffer(stored["data"], of.numpy).reshape(shape))
        op = Storage(tuple(shape), of, array)
        op.output(DEFAULT, UNKNOWN)
        made.append(op)
    return made
