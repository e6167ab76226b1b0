"""The quantization schemes of checkpoints, one file each, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusible.errors import CheckpointError, expected
from fusible.models.checkpoints.schemes.compressed_tensors import COMPRESSED_TENSORS
from fusible.models.checkpoints.schemes.fine_grained_fp8 import FINE_GRAINED_FP8
from fusible.models.checkpoints.schemes.fusible_own import FUSIBLE
from fusible.models.checkpoints.schemes.modelopt import MODELOPT
from fusible.models.checkpoints.schemes.mxfp4 import MXFP4
from fusible.models.checkpoints.schemes.scheme import Config, Scheme

__all__ = ["Config", "SCHEMES", "Scheme", "scheme_of"]

SCHEMES = (FINE_GRAINED_FP8, COMPRESSED_TENSORS, MODELOPT, MXFP4, FUSIBLE)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a ``quantization_config``. Raises ``CheckpointError`` for one that Fusible does not read."""
    found = next((scheme for scheme in SCHEMES if scheme.fits(config)), None)
    if found is None:
        known = ", ".join(scheme.name for scheme in SCHEMES)
        got, do = repr(config.get("quant_method"))[:80], "convert the model to one of these, or load it unquantized"
        raise CheckpointError(expected(f"one of {known}", of="quant_method of quantization_config", got=got, do=do))
    return found
