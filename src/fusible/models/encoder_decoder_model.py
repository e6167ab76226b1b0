"""``EncoderDecoderModel``: an encoder and a decoder in their fastest form, each a ``Sequential`` of all its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fusible.errors import ArgumentError, ShapeError, ValuesError, check_integer, expected
from fusible.models.blueprints import EncoderDecoderBlueprint
from fusible.models.generation.sampling import Sampler, Sampling, choose_tokens, each_sampling
from fusible.models.generation.token_rows import tokens_in
from fusible.models.parts import stored_in
from fusible.models.pretrained_model import Example, PretrainedModel
from fusible.models.tokens import check_are_tokens, example_tokens, places_behind, places_of
from fusible.models.tying import stored_head
from fusible.pytorch import KVCache, Recipe, Sequential

__all__ = ["EncoderDecoderModel", "Memory", "Modules"]


class Modules(NamedTuple):
    """What an ``EncoderDecoderModel`` consists of. ``memory``: of each attention over what is encoded what makes its keys and values."""

    inputs: nn.Module
    encoder: Sequential
    tokens: nn.Module
    decoder: Sequential
    memory: nn.ModuleList
    head: nn.Module
    encoder_table: nn.Module | None
    decoder_table: nn.Module | None


@dataclass(frozen=True)
class Memory:
    """What a decoder looks at of what was encoded: of each of its attentions keys and values side by side, ``[batch, keys, 2 * width]``, and which of
    them are no padding, bool ``[batch or 1, 1, 1, keys or 1]``. They stay the same for all tokens that are decoded."""

    keys: tuple[torch.Tensor, ...]
    seen: torch.Tensor


class EncoderDecoderModel(PretrainedModel):
    """Logits of the next token of a text, by what comes before it and something else that was encoded: T5 and Whisper.

    ``model(inputs, tokens, seq_lens=None, token_lens=None)`` -> ``[batch, seq, vocabulary]`` in the dtype of activations. ``inputs``: of T5 int64
    ``[batch, source]``, of which each row's tokens beyond ``seq_lens [batch]`` are padding; of Whisper features ``[batch, bands, frames]``.
    ``tokens``: int64 ``[batch, seq]``, those beyond ``token_lens [batch]`` padding. ``encode`` gives the hidden states that the decoder looks at, and
    ``generate`` goes on from them.
    """

    blueprint: EncoderDecoderBlueprint

    def __init__(self, config: Mapping[str, Any], blueprint: EncoderDecoderBlueprint, modules: Modules, recipe: Recipe | None = None) -> None:
        super().__init__(config, blueprint, recipe)
        self.tokens, self.inputs = modules.tokens, modules.inputs
        self.encoder, self.decoder = modules.encoder, modules.decoder
        self.memory, self.head = modules.memory, modules.head
        self.encoder_table, self.decoder_table = modules.encoder_table, modules.decoder_table

    @property
    def vocabulary(self) -> int:
        return self.blueprint.tokens.vocabulary

    @property
    def context(self) -> int | None:
        """The most tokens of a text that it was made for, None for any number."""
        return self.blueprint.context

    def stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self.blueprint
        yield from plan.tokens.stored(self.tokens)
        if self.inputs is not self.tokens:
            yield from plan.inputs.stored(self.inputs)
        for table, module in ((plan.encoder_table, self.encoder_table), (plan.decoder_table, self.decoder_table)):
            if table is not None:
                yield from table.stored(module)
        yield from stored_in(plan.encoder, self.encoder)
        yield from stored_in(plan.decoder, self.decoder)
        yield from stored_in(plan.memory, self.memory)
        yield from stored_head([plan.head], [self.head], self._table)

    def examples(self) -> tuple[Example, ...]:
        inputs = self.blueprint.inputs.example(self.device)
        named = {place: ("source" if name == "sequence" else name, most) for place, (name, most) in inputs.dimensions.items()}
        return Example(inputs.value, named), example_tokens(self.context, self.device)

    def forward(
        self,
        inputs: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        token_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_are_tokens(tokens, "a decoder")
        if tokens.dim() != 2 or tokens.shape[0] != inputs.shape[0]:
            wanted = f"[{inputs.shape[0]}, seq], a row for each of the inputs"
            raise ShapeError(expected(wanted, of="tokens of a decoder", got=list(tokens.shape), do="give a row of tokens for each"))
        memory = self.remember(self.encode(inputs, seq_lens), seq_lens)
        x = self._rows(tokens, places_of(tokens, token_lens))
        starts, count = [0], tokens.shape[1]
        with self._computing():
            return self.head(self._decoded(x, token_lens, memory, self._positions(starts, count, count)))

    def encode(self, inputs: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, keys, hidden]``: the encoder's hidden states; 0 for padding."""
        x = self.inputs(inputs, seq_lens)
        if x.dim() != 3:
            raise ShapeError(expected("[batch, seq]", of="inputs of an encoder with a decoder", got=list(inputs.shape), do="pad each row"))
        extra = []
        if self.encoder_table is not None:
            extra = [self.encoder_table([0], x.shape[1], x.shape[1])] * self.encoder.public_extra_inputs
        with self._computing():
            return self.encoder(x, seq_lens, extra_inputs=extra)

    def remember(self, encoded: torch.Tensor, seq_lens: torch.Tensor | None = None) -> Memory:
        """What the decoder looks at of the hidden states ``encoded``."""
        with self._computing():
            keys = tuple(product(encoded) for product in self.memory)
        if seq_lens is None:
            return Memory(keys, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=encoded.device))
        lengths = seq_lens.to(encoded.device)
        seen = lengths if lengths.dtype is torch.bool else torch.arange(encoded.shape[1], device=encoded.device) < lengths[:, None]
        return Memory(keys, seen[:, None, None])

    def next_logits(self, tokens: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache, memory: Memory) -> torch.Tensor:
        """fp32 ``[sequences, vocabulary]``: the logits of the token after the last one of each sequence, as ``LanguageModel.next_logits`` gives
        them, by ``memory`` of one row for each sequence."""
        if not tokens.numel():
            raise ArgumentError(expected("at least one token", of="next_logits", got="none", do="call it when a sequence goes on"))
        counts, starts = seq_lens.tolist(), cache.lengths
        going = [start for start, count in zip(starts, counts, strict=True) if count]
        rows = going[:1] if len(set(going)) == 1 else starts
        ends = max(start + count for start, count in zip(starts, counts, strict=True))
        x = self._rows(tokens, places_behind(starts, seq_lens, tokens.device))
        with self._computing():
            hidden = self._decoded(x, seq_lens, memory, self._positions(rows, max(counts), ends), cache)
            return self.head(hidden[(seq_lens.cumsum(0) - 1).clamp_min(0)]).float()

    @torch.inference_mode()
    def generate(
        self,
        inputs: torch.Tensor | Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling | Sequence[Sampling] = Sampling(0.0),  # noqa: B008 - a frozen value
        *,
        seq_lens: torch.Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        stop_tokens: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """Up to ``max_tokens`` tokens of a text for each of ``inputs``, by one ``sampling`` for all or one each (default: the likeliest).

        ``inputs``: those of ``encode``, or lists of tokens, of any lengths. ``prompts``: what each text begins with, which is not given back
        (default: the token that the model's texts begin with); of Whisper, also what says language and task. ``stop_tokens``: one of these is a
        text's last (default: those of the configuration, which also says what a text never has, or never first). What is encoded is so once; the
        keys and values of a token are kept. Raises ``ArgumentError`` for texts that do not fit in the model's context, ``ValuesError`` where logits
        are no numbers.
        """
        if not len(inputs):
            return []
        if not isinstance(inputs, torch.Tensor):
            inputs, seq_lens = _padded([tokens_in(row, "inputs of generate") for row in inputs], self.device)
        begun = [[self.blueprint.start]] * len(inputs) if prompts is None else [list(tokens_in(prompt, "prompts of generate")) for prompt in prompts]
        samplings = each_sampling(sampling, len(inputs))
        self._check(len(inputs), begun, samplings, max_tokens)
        ends = frozenset(self.blueprint.stop if stop_tokens is None else stop_tokens)
        texts = [_Text(prompt, Sampler(one, prompt)) for prompt, one in zip(begun, samplings, strict=True)]
        memory = self.remember(self.encode(inputs, seq_lens), seq_lens)
        cache = KVCache(len(texts), max(map(len, begun)) + max_tokens, dtype=self.dtype, device=self.device)
        for _ in range(max_tokens):
            going = [place for place, text in enumerate(texts) if text.unread]
            if not going:
                break
            lengths = torch.tensor([len(text.unread) for text in texts], dtype=torch.int32, device="cpu")
            tokens = torch.tensor([token for text in texts for token in text.unread], device=self.device)
            logits = self.next_logits(tokens, lengths, cache, memory)[going]
            cache.advance(lengths)
            if not logits.isfinite().all():
                raise ValuesError(expected("finite logits", of="the model", got="NaN or infinity", do="look at the weights"))
            logits[:, list(self.blueprint.unsaid)] = -torch.inf
            for row, place in enumerate(going):
                if not texts[place].made:
                    logits[row, list(self.blueprint.unsaid_first)] = -torch.inf
            for place, token in zip(going, choose_tokens(logits, [texts[place].sampler for place in going]), strict=True):
                if token is None:
                    raise ValuesError(expected("logits of a token that may be said", of="the model", got="none", do="look at the weights"))
                texts[place].add(token, token in ends)
        return [text.made for text in texts]

    @property
    def _table(self) -> torch.Tensor:
        words: Any = self.tokens.words
        return words.weight

    def _rows(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        of: Any = self.tokens
        return of.rows(tokens, places)

    def _positions(self, starts: Sequence[int], queries: int, keys: int) -> torch.Tensor | None:
        return None if self.decoder_table is None else self.decoder_table(starts, queries, keys)

    def _decoded(
        self, x: torch.Tensor, seq_lens: torch.Tensor | None, memory: Memory, positions: torch.Tensor | None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """The last hidden states, as the head takes them. Each block takes ``positions``, if there are any, then keys and values, and which of these
        are seen."""
        before, behind = ([] if positions is None else [positions]), ([memory.seen] if self.blueprint.padded else [])
        extra = [value for keys in memory.keys for value in (*before, keys, *behind)]
        hidden = self.decoder(x, seq_lens, cache, extra_inputs=extra)
        return hidden if self.blueprint.head_scale == 1.0 else hidden * self.blueprint.head_scale

    def _check(self, count: int, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], max_tokens: int) -> None:
        for name, found in (("prompts", len(prompts)), ("sampling", len(samplings))):
            if found != count:
                raise ShapeError(expected(f"{count}, as there are inputs", of=name, got=found, do="give one for each"))
        if not all(prompts):
            raise ArgumentError(expected("at least one token", of="a prompt", got="none", do="leave prompts out for the model's own"))
        wrong = next((token for prompt in prompts for token in prompt if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            wanted = f"tokens from 0 to {self.vocabulary - 1}"
            raise ArgumentError(expected(wanted, of="a prompt", got=wrong, do="use the tokenizer of this model"))
        check_integer(max_tokens, "max_tokens", least=1)
        longest = max(map(len, prompts), default=0) + max_tokens
        if self.context is not None and longest > self.context:
            wanted = f"at most {self.context} tokens, the context of the model"
            raise ArgumentError(expected(wanted, of="prompts and max_tokens", got=longest, do="give fewer"))


class _Text:
    """A text on its way: of its tokens the cache has all but ``unread``, of which there are none when it has ended."""

    def __init__(self, prompt: Sequence[int], sampler: Sampler) -> None:
        self.unread, self.sampler, self.made = list(prompt), sampler, list[int]()

    def add(self, token: int, last: bool) -> None:
        self.made.append(token)
        self.sampler.add(token)
        self.unread = [] if last else [token]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of tokens as int64 ``[batch, longest]``, and their lengths. Raises ``ArgumentError`` for a list without any."""
    if not all(len(row) for row in rows):
        raise ArgumentError(expected("at least one token", of="each of the inputs", got="none", do="leave out what is empty"))
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64, device=device)
    return padded, torch.tensor([len(row) for row in rows], dtype=torch.int32, device="cpu")
