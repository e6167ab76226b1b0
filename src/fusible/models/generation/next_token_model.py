"""What generation needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fusible.errors import DTypeError, expected
from fusible.pytorch import KVCache

__all__ = ["NextTokenModel", "check_next_token_model"]


class NextTokenModel(Protocol):
    """Logits of the next token of sequences, whose keys and values are kept. ``context``: the most tokens that a sequence may have."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...

    def next_logits(self, tokens: Tensor, seq_lens: Tensor, cache: KVCache) -> Tensor:
        """fp32 ``[sequences, vocabulary]``: of what follows the last token of each sequence.

        ``tokens``, int64 ``[n]``: those of the sequences one after another, behind what ``cache`` has of them. ``seq_lens``, int32
        ``[sequences]``: how many of each; one of 0 rests, and its row may have any values. The caller advances the cache.
        """
        ...

    def new_cache(self, sequences: int, capacity: int, page_size: int | None = None, pages: int | None = None) -> KVCache:
        """A cache for this model, of the type and on the device of its activations."""
        ...


_NEEDED = ("vocabulary", "context", "next_logits", "new_cache")


def check_next_token_model(model: object) -> None:
    """Raise ``DTypeError`` for what is no ``NextTokenModel``."""
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    if missing:
        wanted, got = f"a model with {', '.join(_NEEDED)}", f"a {type(model).__qualname__} without {', '.join(missing)}"
        do = "give one of fusible.from_pretrained, or call generate of its own"
        raise DTypeError(expected(wanted, of="the model that generates", got=got, do=do))
