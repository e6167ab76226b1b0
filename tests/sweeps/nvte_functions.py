"""Right calls of every function of nvte, drawn at random: their arguments, and in float64 what must come of them. A file a family of functions."""

from __future__ import annotations

import nvte_functions_activations
import nvte_functions_attention
import nvte_functions_copies
import nvte_functions_groups
import nvte_functions_norms
import nvte_functions_products
from nvte_draws import DRAWN_CALLS, Draw, DrawnCall, Wanted, share

__all__ = ["FAMILIES", "DRAWN_CALLS", "Draw", "DrawnCall", "Wanted", "share"]

FAMILIES = (
    nvte_functions_activations, nvte_functions_attention, nvte_functions_copies, nvte_functions_groups, nvte_functions_norms, nvte_functions_products,
)  # fmt: skip
"""What enters the functions, as it is imported."""
