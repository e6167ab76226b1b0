"""Linear attention by gated delta rules: the recurrence, and its variants on packed sequences."""

from __future__ import annotations

from fusible.compat.linear_attention.packed import gated_delta_net, gated_delta_net_v2, gated_delta_product

__all__ = ["gated_delta_net", "gated_delta_net_v2", "gated_delta_product"]
