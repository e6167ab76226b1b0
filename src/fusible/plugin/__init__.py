"""Fusible as a plugin of NVIDIA's package: with ``NVTE_PLUGIN=fusible.plugin``, its import puts tex in the native module's place.

The package loads its native library first and keeps it at ``transformer_engine_torch_nv``, where the nvidia backend finds it. Then it asks the module
in its place for two optional hooks: ``get_attention_backend`` and ``flash_attention`` (``fusible.plugin.hooks``).
"""

from __future__ import annotations

import sys

from fusible import tex
from fusible.compat.finder import alias_submodules
from fusible.errors import ArgumentError, expected
from fusible.plugin.hooks import HOOKS
from fusible.plugin.patches import apply_patches

__all__ = ["load_plugins"]

_NATIVE = "transformer_engine_torch"


def load_plugins() -> None:
    """Make ``transformer_engine_torch`` tex: called by NVIDIA's package once its own library is loaded.

    Raises ``ArgumentError``, before anything is changed, where modules of the package hold the native module already: they would go on calling it.
    """
    former = sys.modules.get(_NATIVE)
    bound = [] if former in (None, tex) else [name for name in sorted(sys.modules) if _holds(name, former)]
    if bound:
        do = "set NVTE_PLUGIN=fusible.plugin before transformer_engine is imported"
        what = f"no module of transformer_engine that has imported {_NATIVE}"
        raise ArgumentError(expected(what, of="load_plugins", got=bound[0], do=do))
    apply_patches()
    for name, hook in HOOKS.items():
        setattr(tex, name, hook)
    sys.modules[_NATIVE] = tex
    alias_submodules(_NATIVE, tex.__name__)
    tex.registry.changed()


def _holds(name: str, native: object) -> bool:
    """Whether a loaded module of NVIDIA's package has bound the native module to a name of its own."""
    return name.startswith("transformer_engine.") and any(value is native for value in list(vars(sys.modules[name]).values()))
