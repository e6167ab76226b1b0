"""``fusible export``: a checkpoint as a file that other programs run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusible.cli.weight_formats import recipe_of_format
from fusible.errors import ArgumentError, BackendError, expected
from fusible.files import replaced
from fusible.models import export_onnx, export_program, from_pretrained

__all__ = ["export"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OPSET = 23


def export(arguments: argparse.Namespace) -> int:
    """The job of ``fusible export``."""
    kind, dtype = _named(arguments.to, _KINDS, "--to"), _named(arguments.dtype, _DTYPES, "--dtype")
    suffix, write = kind
    out = Path(arguments.out)
    if out.suffix != suffix:
        raise ArgumentError(expected(f"a name that ends with {suffix}", of="--out", got=repr(arguments.out), do="name it so, or choose another --to"))
    if arguments.opset is not None and write is not _onnx:
        raise ArgumentError(expected("--to onnx beside it", of="--opset", got=f"--to {arguments.to}", do="leave it out"))
    recipe = recipe_of_format(arguments.directory, arguments.format)
    write(from_pretrained(arguments.directory, recipe, dtype=dtype), out, arguments.opset)
    written = sum(path.stat().st_size for path in (out, out.with_name(f"{out.name}.data")) if path.exists())
    print(f"{out}: {written / 1e6:,.1f} MB.")
    return 0


def _named(name: str, known: dict[str, Any], option: str) -> Any:
    if name not in known:
        *names, last = known
        raise ArgumentError(expected(f"{', '.join(names)} or {last}", of=option, got=repr(name), do="name one of these"))
    return known[name]


def _onnx(model: Any, out: Path, opset: int | None) -> None:
    export_onnx(model, out, opset=_OPSET if opset is None else opset)


def _torch(model: Any, out: Path, opset: int | None) -> None:
    program = export_program(model)
    with replaced(out) as place:
        torch.export.save(program, place)


def _aoti(model: Any, out: Path, opset: int | None) -> None:
    inductor = importlib.import_module("torch._inductor")  # brings the compiler
    program = export_program(model)
    with replaced(out) as place:
        try:
            inductor.aoti_compile_and_package(program, package_path=str(place))
        except inductor.exc.InvalidCxxCompiler as error:
            do = "install one, or choose --to torch"
            raise BackendError(expected("a C++ compiler", of="--to aoti", got="none", do=do)) from error


_KINDS: dict[str, tuple[str, Callable[[Any, Path, int | None], None]]] = {
    "onnx": (".onnx", _onnx),
    "torch": (".pt2", _torch),
    "aoti": (".pt2", _aoti),
}
"""By the name of a kind, how its files' names end, and what writes one."""
