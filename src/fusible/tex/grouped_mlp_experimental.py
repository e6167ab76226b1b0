"""The submodule by which NVIDIA's package calls what serves its fused grouped MLP."""

from __future__ import annotations

from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.dispatch import dispatcher

__all__ = [name for name in ("swizzle_scales_and_pack_ptrs_for_discrete_weights",) if name in DECLARATIONS]  # pyright: ignore[reportUnsupportedDunderAll]

globals().update({name: dispatcher(DECLARATIONS[name]) for name in __all__})
