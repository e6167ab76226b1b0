"""Right calls of every word of nvte, drawn at random: their arguments, and in float64 what must come of them. A file a family of words."""

from __future__ import annotations

import nvte_words_activations
import nvte_words_attention
import nvte_words_copies
import nvte_words_groups
import nvte_words_norms
import nvte_words_products
from nvte_draws import WORDS, Draw, Given, Wanted, share

__all__ = ["FAMILIES", "WORDS", "Draw", "Given", "Wanted", "share"]

FAMILIES = (
    nvte_words_activations, nvte_words_attention, nvte_words_copies, nvte_words_groups, nvte_words_norms, nvte_words_products,
)  # fmt: skip
"""What enters the words, as it is imported."""
