"""What tests of block-scaled formats take from the oracle of the package."""

from __future__ import annotations

from fusible.conformance.block_oracle import NUMPY, F, block_fp8, e2m1_values, mxfp8, nvfp4, swizzled, transformed

__all__ = ["NUMPY", "F", "block_fp8", "e2m1_values", "mxfp8", "nvfp4", "swizzled", "transformed"]
