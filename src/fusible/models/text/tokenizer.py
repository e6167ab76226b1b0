"""``Tokenizer``: text to tokens and back, by the files of a Hugging Face directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.files import read_file
from fusible.models.text.config_files import read_config, token_text
from fusible.models.text.libraries import library
from fusible.models.text.unicode import check_unicode

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

_SPECIAL = "_token"
"""What the names of special tokens end with: ``bos_token``, ``eos_token``, ..., and those that a model has of its own, as ``image_token``."""
_OWN = ("extra_special_tokens", "model_specific_special_tokens")
"""Entries that may have these by name."""
_DO = "save the tokenizer with transformers' AutoTokenizer.from_pretrained(...).save_pretrained"


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, with its special tokens.

    ``special_tokens``: their texts by transformers' names (``bos_token``, ``eos_token``, ...). ``stop_tokens``: the tokens that end a text.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str] | None = None, stop_tokens: Iterable[int] | None = None
    ) -> None:
        self._tokenizer, self.special_tokens = tokenizer, dict(special_tokens or {})
        tokenizer.no_truncation()
        tokenizer.no_padding()
        end = self.token_of(self.special_tokens.get("eos_token"))
        self.stop_tokens: frozenset[int] = frozenset(stop_tokens or ()) | ({end} if end is not None else set())

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Self:
        """The one of ``tokenizer.json``. Special tokens are those of ``tokenizer_config.json`` and ``special_tokens_map.json``; those that end a
        text, also those of ``generation_config.json``, or else of ``config.json``. What stands around a text is what ``tokenizer.json`` says: as in
        transformers, ``add_bos_token`` does not count beside it. Raises ``CheckpointError`` for damaged or missing files."""
        place = Path(folder)
        content = read_file(place / "tokenizer.json", do=_DO)
        made = _parsed(content, str(place / "tokenizer.json"))
        named = {**read_config(place, "special_tokens_map.json"), **read_config(place, "tokenizer_config.json")}
        special = {name: text for name, value in named.items() if name.endswith(_SPECIAL) and (text := token_text(value)) is not None}
        for own in (named.get(name) for name in _OWN):
            special |= {name: text for name, value in own.items() if (text := token_text(value)) is not None} if isinstance(own, dict) else {}
        ends = read_config(place, "generation_config.json").get("eos_token_id", read_config(place, "config.json").get("eos_token_id"))
        return cls(made, special, [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)])

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_of(self, text: str | None) -> int | None:
        """The token whose text is exactly that, or None."""
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of ``text``; with ``special``, and those that the tokenizer puts around a text. Special tokens' texts in it are these tokens.

        Raises ``ArgumentError`` for a text that UTF-8 has no bytes for, or the vocabulary no tokens.
        """
        check_unicode(text)
        with _refusals():
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_places(self, text: str, special: bool = True) -> tuple[list[int], list[tuple[int, int] | None]]:
        """The same, and of each token which characters of ``text`` it stands for, ``(first, behind the last)``, spaces included; None for those that
        are put around it."""
        check_unicode(text)
        with _refusals():
            plain = self._without_post_processor.encode(text, add_special_tokens=False)
        found = self._tokenizer.post_process(plain, None, special)
        places = iter(plain.offsets)
        return found.ids, [None if around else next(places, None) for around in found.special_tokens_mask]

    @cached_property
    def _without_post_processor(self) -> tokenizers.Tokenizer:
        """The same tokenizer, of a text alone: a post-processor may take spaces away from the places of tokens."""
        copy = type(self._tokenizer).from_str(self._tokenizer.to_str())
        copy.post_processor = library("tokenizers").processors.ByteLevel(trim_offsets=False)  # changes nothing
        return copy

    def decode(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD. Spaces stay as they are: nothing is cleaned up."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def token_text(self, token: int) -> str:
        """The text of one token, for people: special ones too."""
        return self.decode([token], skip_special=False)


@contextmanager
def _refusals() -> Iterator[None]:
    """Tell in a sentence what the library refuses of a text: characters that are no tokens, where there is none for unknown ones."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:  # which the library raises, and nothing narrower
            raise
        got = f"what the library refuses ({error})"
        raise ArgumentError(expected("characters that the vocabulary has tokens for", of="the text", got=got, do="leave others out")) from None


def _parsed(content: bytes, of: str) -> tokenizers.Tokenizer:
    try:
        return library("tokenizers").Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(expected("a tokenizer", of=of, got=f"what the library refuses ({error})", do=_DO)) from None
