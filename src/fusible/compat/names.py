"""``install`` and ``uninstall``: the names by which scripts import Transformer Engine, and Tripy, leading to Fusible."""

from __future__ import annotations

import sys
from pathlib import Path

from fusible.compat import te_names
from fusible.compat.clients import CLIENTS
from fusible.compat.finder import Names, VirtualPackage, adapt_loaded, found_elsewhere
from fusible.compat.nvidia_package import PATCHES
from fusible.errors import ArgumentError, expected

__all__ = ["install", "installed", "uninstall"]

_NATIVE = "transformer_engine_torch"
_PACKAGE = "transformer_engine"
_TEX = "fusible.tex"
_ALIASES = {
    "transformer_engine_fl_torch": _TEX,
    "transformer_engine.plugins.tex": _TEX,
    "transformer_engine.plugins.transformer_engine_fl_torch": _TEX,
    "transformer_engine.plugins.tex_interface.base": "fusible.tex.interface.base",
    "transformer_engine.plugins.tex_interface.registry": "fusible.tex.selection.management",
    "transformer_engine.plugins.tex_interface.backends": "fusible.tex.backends",
}
_PACKAGES = {
    **te_names.PACKAGES,
    "transformer_engine.plugins": VirtualPackage(standalone=True),
    "transformer_engine.plugins.tex_interface": VirtualPackage((_TEX,), None, "the public names of fusible.tex", standalone=True),
}

_TRIPY = {"tripy": "fusible.lazy", "nvtripy": "fusible.lazy"}

_names: Names | None = None


def install(*, replace: bool = False, replace_package: bool = False, tripy: bool = False) -> None:
    """Let the names of Transformer Engine lead to Fusible, until ``uninstall``; a second call changes nothing, but for ``tripy``.

    ``transformer_engine_torch``, ``transformer_engine.plugins.tex``, ``transformer_engine.plugins.transformer_engine_fl_torch`` and
    ``transformer_engine.plugins.tex_interface`` with ``base``, ``registry`` and ``backends`` lead to ``fusible.tex``. What is really installed under
    one of these names keeps it; with ``replace``, ``transformer_engine_torch`` is Fusible's even where NVIDIA's own is there. Where
    ``transformer_engine_torch`` is Fusible's and NVIDIA's Python package ``transformer_engine`` is installed, that package runs on it.

    Where that package is not installed, or with ``replace_package``, its names for what Fusible has lead to Fusible's own:
    ``transformer_engine.pytorch.ops``, recipes, autocast, quantizers and quantized tensors. They are looked up when they are asked for.

    With ``tripy``, the names ``tripy`` and ``nvtripy`` lead to ``fusible.lazy``, where no package of that name is installed.

    Raises ``ArgumentError`` where another ``transformer_engine_torch``, or the package that is to be replaced, is in use already.
    """
    global _names
    if _names is None:
        _names = _made(replace, replace_package)
    if tripy:
        _names.aliases.update(_TRIPY)


def _made(replace: bool, replace_package: bool) -> Names:
    """The finder of Transformer Engine's names, installed in ``sys.meta_path``."""
    ours = replace or not _native_is_there()
    for name, taken in ((_NATIVE, ours), (_PACKAGE, replace_package)):
        if taken and name in sys.modules and sys.modules[name] is not sys.modules.get(_TEX):
            do = "call fusible.compat.install() before importing it"
            raise ArgumentError(expected(f"no {name}", of="the modules imported so far", got="one", do=do))
    forced = frozenset(name for name, taken in ((_NATIVE, ours), (_PACKAGE, replace_package)) if taken)
    names = Names({**_ALIASES, **({_NATIVE: _TEX} if ours else {})}, _PACKAGES, {**CLIENTS, **(PATCHES if ours else {})}, forced)
    sys.meta_path.insert(0, names)
    adapt_loaded(names.patches)
    return names


def uninstall() -> None:
    """Take the names back; what a module imported through them stays with it."""
    global _names
    if _names is not None:
        sys.meta_path.remove(_names)
        _names.forget()
        _names = None


def installed() -> bool:
    """Whether the names are installed."""
    return _names is not None


def _native_is_there() -> bool:
    """Whether NVIDIA's compiled extension is installed: as a module of its own, or within the Python package."""
    if found_elsewhere(_NATIVE) is not None:
        return True
    package = found_elsewhere(_PACKAGE)
    folders = [Path(folder) for folder in package.submodule_search_locations or ()] if package is not None else []
    return any(path.is_file() for folder in folders for place in (folder, folder / "wheel_lib") for path in place.glob(f"{_NATIVE}*.so"))
